"""One row: each measure has a value or a coded reason why not."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monitoring.engine.samples import (
    BUSY,
    MEASURES,
    QUIET,
    UNKNOWN,
    RowRefused,
    activity,
    latched,
    parse_host,
    parse_row,
    value_or_reason,
)

NOW = 1_800_000_000_000
AT = "2027-01-15T08:00:00.000Z"
UUID = "GPU-7c1e04b2-93fd-5a1b-8e60-2d4f9ab1c733"


def parse(
    values: dict[str, Any],
    missing: dict[str, str] | None = None,
    *,
    at: Any = AT,
    mig: str | None = None,
    procs: Any = (),
):
    return parse_row(
        [UUID, mig, at, values, missing or {}, list(procs)], now_ms=NOW, oldest_ms=NOW - 86_400_000
    )


def test_exact_values_and_units() -> None:
    s = parse(
        {
            "util": 93,
            "sm": 87.35,
            "mem_used": 73728,
            "mem_total": 81559,
            "mem_reserved": 614,
            "temp": 66,
            "power_mw": 621337,
        }
    )
    assert (s.at_ms, s.util_pm, s.sm_pm, s.mem_used_mib, s.mem_total_mib) == (NOW, 930, 874, 73728, 81559)
    assert (s.mem_reserved_mib, s.temp_c, s.power_mw) == (614, 66, 621337)
    assert s.missing == {"sm_clock": "not_reported", "throttle": "not_reported"}


def test_telemetry_na_p065_only_the_bad_measure_is_null_with_its_reason() -> None:
    s = parse(
        {"util": "[N/A]", "temp": "ERR!", "power_mw": "[Unknown Error]", "mem_used": 10, "mem_total": 81559}
    )
    assert (s.util_pm, s.temp_c, s.power_mw, s.mem_used_mib) == (None, None, None, 10)
    assert s.missing["util"] == "not_supported"
    assert s.missing["temp"] == s.missing["power_mw"] == "error"


@pytest.mark.parametrize(
    ("measure", "raw", "reason"),
    [
        ("util", 250, "out_of_range"),
        ("util", -1, "out_of_range"),
        ("util", math.nan, "not_a_number"),
        ("util", math.inf, "not_a_number"),
        ("util", True, "not_a_number"),
        ("util", [], "not_a_number"),
        ("util", "many", "not_a_number"),
        ("mem_total", 17_000_000, "out_of_range"),
        ("mem_used", 0xFFFFFFFFFFFFFFFF, "blank"),
        ("mem_used", 9.223372036854775807e18, "blank"),
        ("power_mw", 0xFFFFFFFF, "blank"),
        ("temp", 2147483632, "blank"),
        ("temp", 2147483635, "blank"),
        ("power_mw", 140737488355328, "blank"),
        ("temp", 400, "out_of_range"),
        ("power_mw", 99_000_000, "out_of_range"),
    ],
)
def test_telemetry_na_p066_p17_what_cannot_be_true_is_null_and_flagged(
    measure: str, raw: Any, reason: str
) -> None:
    s = parse({"util": 50, "mem_used": 100, "mem_total": 81559, "temp": 40, "power_mw": 90_000, measure: raw})
    column = next(m.column for m in MEASURES if m.name == measure)
    assert getattr(s, column) is None
    assert s.missing[measure] == reason
    others = {"util_pm", "temp_c", "power_mw"} - {column}
    assert all(getattr(s, c) is not None for c in others)


def test_zero_is_a_value_and_missing_is_not_zero_p19() -> None:
    s = parse(
        {"util": 0, "mem_used": 0, "mem_total": 81559}, {"power_mw": "not_supported", "temp": "gpu_lost"}
    )
    assert (s.util_pm, s.mem_used_mib, s.power_mw, s.temp_c) == (0, 0, None, None)
    assert s.missing["power_mw"] == "not_supported"
    assert s.missing["temp"] == "gpu_lost"
    assert s.missing["sm"] == "not_reported"


def test_used_above_total_is_refused_alone() -> None:
    s = parse({"mem_used": 90_000, "mem_total": 81_559, "temp": 40})
    assert s.mem_used_mib is None and s.mem_total_mib == 81_559 and s.missing["mem_used"] == "out_of_range"


def test_mig_telemetry_p04_board_values_never_count_per_slice() -> None:
    s = parse(
        {"mem_used": 100, "mem_total": 19968, "temp": 41, "power_mw": 112_252},
        {"util": "not_supported"},
        mig="MIG-x",
    )
    assert s.temp_c is None and s.power_mw is None and s.mem_used_mib == 100
    assert s.missing["power_mw"] == "card_level"


@pytest.mark.parametrize(
    ("at", "code"),
    [
        ("2038-01-19T03:14:08Z", "future"),
        ("2027-01-15T08:01:00.001Z", "future"),
        ("2027-01-14T07:59:59Z", "too_old"),
        ("1970-01-01T00:00:00Z", "too_old"),
        ("yesterday", "bad_time"),
        ("2027-01-15T08:00:00", "bad_time"),
        (None, "bad_time"),
        (1_800_000_000, "bad_time"),
    ],
)
def test_a_row_of_an_impossible_time_is_refused(at: Any, code: str) -> None:
    with pytest.raises(RowRefused) as refused:
        parse({"util": 1}, at=at)
    assert refused.value.code == code


def test_times_are_instants_whatever_their_zone() -> None:
    assert parse({}, at="2027-01-15T16:00:00+08:00").at_ms == NOW
    assert parse({}, at="2027-01-15T08:00:59.999Z").at_ms == NOW + 59_999


@pytest.mark.parametrize(
    "raw",
    [None, 5, "text", [], [UUID], {"gpu": UUID}, [UUID, None, AT, [], {}, []], [UUID, None, AT, {}, 3, []]],
)
def test_a_row_of_another_shape_is_refused(raw: Any) -> None:
    with pytest.raises(RowRefused) as refused:
        parse_row(raw, now_ms=NOW, oldest_ms=0)
    assert refused.value.code == "bad_row"


def test_processes_keep_name_user_memory_and_never_arguments_p20() -> None:
    s = parse(
        {},
        procs=[
            {
                "pid": 1,
                "name": "/usr/bin/python train.py --token=secret",
                "user": "wutao",
                "mem_mib": 70_000,
                "env": {"A": "b"},
            },
            {"pid": 2, "name": None, "user": None, "mem_mib": None},
            {"pid": "3"},
            {"pid": True},
            {"pid": -1},
            "text",
        ],
    )
    assert s.processes == [
        {"pid": 1, "name": "python", "user": "wutao", "mem_mib": 70_000},
        {"pid": 2, "name": "", "user": "", "mem_mib": None},
    ]


def test_idle_p063_missing_activity_is_unknown_never_quiet() -> None:
    assert activity(parse({"mem_used": 0, "mem_total": 81559})) == UNKNOWN


def test_idle_two_signals() -> None:
    process = [{"pid": 9, "name": "python", "user": "a", "mem_mib": 10}]
    assert activity(parse({"util": 3}, procs=process)) == BUSY
    assert activity(parse({"util": 0}, procs=process)) == QUIET
    assert activity(parse({"util": 3})) == QUIET
    assert activity(parse({"util": 60})) == BUSY


def test_driver_g126_p33_a_latched_busy_counter_is_not_work() -> None:
    stuck = parse({"util": 100, "mem_used": 3, "mem_total": 81559, "power_mw": 90_000})
    assert latched(stuck) and activity(stuck) == QUIET
    real = parse({"util": 100, "mem_used": 40_000, "mem_total": 81559})
    assert not latched(real) and activity(real) == BUSY


def test_busy_time_and_sm_activity_are_never_mixed_p01() -> None:
    s = parse({"util": 100}, {"sm": "not_supported"})
    assert s.util_pm == 1000 and s.sm_pm is None and s.missing["sm"] == "not_supported"


def test_host_load() -> None:
    assert parse_host({"cpu": 41.2, "iowait": 3, "mem_used_mib": 1000}).cpu_pm == 412
    assert parse_host({"cpu": 400, "iowait": None}).cpu_pm is None
    assert parse_host({}) is None and parse_host("x") is None


@settings(deadline=None)
@given(
    st.one_of(
        st.integers(),
        st.floats(),
        st.text(max_size=12),
        st.none(),
        st.booleans(),
        st.lists(st.integers(), max_size=2),
    )
)
def test_any_raw_value_is_a_value_in_range_or_a_reason(raw: Any) -> None:
    for measure in MEASURES:
        value, reason = value_or_reason(measure, raw)
        assert (value is None) == bool(reason)
        assert value is None or measure.low <= value <= measure.high
