"""Builders of a pool in the database for tests: nodes that an agent is heard from, queued requests,
drive-through.
"""

from __future__ import annotations

import itertools
from typing import Any

from pool.models import Allocation, Cluster, Gpu, MigSlice, Node, Site
from pool.services.capacity import capacity_refresh
from pool.services.member_reports import member_ended, member_free, member_running
from portal.accounts.models import Department, User
from portal.kernel.clock import now
from quotas.engine.charge import fraction_charge, whole_charge
from quotas.models import CapacityRequest, GpuFlavour
from tests.quotas import build

_n = itertools.count(1)


def cluster(code: str = "", site: str = "bj", **values: Any) -> Cluster:
    where, _made = Site.objects.get_or_create(code=site, defaults={"name": site.upper()})
    code = code or f"c{next(_n)}"
    made, _made = Cluster.objects.get_or_create(code=code, defaults={"name": code, "site": where, **values})
    return made


def node(what: GpuFlavour | None, gpus: int = 8, where: Cluster | None = None, **values: Any) -> Node:
    """A healthy node with whole cards, heard of now; the flavours' capacity is told to quotas."""
    number = next(_n)
    made = Node.objects.create(
        name=values.pop("name", f"n{number}"),
        cluster=where or cluster("main"),
        **{
            "health": "ok", "last_heartbeat_at": now(), "cpu_milli": 64000, "memory_mib": 512_000, "driver": "550.54",
            "cuda": "12.4", **values,
        },
    )  # fmt: skip
    if what is not None:
        Gpu.objects.bulk_create(
            Gpu(
                uuid=f"GPU-{number:04d}-{index}",
                node=made,
                flavour=what,
                index=index,
                model_name=what.name,
                memory_mib=what.memory_mib,
            )
            for index in range(gpus)
        )
        capacity_refresh()
    return made


def slices(gpu: Gpu, *rows: tuple[str, int, int, int]) -> list[MigSlice]:
    """Split a card: (profile, start, size, compute slices) each."""
    Gpu.objects.filter(pk=gpu.pk).update(mig_enabled=True)
    return [
        MigSlice.objects.create(
            gpu=gpu, uuid=f"MIG-{gpu.pk}-{start}", profile=profile, gpu_instance=start, start=start, size=size,
            compute_slices=compute, memory_mib=4864,
        )
        for profile, start, size, compute in rows
    ]  # fmt: skip


def queued(
    where: Department, what: GpuFlavour | None, gpus: int = 1, who: User | None = None, **values: Any
) -> CapacityRequest:
    """A request in the queue, as approval leaves it."""
    shape = values.get("shape", "whole")
    nodes = values.get("nodes", 1)
    if shape == "fraction" and what is not None:
        charge = fraction_charge(
            values.get("fraction_milli") or 0, values.get("fraction_mib") or 0, what.memory_mib
        )
    else:
        charge = 0 if shape in ("cpu", "mig") else whole_charge(gpus * nodes)
    return CapacityRequest.objects.create(
        requester=who or build.user(home=where),
        department=where,
        flavour=what,
        gpus_per_node=gpus,
        state="queued",
        **{
            "charge_milli": charge, "queued_at": now(), "submitted_at": now(), "duration_s": 3600,
            "command": "python train.py", "run_kind": "command", **values,
        },
    )  # fmt: skip


def report_running(allocation: Allocation) -> None:
    """All members' agents say: it runs."""
    for member in allocation.members.select_related("node", "allocation").order_by("number"):
        member_running(member=member, at=now(), pid=1000 + member.number, account="lin")


def report_ended(
    allocation: Allocation, exit_code: int = 0, error: dict[str, Any] | None = None, **values: Any
) -> None:
    for member in allocation.members.select_related("node", "allocation").order_by("number"):
        member_ended(
            member=member, at=now(), exit_code=exit_code, signal=None, error=error,
            failed_start=values.get("failed_start", False),
        )  # fmt: skip


def report_free(allocation: Allocation, free: bool = True) -> None:
    """All members' agents looked at the cards."""
    for member in allocation.members.select_related("node", "allocation").order_by("number"):
        found = {
            lease.gpu.uuid: {"free": free, "reason": None if free else "process", "procs": []}
            for lease in allocation.leases.filter(member=member.number).select_related("gpu")
        }
        member_free(member=member, at=now(), found=found)
