"""Traps of GPU telemetry (facts/pitfalls.json), each by its id, from a source's words to what is stored and judged.

Those of Kubernetes and Slurm states (P30, P35, P36) and of placement (P32) are tested with their executors and with
placement; the agent's own (P09, P10, P20 to P25) in tests/pool/agent/test_pitfalls.py.
"""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from monitoring.engine.health import Reading, problems_of
from monitoring.engine.samples import BUSY, QUIET, UNKNOWN, activity, latched, parse_row
from monitoring.models import GpuSample, GpuState
from monitoring.services import ingest, intake
from monitoring.sources import dcgm, text
from monitoring.sources.reading import Scrape, sample_of
from portal.kernel.clock import set_clock
from quotas.selectors.catalogue import catalogue_match
from tests.monitoring import builders as b

NOW = 1_800_000_000_000
AT = "2027-01-15T08:00:00.000Z"
UUID = "GPU-7c1e04b2-93fd-5a1b-8e60-2d4f9ab1c733"
T0 = datetime(2026, 6, 16, 6, 3, 12, tzinfo=UTC)


TESTS = Path(__file__).resolve().parents[1]
FACTS = TESTS.parents[1] / "shared" / "facts" / "pitfalls.json"


@pytest.mark.shared
@pytest.mark.skipif(not FACTS.exists(), reason="needs ../shared/facts")
def test_each_trap_has_a_test_that_names_it() -> None:
    names = " ".join(
        name
        for path in TESTS.rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)", path.read_text(encoding="utf-8"))
    )
    ids = [row["id"] for row in json.loads(FACTS.read_text(encoding="utf-8"))]
    assert len(ids) == 36
    assert [one for one in ids if not re.search(rf"_{one.lower()}(_|\b)", names)] == []


def parse(
    values: dict[str, Any], missing: dict[str, str] | None = None, *, procs: Any = (), mig: str | None = None
) -> Any:
    row = [UUID, mig, AT, values, missing or {}, list(procs)]
    return parse_row(row, now_ms=NOW, oldest_ms=NOW - 86_400_000)


def scraped(**values: Any) -> Any:
    lines = "".join(f'{name}{{UUID="{UUID}"}} {value}\n' for name, value in values.items())
    into = Scrape()
    dcgm.scrape(text.metrics(lines, into.problems), into)
    dcgm.settle(into)
    return sample_of(into.readings[UUID, None], at_ms=NOW, source="exporter")


def test_p01_time_of_memory_traffic_is_never_read_as_fill_and_busy_is_never_sm_activity() -> None:
    one = scraped(DCGM_FI_DEV_GPU_UTIL=97, DCGM_FI_DEV_MEM_COPY_UTIL=88, DCGM_FI_PROF_SM_ACTIVE=0.12)
    assert (one.util_pm, one.sm_pm, one.mem_used_mib, one.missing["mem_used"]) == (
        970,
        120,
        None,
        "not_reported",
    )
    assert "88" not in str(one)
    from monitoring.web import words

    assert str(words.MEASURES["busy"]) != str(words.MEASURES["sm"])


def test_p02_the_first_minute_of_a_driver_is_neither_busy_nor_idle() -> None:
    assert activity(parse({"util": 98, "settling": 1})) == UNKNOWN
    assert activity(parse({"util": 0, "settling": 1})) == UNKNOWN
    assert activity(parse({"util": 98})) == BUSY


