"""Ledger cuts: price, local day and owner boundaries, with sums that never drift."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quotas.engine.billing import (
    BillingError,
    OwnerSpan,
    PriceSpan,
    Use,
    cut_use,
    day_bounds,
    gpu_ms_between,
    highest_cost,
    month_bounds,
    total,
)

SHANGHAI, BERLIN = ZoneInfo("Asia/Shanghai"), ZoneInfo("Europe/Berlin")
HOUR = 3_600_000


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def price(version: int, per_hour: int, start: str, end: str | None = None) -> PriceSpan:
    return PriceSpan(version, per_hour * 1_000_000, at(start), at(end) if end else None)


def test_a_use_is_cut_at_local_midnight_price_and_owner() -> None:
    use = Use(at("2026-03-31 12:00"), at("2026-03-31 20:00"), 2000)
    prices = [price(1, 10, "2026-01-01", "2026-03-31 14:00"), price(2, 16, "2026-03-31 14:00")]
    owners = [
        OwnerSpan("lin", "vg", at("2026-01-01"), at("2026-03-31 18:00")),
        OwnerSpan("chen", "vm", at("2026-03-31 18:00")),
    ]
    cuts = cut_use(use, prices=prices, owners=owners, zone=SHANGHAI)
    assert [
        (
            c.start.hour,
            c.end.hour,
            c.day,
            c.owner,
            c.department,
            c.price and c.price.version,
            c.gpu_ms,
            c.amount_micro,
        )
        for c in cuts
    ] == [
        (12, 14, date(2026, 3, 31), "lin", "vg", 1, 4 * HOUR, 40_000_000),
        (14, 16, date(2026, 3, 31), "lin", "vg", 2, 4 * HOUR, 64_000_000),
        (16, 18, date(2026, 4, 1), "lin", "vg", 2, 4 * HOUR, 64_000_000),
        (18, 20, date(2026, 4, 1), "chen", "vm", 2, 4 * HOUR, 64_000_000),
    ]
    assert total(cuts) == (16 * HOUR, 232_000_000)


@pytest.mark.parametrize(("day", "hours"), [("2026-03-29", 23), ("2026-10-25", 25), ("2026-06-01", 24)])
def test_days_of_23_and_25_hours(day: str, hours: int) -> None:
    start, end = day_bounds(date.fromisoformat(day), BERLIN)
    assert end - start == timedelta(hours=hours)
    cuts = cut_use(Use(start, end, 1000), prices=[price(1, 1, "2020-01-01")], owners=(), zone=BERLIN)
    assert [(c.day.isoformat(), c.gpu_ms, c.amount_micro) for c in cuts] == [
        (day, hours * HOUR, hours * 1_000_000)
    ]


def test_month_bounds_over_the_year() -> None:
    assert month_bounds(2026, 12, SHANGHAI) == (at("2026-11-30 16:00"), at("2026-12-31 16:00"))


def test_without_a_price_time_counts_and_money_is_zero() -> None:
    use = Use(at("2026-01-01 00:00"), at("2026-01-01 02:00"), 500)
    cuts = cut_use(use, prices=[price(7, 4, "2026-01-01 01:00")], owners=(), zone=SHANGHAI)
    assert [(c.price and c.price.version, c.gpu_ms, c.amount_micro) for c in cuts] == [
        (None, HOUR // 2, 0),
        (7, HOUR // 2, 2_000_000),
    ]


def test_money_rounds_half_up_per_cut() -> None:
    use = Use(at("2026-01-01"), at("2026-01-01") + timedelta(milliseconds=1), 1000)
    for per_hour, micro in ((1_800_000, 1), (5_400_000, 2), (1_799_999, 0)):
        cuts = cut_use(use, prices=[PriceSpan(1, per_hour, at("2020-01-01"))], owners=(), zone=SHANGHAI)
        assert cuts[0].amount_micro == micro


def test_no_length_no_lines() -> None:
    assert cut_use(Use(at("2026-01-01"), at("2026-01-01"), 1000), prices=(), owners=(), zone=SHANGHAI) == []


def test_bad_input_is_refused() -> None:
    with pytest.raises(BillingError):
        cut_use(Use(at("2026-01-02"), at("2026-01-01"), 1000), prices=(), owners=(), zone=SHANGHAI)
    with pytest.raises(BillingError):
        cut_use(Use(at("2026-01-01"), at("2026-01-02"), -1), prices=(), owners=(), zone=SHANGHAI)
    overlap = [price(1, 1, "2026-01-01"), price(2, 1, "2026-02-01")]
    with pytest.raises(BillingError):
        cut_use(Use(at("2026-01-01"), at("2026-01-02"), 1), prices=overlap, owners=(), zone=SHANGHAI)


def test_highest_cost_follows_price_changes() -> None:
    prices = [price(1, 10, "2026-01-01", "2026-01-01 01:00"), price(2, 20, "2026-01-01 01:00")]
    assert highest_cost(8000, 2 * HOUR, at("2026-01-01"), prices, SHANGHAI) == 8 * 30_000_000


@given(
    charge=st.integers(1, 8000),
    points=st.lists(st.integers(0, 40 * 86_400_000), min_size=2, max_size=8, unique=True).map(sorted),
)
def test_cuts_of_one_use_sum_to_the_whole(charge: int, points: list[int]) -> None:
    base = at("2026-03-20")
    marks = [base + timedelta(milliseconds=p) for p in points]
    whole = gpu_ms_between(marks[0], marks[0], marks[-1], charge)
    assert whole == charge * (points[-1] - points[0]) // 1000
    pieces = [gpu_ms_between(marks[0], a, b, charge) for a, b in zip(marks, marks[1:], strict=False)]
    assert sum(pieces) == whole
    cuts = cut_use(Use(marks[0], marks[-1], charge), prices=(), owners=(), zone=BERLIN)
    assert total(cuts)[0] == whole
    assert all(a.end == b.start for a, b in zip(cuts, cuts[1:], strict=False))
    later = cut_use(Use(marks[0], marks[-1], charge), prices=(), owners=(), zone=BERLIN, since=marks[1])
    before = gpu_ms_between(marks[0], marks[0], marks[1], charge)
    assert before + total(later)[0] == whole
