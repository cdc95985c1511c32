"""Rollup arithmetic: sums that can be added, means at the end, coverage beside them."""

from __future__ import annotations

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monitoring.engine.rollup import Sums, bucket_start, coverage, covered_seconds, mean
from monitoring.engine.xid import effect_of, strongest


def sums(values: list[int | None]) -> Sums:
    out = Sums()
    for value in values:
        out.add(value)
    return out


@settings(deadline=None)
@given(st.lists(st.lists(st.one_of(st.none(), st.integers(0, 1000)), max_size=20), max_size=6))
def test_merged_buckets_equal_the_sum_of_all_samples(parts: list[list[int | None]]) -> None:
    whole, merged = sums([v for part in parts for v in part]), Sums()
    for part in parts:
        merged.merge(sums(part))
    assert merged == whole


def test_missing_measures_do_not_pull_a_mean_down() -> None:
    one = sums([900, None, 700])
    assert (one.n, one.total, one.top, mean(one.total, one.n)) == (2, 1600, 900, 800)
    assert mean(0, 0) is None and sums([0]).top == 0


def test_coverage_is_counted_in_ten_second_slots() -> None:
    assert covered_seconds([0, 1, 9_999]) == 10
    assert covered_seconds(range(0, 60_000, 1000)) == 60
    assert coverage(30, 60) == 0.5 and coverage(70, 60) == 1.0 and coverage(1, 0) is None


@pytest.mark.parametrize("hour", [0, 1, 2, 3])
def test_buckets_are_utc_on_the_day_the_clock_goes_back(hour: int) -> None:
    berlin = datetime(2026, 10, 25, hour, 30, tzinfo=ZoneInfo("Europe/Berlin"))
    start = bucket_start(berlin, 3600)
    assert start.tzinfo == UTC and start.minute == 0 and start <= berlin.astimezone(UTC)
    assert bucket_start(berlin, 86400).hour == 0


def test_xid_effects_escalate() -> None:
    app, drain, recovery = {"effect": "restart_app"}, {"effect": "drain_gpu"}, {"effect": "recovery"}
    assert effect_of(app, data={}, repeated=True, owners=1) == "restart_app"
    assert effect_of(app, data={}, repeated=True, owners=2) == "drain_gpu"
    assert effect_of(drain, data={}, repeated=False, owners=0) == "drain_gpu"
    assert effect_of(recovery, data={"recovery_action": 2}, repeated=False, owners=0) == "drain_node"
    assert effect_of(recovery, data={}, repeated=False, owners=0) == "drain_gpu"
    assert effect_of({"effect": "restart_then_drain"}, data={}, repeated=True, owners=1) == "drain_gpu"
    assert effect_of({"effect": "log_only"}, data={}, repeated=True, owners=1) == "watch"
    assert effect_of(None, data={}, repeated=False, owners=0) == "ticket"
    assert strongest(["ignore", "drain_gpu", "watch"]) == "drain_gpu" and strongest([]) == "ignore"
