"""GPU-time and its cost, cut at every boundary that changes who pays what on which day.

A use is one card share held from ``start`` to ``end`` (end excluded). It is cut where the price version
changes, where the local day of the billing zone ends (23- and 25-hour days included), and where the owner
or department changes.

Rounding, stated once: GPU-milliseconds of a cut are the difference of floor(charge × elapsed ms ÷ 1000)
counted from the start of the use, so cuts always sum to the whole; money of a cut is its GPU-milliseconds ×
price ÷ 3,600,000, rounded half up to a micro unit. Totals are sums of cuts and nothing else, so every
total equals its drill-down.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from functools import lru_cache
from typing import TypeVar
from zoneinfo import ZoneInfo

from portal.kernel.units import MILLI_PER_GPU, cost_micro, to_ms
from quotas.engine.ids import NodeId

Span = TypeVar("Span")


class BillingError(ValueError):
    """Intervals overlap, run backwards, or have no zone."""


@dataclass(frozen=True, slots=True)
class PriceSpan:
    """One price version: micro-currency per GPU-hour, power included, in force from ``start`` (included) to ``end``
    (None = open).
    """

    version: NodeId
    micro_per_gpu_hour: int
    start: datetime
    end: datetime | None = None


@dataclass(frozen=True, slots=True)
class OwnerSpan:
    """Who holds the use in that time."""

    owner: NodeId
    department: NodeId
    start: datetime
    end: datetime | None = None


@dataclass(frozen=True, slots=True)
class Use:
    """``charge_milli`` of one card from ``start`` to ``end``; ``start`` = ``end`` costs nothing."""

    start: datetime
    end: datetime
    charge_milli: int


@dataclass(frozen=True, slots=True)
class Cut:
    """One ledger line: no boundary lies inside it. ``price`` None = no price was in force, amount 0."""

    start: datetime
    end: datetime
    day: date
    owner: NodeId | None
    department: NodeId | None
    price: PriceSpan | None
    gpu_ms: int
    amount_micro: int


@lru_cache(maxsize=4096)
def day_start(day: date, zone: ZoneInfo) -> datetime:
    """The first moment of a local day, in UTC; where midnight is skipped, the moment the clock jumps."""
    return datetime.combine(day, time.min, tzinfo=zone).astimezone(UTC)


def local_day(moment: datetime, zone: ZoneInfo) -> date:
    """The billing day that an aware moment belongs to."""
    return moment.astimezone(zone).date()


def day_bounds(day: date, zone: ZoneInfo) -> tuple[datetime, datetime]:
    """Start and excluded end of a local day in UTC: 23, 24 or 25 hours apart."""
    return day_start(day, zone), day_start(day + timedelta(days=1), zone)


def month_bounds(year: int, month: int, zone: ZoneInfo) -> tuple[datetime, datetime]:
    """Start and excluded end of a local month in UTC."""
    following = date(year + month // 12, month % 12 + 1, 1)
    return day_start(date(year, month, 1), zone), day_start(following, zone)


def gpu_ms_between(use_start: datetime, start: datetime, end: datetime, charge_milli: int) -> int:
    """GPU-milliseconds of [start, end) of a use that began at ``use_start``; cuts of one use sum exactly."""
    origin = to_ms(use_start)
    done = charge_milli * (to_ms(start) - origin) // MILLI_PER_GPU
    return charge_milli * (to_ms(end) - origin) // MILLI_PER_GPU - done


def cut_use(
    use: Use,
    *,
    prices: Sequence[PriceSpan],
    owners: Sequence[OwnerSpan],
    zone: ZoneInfo,
    since: datetime | None = None,
) -> list[Cut]:
    """The ledger lines of one use in time order, without gap or overlap; [] when it has no length.

    With ``since`` only lines after it are given (the earlier ones stand in the ledger already) and their
    figures are the same as in one run over the whole. BillingError for a negative charge, naive times, a
    use that runs backwards, or price or owner spans that overlap.
    """
    if use.start.tzinfo is None or use.end.tzinfo is None:
        raise BillingError("times must carry a zone")
    if use.end < use.start or use.charge_milli < 0:
        raise BillingError("a use may not run backwards or have a negative charge")
    price_list = _ordered([(p.start, p.end, p) for p in prices])
    owner_list = _ordered([(o.start, o.end, o) for o in owners])
    first = use.start if since is None else max(use.start, since)
    marks = sorted(_marks(first, use.end, price_list, owner_list, zone))
    cuts: list[Cut] = []
    for start, end in zip(marks, marks[1:], strict=False):
        price = _at(price_list, start)
        owner = _at(owner_list, start)
        gpu_ms = gpu_ms_between(use.start, start, end, use.charge_milli)
        cuts.append(
            Cut(
                start=start,
                end=end,
                day=local_day(start, zone),
                owner=owner.owner if owner else None,
                department=owner.department if owner else None,
                price=price,
                gpu_ms=gpu_ms,
                amount_micro=cost_micro(gpu_ms, price.micro_per_gpu_hour) if price else 0,
            )
        )
    return cuts


def highest_cost(
    charge_milli: int, duration_ms: int, start: datetime, prices: Sequence[PriceSpan], zone: ZoneInfo
) -> int:
    """What an ask costs at most if it runs its whole time from ``start``: the estimate shown before
    approval.
    """
    use = Use(start, start + timedelta(milliseconds=duration_ms), charge_milli)
    return sum(cut.amount_micro for cut in cut_use(use, prices=prices, owners=(), zone=zone))


def total(cuts: Iterable[Cut]) -> tuple[int, int]:
    """(GPU-milliseconds, micro-currency) of some cuts: plain sums."""
    gpu_ms, amount = 0, 0
    for cut in cuts:
        gpu_ms += cut.gpu_ms
        amount += cut.amount_micro
    return gpu_ms, amount


def _marks(
    start: datetime,
    end: datetime,
    prices: Sequence[tuple[datetime, datetime | None, PriceSpan]],
    owners: Sequence[tuple[datetime, datetime | None, OwnerSpan]],
    zone: ZoneInfo,
) -> set[datetime]:
    if end <= start:
        return set()
    marks = {start, end}
    for from_, until, _ in [*prices, *owners]:
        marks.update(mark for mark in (from_, until) if mark is not None and start < mark < end)
    day = local_day(start, zone) + timedelta(days=1)
    while (mark := day_start(day, zone)) < end:
        if mark > start:
            marks.add(mark)
        day += timedelta(days=1)
    return {mark.astimezone(UTC) for mark in marks}


def _ordered(
    spans: list[tuple[datetime, datetime | None, Span]],
) -> list[tuple[datetime, datetime | None, Span]]:
    spans.sort(key=lambda row: row[0])
    for (_, until, _one), (start, _until, _two) in zip(spans, spans[1:], strict=False):
        if until is None or until > start:
            raise BillingError("price or owner spans overlap")
    return spans


def _at(spans: Sequence[tuple[datetime, datetime | None, Span]], moment: datetime) -> Span | None:
    index = bisect_right(spans, moment, key=lambda row: row[0]) - 1
    if index < 0:
        return None
    _, until, span = spans[index]
    return span if until is None or moment < until else None