def test_p05_reserve_is_told_apart_and_derived_where_it_is_not_told() -> None:
    mib = 1024 * 1024
    told = {"mem_total": 150754820096 // mib, "mem_used": 17782800384 // mib, "mem_free": 132329242624 // mib}
    one = parse(told)
    assert abs(one.mem_reserved_mib - 643825664 // mib) <= 1, "total = used + free + reserved"
    assert parse({**told, "mem_reserved": 614}).mem_reserved_mib == 614
    old = parse({"mem_total": 16384, "mem_used": 500, "mem_free": 15884})
    assert old.mem_reserved_mib == 0, "an old driver counts the reserve as used"
    assert parse({"mem_total": 81559, "mem_used": 73728}).missing["mem_reserved"] == "not_reported"


@pytest.mark.parametrize(
    ("name", "mib", "code"),
    [
        ("NVIDIA A100-SXM4-80GB", 81920, "a100-sxm4-80g"),
        ("NVIDIA H100 80GB HBM3", 81559, "h100-sxm5-80g"),
        ("NVIDIA H200", 143771, "h200-sxm-141g"),
    ],
)
def test_p06_the_catalogue_is_met_by_mib_not_by_marketing_gb(name: str, mib: int, code: str) -> None:
    row = catalogue_match(name, mib)
    assert row is not None and row["memory_gb"] * 1024 * 0.9 < mib < row["memory_gb"] * 1024 * 1.03, (
        row,
        code,
    )


def test_p07_ecc_takes_memory_of_a_gddr_card_and_it_is_the_same_model() -> None:
    on, off = catalogue_match("Tesla T4", 15360), catalogue_match("Tesla T4", 16384)
    assert on is not None and off is not None and on["code"] == off["code"]


def test_p08_power_that_a_card_does_not_tell_is_no_zero() -> None:
    one = parse({"util": 40}, {"power_mw": "not_supported", "power_limit_mw": "not_supported"})
    assert (one.power_mw, one.missing["power_mw"]) == (None, "not_supported")
    assert one.missing["power_limit_mw"] == "not_supported" and "power_limit_mw" not in one.more


def test_p11_the_margin_falls_and_may_be_negative_and_the_threshold_is_the_cards_own() -> None:
    one = parse({"temp": 89, "tlimit": -2, "slowdown_c": 89})
    assert (one.temp_c, one.more["tlimit"], one.more["slowdown_c"]) == (89, -2, 89)


def test_p12_no_fan_is_no_fault_and_a_fan_error_is() -> None:
    none = Reading(more={}, missing={"fan": "not_supported"})
    assert problems_of(none, {}) == []
    for temp in (None, 40, 70):
        assert problems_of(Reading(more={"fan": 0}, missing={}, temp_c=temp), {}) == [], "it rests"
    assert problems_of(Reading(more={"fan": 400}, missing={}, temp_c=84), {}) == []
    (stuck,) = problems_of(Reading(more={"fan": 0}, missing={}, temp_c=71), {})
    assert (stuck.code, stuck.facts) == ("gpu_fan_error", {"temp_c": 71})
    assert [p.code for p in problems_of(Reading(more={}, missing={"fan": "error"}), {})] == ["gpu_fan_error"]


@pytest.mark.parametrize(
    ("bits", "codes"),
    [
        (0x1, []),
        (0x2, []),
        (0x4, []),
        (0x10, []),
        (0x100, []),
        (0x8, ["gpu_throttled"]),
        (0x20, ["gpu_throttled"]),
        (0x40, ["gpu_throttled"]),
        (0x41, ["gpu_throttled"]),
        (0x80, ["gpu_power_brake"]),
    ],
)
def test_p13_only_the_bits_of_a_throttle_raise_something(bits: int, codes: list[str]) -> None:
    reading = Reading(more={}, missing={}, throttle=bits, activity_pm=900, temp_c=88)
    assert [p.code for p in problems_of(reading, {})] == codes


def test_p14_volatile_errors_grow_the_counter_that_fell_began_anew_and_the_threshold_means_replace() -> None:
    one = parse({"ecc_uncorr": 2, "ecc_uncorr_total": 7, "ecc_threshold": 1, "ecc_corr": 0})
    codes = {p.code for p in problems_of(Reading(more=one.more, missing={}), {"ecc_uncorr": 1})}
    assert codes == {"gpu_ecc", "gpu_ecc_replace"}
    (reset,) = problems_of(Reading(more={"ecc_uncorr": 1}, missing={}), {"ecc_uncorr": 5})
    assert reset.facts["errors"] == 1
    assert problems_of(Reading(more={"ecc_uncorr": 1}, missing={}), {"ecc_uncorr": 1}) == []
    geforce = parse({}, {"ecc_uncorr": "not_supported", "ecc_threshold": "not_supported"})
    assert problems_of(Reading(more=geforce.more, missing=geforce.missing), {}) == []


@pytest.mark.parametrize(
    ("values", "missing", "code"),
    [
        (
            {"remap_pending": 1, "remap_failure": 0, "remap_uncorr": 1},
            {"retired_pending": "not_supported"},
            "gpu_remap_pending",
        ),
        ({"retired_pending": 1, "retired_pages": 3}, {"remap_pending": "not_supported"}, "gpu_remap_pending"),
        ({"remap_pending": 1, "remap_failure": 1}, {}, "gpu_remap_failed"),
    ],
)
def test_p15_remapped_rows_and_retired_pages_are_one_state(values: Any, missing: Any, code: str) -> None:
    one = parse(values, missing)
    assert [p.code for p in problems_of(Reading(more=one.more, missing=one.missing), {})] == [code]


@pytest.mark.parametrize(
    "reason", ["not_supported", "not_permitted", "gpu_lost", "reset_required", "collector_down"]
)
def test_p19_a_missing_measure_keeps_its_reason_and_is_no_zero(reason: str) -> None:
    one = parse({}, {"util": reason, "temp": reason})
    assert (one.util_pm, one.temp_c) == (None, None)
    assert (one.missing["util"], one.missing["temp"]) == (reason, reason)


def test_p20_processes_that_could_not_be_read_are_unknown_and_never_idle() -> None:
    hidden = parse({"util": 2}, {"processes": "not_permitted"})
    assert activity(hidden) == UNKNOWN and hidden.missing["processes"] == "not_permitted"
    assert activity(parse({"util": 2})) == QUIET
    (process,) = parse({}, procs=[{"pid": 7, "name": "[Not Found]", "mem_mib": 0xFFFFFFFFFFFFFFFF}]).processes
    assert process["mem_mib"] is None, "a process of unknown memory keeps its row"
    told = parse({}, procs=[{"pid": 7, "name": "a", "sm": 48}, {"pid": 8, "name": "b", "sm": 250}]).processes
    assert [one.get("sm") for one in told] == [48, None]


@pytest.mark.django_db
def test_p21_a_card_whose_index_changed_is_the_same_card() -> None:
    with set_clock(T0):
        node = b.node("idx-01", 2)
        first, second = node.gpus.order_by("index")
        rows = [b.row(second, T0, util=11), b.row(first, T0, util=22)]
        type(first).objects.filter(pk=first.pk).update(index=1)
        type(first).objects.filter(pk=second.pk).update(index=0)
        batch, _ = intake.batch_of(node_id=node.pk, message=b.message(*rows))
        ingest.samples_write(batches=[batch])
    assert dict(GpuState.objects.values_list("gpu_id", "util_pm")) == {first.pk: 220, second.pk: 110}


@pytest.mark.django_db
def test_p22_a_new_instance_has_a_history_of_its_own() -> None:
    """A profile made anew has another UUID: rows with the old one are refused, history stays with card and instance."""
    with set_clock(T0):
        node = b.node("mig-01", 1)
        card = node.gpus.get()
        old = b.slice_of(card, 3, 0, 4)
        write(node, b.row(card, T0 - timedelta(minutes=5), mig=old.uuid))
        type(old).objects.filter(pk=old.pk).update(gone_at=T0)
        new = type(old).objects.create(
            gpu=card, uuid="MIG-new", profile=old.profile, gpu_instance=5, start=4, size=4
        )
        from monitoring.selectors.identity import identity_forget

        identity_forget()
        refused = write(node, b.row(card, T0, mig=new.uuid), b.row(card, T0, mig=old.uuid))
    assert refused == {"unknown": 1}
    assert sorted(GpuSample.objects.values_list("slot", flat=True)) == [4, 6]


def write(node: Any, *rows: Any) -> dict[str, int]:
    batch, refused = intake.batch_of(node_id=node.pk, message=b.message(*rows))
    ingest.samples_write(batches=[batch])
    return dict(refused)


def test_p26_every_null_spelling_is_a_reason() -> None:
    for spelled, reason in (
        ("[N/A]", "not_supported"), ("N/A", "not_supported"), ("[Not Supported]", "not_supported"),
        ("[Unknown Error]", "error"), ("[GPU is lost]", "gpu_lost"), ("[GPU requires reset]", "reset_required"),
        ("[Insufficient Permissions]", "not_permitted"), ("ERR!", "error"), ("None", "not_supported"),
        ("", "not_supported"),
    ):  # fmt: skip
        one = parse({"util": spelled, "fan": spelled})
        assert (one.util_pm, one.missing["util"], one.missing["fan"]) == (None, reason, reason), spelled


def test_p28_without_profiling_busy_time_stands_alone() -> None:
    one = scraped(DCGM_FI_DEV_GPU_UTIL=60)
    assert (one.util_pm, one.sm_pm, one.missing["sm"]) == (600, None, "not_supported")
    assert activity(one) == BUSY
    profiled = scraped(
        DCGM_FI_DEV_GPU_UTIL=100, DCGM_FI_PROF_GR_ENGINE_ACTIVE=0.3, DCGM_FI_PROF_SM_ACTIVE=0.2
    )
    assert profiled.sm_pm == 200, "SM activity goes before that of the engine"


def test_p29_a_shared_card_says_so() -> None:
    into = Scrape()
    lines = "".join(f'DCGM_FI_DEV_GPU_UTIL{{UUID="{UUID}",namespace="n",pod="p{n}"}} 50\n' for n in range(3))
    dcgm.scrape(text.metrics(lines, into.problems), into)
    dcgm.settle(into)
    one = sample_of(into.readings[UUID, None], at_ms=NOW, source="exporter")
    assert (one.more["shared"], one.util_pm) == (3, 500)


def test_p31_units_are_converted_at_the_edge() -> None:
    one = scraped(
        DCGM_FI_DEV_POWER_USAGE="112.252", DCGM_FI_DEV_FB_USED=1024, DCGM_FI_PROF_PCIE_TX_BYTES=1048576,
        DCGM_FI_PROF_DRAM_ACTIVE="0.5", DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL=77, DCGM_FI_DEV_SM_CLOCK=1410,
    )  # fmt: skip
    assert (one.power_mw, one.mem_used_mib, one.sm_clock_mhz) == (112_252, 1024, 1410)
    assert one.more == {"pcie_tx_kib_s": 1024, "dram": 500}


def test_p33_a_counter_latched_at_full_is_not_work() -> None:
    one = parse({"util": 100, "mem_used": 4, "mem_total": 183_359})
    assert latched(one) and activity(one) == QUIET
    assert not latched(parse({"util": 100, "mem_used": 4}, {"processes": "not_permitted"}))
    assert activity(parse({"util": 100, "mem_used": 90_000})) == BUSY


def test_p34_memory_that_is_the_hosts_own_is_not_told_as_the_cards() -> None:
    one = parse({"util": 12}, {"mem_used": "not_supported", "mem_total": "not_supported"})
    assert (one.mem_used_mib, one.mem_total_mib, one.missing["mem_total"]) == (None, None, "not_supported")


@pytest.mark.parametrize("state", [1, 2, 3])
def test_p32_the_state_of_the_fabric_is_kept(state: int) -> None:
    assert parse({"fabric_state": state}).more["fabric_state"] == state
