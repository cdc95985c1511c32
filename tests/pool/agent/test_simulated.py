"""The demo's simulated nodes speak the real protocol over real sockets, and run nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from monitoring.engine.health import Reading, counters_of, problems_of
from monitoring.engine.samples import parse_row
from pool.agent import simulated_devices as devices
from pool.executors.base import executor_for
from pool.models import Gpu, MigSlice, Node
from pool.services.enrolment import enrolment_code_create, enrolment_redeem
from portal.ops.actor import SYSTEM
from tests.pool.agent.builders import allocation, output, start, state, stop
from tests.pool.agent.conftest import ROOT, Site, clean_environment, wait_for

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.serial]
MIG = {"capable": True, "enabled": True, "slices": []}
MIG["slices"] = [{"uuid": "MIG-s1", "profile": "3g.40gb", "gi": 1, "ci": 0, "start": 4, "size": 4}]


def card(index: int, node: str, **more: Any) -> dict[str, Any]:
    made = {
        "uuid": f"GPU-{node}-{index}",
        "index": index,
        "name": "NVIDIA A100-SXM4-80GB",
        "memory_mib": 81920,
    }
    return made | {"power_limit_mw": 400000} | more


@pytest.fixture
def fleet(site: Site, tmp_path: Path) -> Iterator[Path]:
    nodes = []
    for name in ("sim-a", "sim-b"):
        code = enrolment_code_create(acting_user=SYSTEM, node_name=name)
        done = enrolment_redeem(code=code, hostname=name, machine_id=f"machine-{name}", facts={})
        Node.objects.filter(pk=done.node.pk).update(simulated=True)
        nodes.append(
            {
                "name": name,
                "token": done.token,
                "machine_id": f"machine-{name}",
                "cpu_milli": 64000,
                "memory_mib": 512000,
                "driver": "550.54.15",
                "cuda": "12.4",
                "gpus": [card(0, name), card(1, name, mig=MIG if name == "sim-b" else None)],
            }
        )
    nodes[0]["gpus"][1]["behaviour"] = "no_data"
    nodes[0]["gpus"][1].pop("mig")
    file = tmp_path / "fleet.json"
    file.write_text(json.dumps({"nodes": nodes}))
    command = [sys.executable, "-m", "pool.agent.simulated", str(file), "--url", site.url]
    process = subprocess.Popen(command, cwd=ROOT, env=clean_environment({}))
    yield file
    process.kill()
    process.wait()


def test_simulated_nodes_report_run_and_stop(
    fleet: Path, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pool.services.member_reports._follow", lambda member, **what: None)
    wait_for(lambda: Gpu.objects.count() == 4 and Node.objects.filter(health="ok").count() == 2)
    assert MigSlice.objects.get().profile == "3g.40gb" and Gpu.objects.get(uuid="GPU-sim-b-1").mig_enabled
    node = Node.objects.get(name="sim-a")
    member = allocation(node, "touch /tmp/never-made-by-a-simulation; sleep 60", [node.gpus.get(index=0)])
    start(member)
    wait_for(lambda: "touch /tmp/never-made" in output(member))
    assert state(member) == "running" and not Path("/tmp/never-made-by-a-simulation").exists()
    assert "CUDA_VISIBLE_DEVICES=GPU-sim-a-0" in output(member)

    def rows() -> list[list[Any]]:
        return [row for _, message in site.samples for row in message["rows"]]

    wait_for(lambda: {row[0] for row in rows()} >= {"GPU-sim-a-0", "GPU-sim-b-0", "GPU-sim-b-1"})
    assert "GPU-sim-a-1" not in {row[0] for row in rows()}
    assert all("util" not in row[3] and row[4]["util"] for row in rows() if row[0] == "GPU-sim-b-1")
    stop(member)
    wait_for(lambda: state(member) == "exited")
    executor_for(node.cluster).release(member=member)
    wait_for(lambda: state(member) == "free")


def test_curves_are_the_same_again_and_stay_in_bounds() -> None:
    for seed in ("a", "b", "c", "d"):
        for curve in devices.CURVES:
            values = [devices.busy_percent(curve, seed, age, 1.7e9 + age) for age in range(0, 900, 7)]
            assert values == [devices.busy_percent(curve, seed, age, 1.7e9 + age) for age in range(0, 900, 7)]
            assert min(values) > -5 and max(values) <= 115


def test_a_simulated_driver_tells_what_a_real_one_does_and_nothing_that_is_wrong() -> None:
    def at(clock: float) -> Any:
        (row, *_slices) = simulated.rows("2026-06-16T06:00:00.000Z", clock)
        return parse_row(row, now_ms=1_781_589_600_000, oldest_ms=0)

    simulated = devices.Card(
        card(0, "sim-c", nvlink={"links": 12, "peers": []}, pcie={"gen": 4, "width": 16})
    )
    idle = at(1_000.0)
    job = {"allocation": "a", "seed": "a/0", "curve": "training", "since": 1_000.0, "share": 1.0, "cards": 2}
    simulated.jobs = [job | {"pid": 7, "user": "li.ming", "mig": None, "memory": 0}]
    samples = [idle, *(at(1_000.0 + 10 * n) for n in range(1, 13))]
    work = samples[-1]

    assert (idle.throttle, idle.more["pcie_gen"], idle.more["nvlink_rx_kib_s"]) == (0x1, 1, 0)
    assert (work.throttle & ~0x4, work.more["pcie_gen"], work.more["pcie_width"]) == (0, 4, 16)
    assert work.more["nvlink_rx_kib_s"] > 0 and work.more["pcie_rx_kib_s"] > 0
    assert (work.more["fabric_state"], work.more["ecc_uncorr"], work.missing["fan"]) == (
        3,
        0,
        "not_supported",
    )
    spent = sum(10 * one.power_mw for one in samples[1:])
    assert abs(work.more["energy_mj"] - idle.more["energy_mj"] - spent) <= 10 * len(samples)
    for before, one in pairwise(samples):
        reading = Reading(one.more, one.missing, one.throttle, one.util_pm, one.temp_c, links=12)
        assert problems_of(reading, counters_of(before.more), links_due=12) == []
