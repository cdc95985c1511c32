"""How long the installation needs to come in step with an outside system: 1,000 nodes, 5,000 running allocations.

The real path from Slurm's commands on: programs that print recorded answers of that size stand for the controller, so
that reading, comparing and writing are measured and a controller's own speed is not. First a full reconcile after an
outage in which things happened (ends, losses, strays, drains), then one that finds nothing new, then how long one
single end takes to be seen with a look a second.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.perf._database import fresh_database

NODES, CARDS, RUNNING = 1000, 8, 5000
ENDED, VANISHED, STRAYS, DRAINED = 50, 10, 5, 5
CHANGES = 5
LOOK_EVERY_S = 1.0


def run() -> dict[str, Any]:
    """Seconds of a full reconcile with and without news, and of one change until it is seen."""
    with tempfile.TemporaryDirectory(prefix="gpupool-perf-sync-") as folder, fresh_database():
        return _measure(Path(folder))


class Controller:
    """Programs in a folder that print what is in the files beside them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.jobs: dict[int, dict[str, Any]] = {}
        self.nodes: list[dict[str, Any]] = []
        programs = {
            "squeue": 'case "$*" in *--json*) cat jobs.json;; *) exit 0;; esac',
            "sinfo": "cat nodes.json",
            "sacct": "exit 0",
            "scancel": "exit 0",
            "scontrol": 'echo "SLURM_VERSION           = 22.05.8"',
        }
        for name, text in programs.items():
            path = folder / name
            path.write_text(f'#!/bin/sh\ncd "{folder}" && {text}\n')
            path.chmod(0o755)
        os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"

    def write(self) -> None:
        for name, rows in (("jobs", list(self.jobs.values())), ("nodes", self.nodes)):
            half = self.folder / f"{name}.half"
            half.write_text(json.dumps({name: rows}))
            half.rename(self.folder / f"{name}.json")


def _job(number: int, uid: Any, node: str, index: int, began: int) -> dict[str, Any]:
    """As Slurm 22.05 prints one, its long parts included."""
    return {
        "account": "ml", "accrue_time": began, "admin_comment": "", "array_job_id": 0, "batch_flag": True,
        "batch_host": node, "cluster": "testbed", "comment": "A-1 R-1", "cpus": 4, "end_time": began + 36000,
        "eligible_time": began, "exit_code": 0, "flags": ["JOB_WAS_RUNNING"],
        "gres_detail": [f"gpu:a100:1(IDX:{index})"],
        "job_id": number, "job_state": "RUNNING", "name": f"gpupool-{uid}", "nodes": node, "partition": "batch",
        "job_resources": {"nodes": node, "allocated_cpus": 4, "allocated_hosts": 1, "allocated_nodes": [
            {"sockets": {str(n): {"cores": {"0": "allocated"}} for n in range(4)}, "nodename": node,
             "cpus_used": 0, "memory_used": 0, "memory_allocated": 1000}]},
        "priority": 1, "qos": "normal", "requeue": False, "restart_cnt": 0, "start_time": began,
        "state_reason": "None", "submit_time": began, "time_limit": 600, "tres_per_node": "gres:gpu:a100:1",
        "tres_alloc_str": "cpu=4,mem=1000M,node=1,billing=4,gres/gpu=1", "user_name": "root",
        "standard_output": f"/shared/gpupool/output/{uid}.log", "current_working_directory": "/shared/gpupool",
    }  # fmt: skip


def _node(name: str, state: str = "mixed", reason: str = "") -> dict[str, Any]:
    return {
        "name": name, "address": name, "state": state, "state_flags": ["DRAIN"] if reason else [], "reason": reason,
        "cpus": 64, "real_memory": 512000, "gres": f"gpu:a100:{CARDS}", "gres_used": "gpu:a100:5(IDX:0-4)",
        "features": "a100", "partitions": ["batch"], "slurmd_version": "22.05.8", "operating_system": "Linux",
    }  # fmt: skip


def _measure(folder: Path) -> dict[str, Any]:
    import structlog

    from pool.models import AllocationMember, Cluster
    from pool.services.polling import cluster_poll

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    controller = Controller(folder)
    cluster, uids = _fill(controller)
    numbers = sorted(controller.jobs)
    ends, gone = numbers[:ENDED], numbers[ENDED : ENDED + VANISHED]
    for number in ends:
        controller.jobs[number] |= {"job_state": "COMPLETED", "end_time": int(time.time())}
    for number in gone:
        del controller.jobs[number]
    for place in range(STRAYS):
        controller.jobs[900_000 + place] = _job(900_000 + place, uids[place], "n0000", 0, int(time.time()))
    for place in range(DRAINED):
        controller.nodes[-1 - place] = _node(controller.nodes[-1 - place]["name"], reason="fan broken")
    controller.write()
    began = time.monotonic()
    first = cluster_poll(cluster_id=cluster.pk, nodes=True)
    full = time.monotonic() - began
    assert first.answered, first.code
    assert first.reports == ENDED + VANISHED, first.reports
    for place in range(STRAYS):  # what was cancelled is gone over there
        del controller.jobs[900_000 + place]
    controller.write()
    cluster_poll(cluster_id=cluster.pk, nodes=True)  # what had vanished is seen free
    began = time.monotonic()
    quiet = cluster_poll(cluster_id=cluster.pk, nodes=True)
    nothing = time.monotonic() - began
    assert (quiet.reports, quiet.strays) == (0, 0)
    assert quiet.members >= RUNNING - ENDED - VANISHED
    seen: list[float] = []
    for place in range(CHANGES):
        number = numbers[ENDED + VANISHED + place]
        controller.jobs[number] |= {"job_state": "COMPLETED", "end_time": int(time.time())}
        controller.write()
        changed = time.monotonic()
        while True:
            look = time.monotonic()
            cluster_poll(cluster_id=cluster.pk)
            state = AllocationMember.objects.values_list("state", flat=True).get(external_id=str(number))
            if state not in ("running", "starting"):
                break
            time.sleep(max(0.0, LOOK_EVERY_S - (time.monotonic() - look)))
        # A change comes at any moment between two looks: on average half an interval, at worst a whole one, before one.
        seen.append(time.monotonic() - changed + LOOK_EVERY_S)
    assert Cluster.objects.get(pk=cluster.pk).away_since is None
    return {
        "sizes": {
            "nodes": NODES,
            "running": RUNNING,
            "ended": ENDED,
            "vanished": VANISHED,
            "drained": DRAINED,
        },
        "figures": {
            "full_reconcile_s": round(full, 2),
            "nothing_new_s": round(nothing, 2),
            "change_seen_worst_s": round(max(seen), 2),
        },
        "aims": {"full_reconcile_s": ["<", 10], "change_seen_worst_s": ["<", 2]},
    }


