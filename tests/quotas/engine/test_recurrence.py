"""Weekly windows across changes of the clock, and timetables of replicas."""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quotas.engine import recurrence as r
from quotas.engine.timetable import (
    Timetable,
    damped,
    next_change,
    next_hour,
    replica_seconds,
    wanted_by_signal,
    wanted_now,
)

BERLIN = ZoneInfo("Europe/Berlin")
ALL = frozenset(range(7))


def weekly(begin: str, end: str, zone: str, first: str, until: str, days=ALL, skip=()) -> r.Weekly:
    return r.Weekly(
        frozenset(days),
        time.fromisoformat(begin),
        time.fromisoformat(end),
        zone,
        date.fromisoformat(first),
        date.fromisoformat(until),
        frozenset(date.fromisoformat(day) for day in skip),
    )


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def test_P049_a_weekly_window_stays_at_its_local_hours_across_a_change_of_clocks():
    rule = weekly("09:00", "17:00", "Europe/Berlin", "2026-10-23", "2026-10-26")
    found = list(r.occurrences(rule, utc("2026-10-20T00:00"), utc("2026-11-01T00:00")))
    assert [(o.start, o.end) for o in found] == [
        (utc("2026-10-23T07:00"), utc("2026-10-23T15:00")),
        (utc("2026-10-24T07:00"), utc("2026-10-24T15:00")),
        (utc("2026-10-25T08:00"), utc("2026-10-25T16:00")),
        (utc("2026-10-26T08:00"), utc("2026-10-26T16:00")),
    ]
    assert {o.start.astimezone(BERLIN).strftime("%H:%M") for o in found} == {"09:00"}


def test_S165_a_rule_from_summer_keeps_its_wall_clock_in_winter():
    rule = weekly("09:00", "17:00", "Europe/Berlin", "2026-06-01", "2027-02-28", days=[0])
    summer = r.occurrence_on(rule, date(2026, 6, 1))
    winter = r.occurrence_on(rule, date(2026, 12, 7))
    assert (summer.start, winter.start) == (utc("2026-06-01T07:00"), utc("2026-12-07T08:00"))
    assert summer.seconds == winter.seconds == 8 * 3600


def test_P048_days_of_23_and_25_hours_are_as_long_as_they_are():
    spring = r.occurrence_on(
        weekly("00:00", "00:00", "Europe/Berlin", "2026-03-29", "2026-03-29"), date(2026, 3, 29)
    )
    autumn = r.occurrence_on(
        weekly("00:00", "00:00", "Europe/Berlin", "2026-10-25", "2026-10-25"), date(2026, 10, 25)
    )
    assert (spring.seconds, autumn.seconds) == (23 * 3600, 25 * 3600)


def test_S164_a_window_in_the_hour_that_clocks_skip_never_ends_before_it_starts():
    day = "2026-03-29"  # 02:00 to 03:00 does not exist
    inside = weekly("02:15", "02:45", "Europe/Berlin", day, day)
    into = weekly("01:30", "02:30", "Europe/Berlin", day, day)
    out_of = weekly("02:30", "04:00", "Europe/Berlin", day, day)
    skip = utc("2026-03-29T01:00")
    assert r.occurrence_on(inside, date(2026, 3, 29)) is None
    assert r.occurrence_on(into, date(2026, 3, 29)) == r.Occurrence(
        date(2026, 3, 29), utc("2026-03-29T00:30"), skip
    )
    assert r.occurrence_on(out_of, date(2026, 3, 29)) == r.Occurrence(
        date(2026, 3, 29), skip, utc("2026-03-29T02:00")
    )


def test_a_time_that_clocks_show_twice_is_its_first_showing():
    assert r.instant(date(2026, 10, 25), time(2, 30), BERLIN) == utc("2026-10-25T00:30")
    assert r.instant(date(2026, 10, 25), time(3, 0), BERLIN) == utc("2026-10-25T02:00")


def test_a_window_over_midnight_begins_on_its_day():
    rule = weekly("22:00", "06:00", "Asia/Shanghai", "2026-12-04", "2026-12-05", days=[4])
    assert list(r.occurrences(rule, utc("2026-12-01T00:00"), utc("2026-12-31T00:00"))) == [
        r.Occurrence(date(2026, 12, 4), utc("2026-12-04T14:00"), utc("2026-12-04T22:00"))
    ]


def test_one_day_left_out_leaves_the_others():
    rule = weekly("09:00", "10:00", "UTC", "2026-12-01", "2026-12-04", skip=["2026-12-02"])
    assert [o.day.day for o in r.occurrences(rule, utc("2026-12-01T00:00"), utc("2026-12-31T00:00"))] == [
        1,
        3,
        4,
    ]
    assert (r.count(rule), r.total_seconds(rule)) == (3, 3 * 3600)


def test_what_is_going_on_counts_as_coming_and_what_is_over_does_not():
    rule = weekly("09:00", "17:00", "UTC", "2026-12-01", "2026-12-03")
    during = list(r.occurrences(rule, utc("2026-12-01T12:00"), utc("2026-12-02T09:00")))
    assert [o.day.day for o in during] == [1]
    assert [o.day.day for o in r.occurrences(rule, utc("2026-12-01T17:00"), utc("2026-12-02T09:01"))] == [2]


ZONES = st.sampled_from(
    ["UTC", "Asia/Shanghai", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kathmandu",
     "Pacific/Apia", "America/St_Johns", "Africa/Casablanca"]
)  # fmt: skip
CLOCKS = st.builds(time, st.integers(0, 23), st.integers(0, 59))
DATES = st.dates(date(2024, 1, 1), date(2029, 12, 31))


