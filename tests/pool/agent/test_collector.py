"""NVML in its child: what it reads, and that nothing it does takes the agent down."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterator

import pytest

from pool.agent import collector as module
from pool.agent.collector import Collector
from pool.agent.jobs import Jobs
from pool.agent.outbox import Outbox
from pool.agent.telemetry import Telemetry
from tests.pool.agent.conftest import FakeNvml


@pytest.fixture
def reading(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    for name, value in nvml.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(module, "RESTART_SECONDS", (0.1,))
    yield nvml


def made(timeout: float | None = None) -> Collector:
    return Collector([sys.executable, "-m", "pool.agent", "_collect"], timeout)


async def rows(collector: Collector) -> dict[str, list]:
    answer = await collector.ask("sample")
    assert answer["ok"], answer
    return {row[1] or row[0]: row for row in answer["rows"]}


async def test_what_cannot_be_read_is_named_and_never_zero(reading: FakeNvml) -> None:
    """G111: each field by itself."""
    reading.set(gpu_0_power_error=3, gpu_0_temp_error=4, gpu_0_util_error=999, gpu_1_power=4294967295)
    reading.set(gpu_0_mem_reserved=643825664, gpu_0_mem_used=17782800384, gpu_0_mem_total=150754820096)
    collector = made()
    found = await rows(collector)
    values, missing = found["GPU-test-0"][3], found["GPU-test-0"][4]
    assert not {"power_mw", "temp", "util", "sm"} & set(values)
    assert (missing["power_mw"], missing["temp"], missing["util"]) == (
        "not_supported",
        "not_permitted",
        "error",
    )
    assert (values["mem_total"], values["mem_used"], values["mem_reserved"]) == (143771, 16959, 614)
    assert found["GPU-test-1"][4]["power_mw"] == "not_supported", "the type's maximum is a missing value"
    await collector.close()


async def test_g110_memory_that_the_card_shares_with_its_host_is_not_told_and_never_zero(
    reading: FakeNvml,
) -> None:
    """Unified memory (GB10): the driver tells none, so there is neither a size nor a share of it."""
    reading.set(gpu_0_mem_error=3)
    collector = made()
    found = await rows(collector)
    values, missing = found["GPU-test-0"][3], found["GPU-test-0"][4]
    assert not {"mem_used", "mem_total", "mem_reserved"} & set(values)
    assert {missing[name] for name in ("mem_used", "mem_total", "mem_reserved")} == {"not_supported"}
    shared, plain = (await collector.ask("inventory"))["gpus"]
    assert (shared["memory_mib"], plain["memory_mib"]) == (None, 81920)
    await collector.close()


async def test_a_mig_card_has_its_slices_and_no_utilization(reading: FakeNvml) -> None:
    reading.set(gpu_1_mig=1)
    reading.lines = [
        "gpu.1.slice=MIG-a,3g.40gb,1,0,4,4,42949672960,1073741824",
        "gpu.1.slice=MIG-b,1g.10gb,9,0,0,1,10737418240,0",
    ]
    reading.write()
    collector = made()
    answer = await collector.ask("inventory")
    plain, card = answer["gpus"]
    assert plain["mig"] == {"capable": False, "enabled": False, "slices": []}
    assert card["mig"]["capable"] and card["mig"]["enabled"]
    assert [
        (s["uuid"], s["profile"], s["start"], s["size"], s["memory_mib"]) for s in card["mig"]["slices"]
    ] == [
        ("MIG-a", "3g.40gb", 4, 4, 40960),
        ("MIG-b", "1g.10gb", 0, 1, 10240),
    ]
    found = await rows(collector)
    assert "util" not in found["GPU-test-1"][3] and found["GPU-test-1"][3]["power_mw"] == 60000
    assert found["MIG-a"][3]["mem_used"] == 1024 and not {"power_mw", "temp"} & set(found["MIG-a"][3])
    await collector.close()


async def test_links_name_their_peers(reading: FakeNvml) -> None:
    reading.set(gpu_0_links="12,1", gpu_1_links="12,0")
    collector = made()
    cards = (await collector.ask("inventory"))["gpus"]
    assert cards[0]["nvlink"] == {"links": 12, "peers": ["GPU-test-1"]}
    await collector.close()


@pytest.mark.parametrize("trouble", ["crash", "hang"])
async def test_a_library_that_crashes_or_hangs_is_killed_and_started_again(
    reading: FakeNvml, trouble: str
) -> None:
    """G109: NVML lives in a child process."""
    collector = made(timeout=1.5)
    await rows(collector)
    reading.set(**{trouble: 1})
    began = time.monotonic()
    answer = await collector.ask("sample")
    assert answer == {"ok": False, "reason": "collector_down"} and time.monotonic() - began < 8
    assert collector.breaks == 1
    reading.set(**{trouble: None})
    await asyncio.sleep(0.3)
    assert len(await rows(collector)) == 2
    await collector.close()


async def test_a_card_that_goes_is_lost_and_one_that_comes_is_back(reading: FakeNvml, tmp_path) -> None:
    collector = made()
    await collector.ask("inventory")
    os.makedirs(tmp_path / "jobs")
    telemetry = Telemetry(Jobs(str(tmp_path), str(tmp_path), Outbox(str(tmp_path / "outbox"))))

    async def events() -> list[tuple[str, str]]:
        answer = await collector.ask("sample")
        return [(e["kind"], e["gpu_uuid"]) for e in telemetry.digest(answer["rows"])]

    assert await events() == []
    reading.set(gpu_1_lost=1)
    assert await events() == [("gpu_lost", "GPU-test-1")]
    assert await events() == []
    reading.set(gpu_1_lost=None)
    assert await events() == [("gpu_back", "GPU-test-1")]
    await collector.close()


async def test_a_driver_that_fails_to_load_has_a_reason(reading: FakeNvml) -> None:
    for code, reason in ((9, "no_driver"), (18, "driver_mismatch"), (999, "nvml_error")):
        reading.set(init_error=code)
        collector = made()
        assert await collector.ask("inventory") == {"ok": False, "reason": reason}
        await collector.close()