def _fill(controller: Controller) -> tuple[Any, list[Any]]:
    """The fleet and its running work in the database and over there, in step."""
    from django.db import transaction
    from django.db.backends.postgresql.psycopg_any import DateTimeTZRange, NumericRange

    from pool.executors.slurm import orders, read
    from pool.executors.slurm.settings import SlurmSettings
    from pool.models import Allocation, AllocationMember, Cluster, Gpu, Lease, LeaseSpan, Node
    from pool.services.leases import leases_write
    from pool.services.outside_nodes import _digest
    from portal.kernel.clock import now
    from quotas.models import CapacityRequest
    from tests.pool import builders
    from tests.quotas import build

    team, flavour, who = build.department("ml"), build.flavour("a100", installed=None), build.user("lin")
    cluster = builders.cluster("hpc", executor="slurm")
    models = {"a100": {"model": "A100", "memory_mib": 40960}}
    Cluster.objects.filter(pk=cluster.pk).update(settings={"folder": "/tmp", "models": models})
    cluster.refresh_from_db()
    assert cluster.site.code  # read now: leases are written by COPY, beside which nothing can be read
    controller.nodes = [_node(f"n{number:04d}") for number in range(NODES)]
    found = [orders.found(read.node(row), SlurmSettings(models=models)) for row in controller.nodes]
    at = now()
    nodes = Node.objects.bulk_create(
        Node(
            name=item.name, cluster=cluster, health="ok", last_heartbeat_at=at, cpu_milli=item.cpu_milli,
            memory_mib=item.memory_mib, address=item.address, facts={**item.facts, "outside_digest": _digest(item)},
        )
        for item in found
    )  # fmt: skip
    gpus = Gpu.objects.bulk_create(
        (
            Gpu(
                uuid=card["uuid"], node=node, flavour=flavour, index=card["index"], model_name="A100", memory_mib=40960
            )
            for node, item in zip(nodes, found, strict=True)
            for card in item.gpus or ()
        ),
        batch_size=2000,
    )  # fmt: skip
    requests = CapacityRequest.objects.bulk_create(
        (
            CapacityRequest(
                requester=who, department=team, flavour=flavour, gpus_per_node=1, state="allocated", charge_milli=1000,
                queued_at=at, submitted_at=at, duration_s=36000, command="python train.py",
            )
            for _ in range(RUNNING + STRAYS)
        ),
        batch_size=1000,
    )  # fmt: skip
    began = at - timedelta(hours=1)
    allocations = Allocation.objects.bulk_create(
        (
            Allocation(
                request=request, holder=who, department=team, flavour=flavour, charge_milli=1000,
                state="running" if place < RUNNING else "ended", started_at=began,
                expires_at=began + timedelta(hours=9), ended_at=None if place < RUNNING else at,
            )
            for place, request in enumerate(requests)
        ),
        batch_size=1000,
    )  # fmt: skip
    running = allocations[:RUNNING]
    # Five of the eight cards of each node are taken.
    cards = [gpus[(place // 5) * CARDS + place % 5] for place in range(RUNNING)]
    AllocationMember.objects.bulk_create(
        (
            AllocationMember(
                allocation=allocation, number=0, node_id=card.node_id, state="running", started_at=began,
                ordered_at=began, external_id=str(1000 + place),
            )
            for place, (allocation, card) in enumerate(zip(running, cards, strict=True))
        ),
        batch_size=2000,
    )  # fmt: skip
    leases, spans = [], []
    for allocation, card in zip(running, cards, strict=True):
        lease = Lease(allocation=allocation, gpu=card, charge=1000, started_at=began)
        leases.append(lease)
        whole, since = NumericRange(0, 1000), DateTimeTZRange(began, None)
        spans.append(LeaseSpan(lease=lease, gpu=card, span=whole, during=since))
    with transaction.atomic():
        leases_write(leases, spans)
    names = {node.pk: node.name for node in nodes}
    for place, (allocation, card) in enumerate(zip(running, cards, strict=True)):
        number = 1000 + place
        controller.jobs[number] = _job(
            number, allocation.uid, names[card.node_id], card.index, int(began.timestamp())
        )
    controller.write()
    return cluster, [allocation.uid for allocation in allocations[RUNNING:]]