@given(ZONES, DATES, CLOCKS, CLOCKS)
def test_wall_clock_never_runs_backwards(zone, day, one, two):
    early, late = sorted([one, two])
    info = ZoneInfo(zone)
    assert (
        r.instant(day, early, info)
        <= r.instant(day, late, info)
        <= r.instant(day + timedelta(days=1), early, info)
    )


@given(ZONES, DATES, CLOCKS)
def test_an_instant_shows_its_wall_clock_unless_clocks_skip_it(zone, day, clock):
    info = ZoneInfo(zone)
    shown = r.instant(day, clock, info).astimezone(info).replace(tzinfo=None)
    local = datetime.combine(day, clock)
    back = local.replace(tzinfo=info).astimezone(UTC).astimezone(info).replace(tzinfo=None)
    assert shown == local or (back != local and shown > local)


@given(ZONES, DATES, CLOCKS, CLOCKS, st.sets(st.integers(0, 6), min_size=1), st.integers(0, 60))
def test_occurrences_are_in_order_forward_and_found_from_anywhere(zone, first, begin, end, days, length):
    rule = r.Weekly(frozenset(days), begin, end, zone, first, first + timedelta(days=length))
    since = datetime.combine(first, time(), UTC) - timedelta(days=3)
    before = since + timedelta(days=length + 10)
    found = list(r.occurrences(rule, since, before))
    assert all(o.start < o.end for o in found)
    assert [o.start for o in found] == sorted({o.start for o in found})
    assert len(found) == r.count(rule) and sum(o.seconds for o in found) == r.total_seconds(rule)
    assert all(o.day.weekday() in days for o in found)
    middle = since + (before - since) / 2
    parts = [*r.occurrences(rule, since, middle), *r.occurrences(rule, middle, before)]
    assert {o.day for o in parts} == {o.day for o in found}
    assert all(one.end <= two.start for one, two in pairwise(found))


def office(most: int = 4, night: int = 1, zone: str = "Asia/Shanghai") -> Timetable:
    day = tuple(most if 9 <= hour < 18 else night for hour in range(24))
    return Timetable(zone, (day,) * 5 + ((night,) * 24,) * 2)


def test_replicas_by_the_hour_of_the_week():
    table = office()
    assert [table.at(utc(t)) for t in ("2026-12-07T00:59", "2026-12-07T01:00", "2026-12-12T03:00")] == [
        1,
        4,
        1,
    ]
    assert (table.least, table.most) == (1, 4)
    assert next_change(table, utc("2026-12-07T00:30")) == (utc("2026-12-07T01:00"), 4)
    assert next_change(table, utc("2026-12-11T11:00")) == (utc("2026-12-14T01:00"), 4)
    assert next_change(office(2, 2), utc("2026-12-07T00:30")) is None


def test_a_higher_figure_is_asked_ahead_and_a_lower_one_is_not():
    table = office()
    assert wanted_now(table, utc("2026-12-07T00:49:59"), 600) == 1
    assert wanted_now(table, utc("2026-12-07T00:50"), 600) == 4
    assert wanted_now(table, utc("2026-12-07T09:59"), 600) == 4
    assert wanted_now(table, utc("2026-12-07T10:00"), 600) == 1


@pytest.mark.parametrize(
    ("start", "hours", "expected"),
    [("2026-10-25T00:00", 25, 25), ("2026-03-29T00:00", 23, 23), ("2026-06-01T00:00", 24, 24)],
)
def test_replica_time_of_long_and_short_days(start, hours, expected):
    table = office(1, 1, "Europe/Berlin")
    begin = datetime.fromisoformat(start).replace(tzinfo=BERLIN).astimezone(UTC)
    assert replica_seconds(table, begin, begin + timedelta(hours=hours)) == expected * 3600
    assert (begin + timedelta(hours=hours)).astimezone(BERLIN).hour == 0


def test_replica_time_counts_parts_of_hours():
    assert replica_seconds(office(), utc("2026-12-07T00:30"), utc("2026-12-07T01:15")) == 1800 + 4 * 900


@given(
    ZONES,
    st.datetimes(datetime(2024, 1, 1), datetime(2029, 1, 1)),
    st.integers(0, 400_000),
    st.integers(0, 400_000),
)
def test_replica_time_adds_up_wherever_it_is_cut(zone, begin, one, two):
    table = office(5, 2, zone)
    start = begin.replace(tzinfo=UTC, microsecond=0)
    middle, end = start + timedelta(seconds=one), start + timedelta(seconds=one + two)
    whole = replica_seconds(table, start, end)
    assert whole == replica_seconds(table, start, middle) + replica_seconds(table, middle, end)
    assert 2 * (one + two) <= whole <= 5 * (one + two)
    assert start < next_hour(start, ZoneInfo(zone)) <= start + timedelta(hours=1)


@pytest.mark.parametrize(
    ("value", "each", "wanted"),
    [(0, 100, 1), (1, 100, 1), (100, 100, 1), (101, 100, 2), (250, 100, 3), (9999, 100, 4)],
)
def test_replicas_for_a_signal(value, each, wanted):
    assert wanted_by_signal(value, each, 1, 4) == wanted


def test_a_signal_rises_at_once_and_falls_after_calm():
    t = utc("2026-12-07T00:00")
    recent = [(t, 4), (t + timedelta(seconds=100), 1)]
    assert damped(recent, t + timedelta(seconds=300), 300) == 4
    assert damped(recent, t + timedelta(seconds=301), 300) == 1
    assert damped(recent, t + timedelta(days=3), 300) == 1


def test_a_timetable_has_seven_days_of_24_hours():
    with pytest.raises(ValueError, match="7 days"):
        Timetable("UTC", ((1,) * 24,) * 6)
