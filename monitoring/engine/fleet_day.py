"""Where the GPU-hours of one card went on one day, and how much of what was held did work.

All times are milliseconds since 1970, all results GPU-milliseconds (a card has 1 a millisecond). The identities hold
by construction and to the last millisecond:

* installed = down + maintenance + unallocated + allocated; stranded is a part of unallocated that is told apart;
* allocated = effective + idle; unknown (no telemetry) is a part of effective: missing data is never idle.

What is held counts as allocated even on a card that is down meanwhile: it is billed, and the finding is another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from portal.kernel.units import MILLI_PER_GPU, MS_PER_HOUR

OK, DOWN, MAINTENANCE = "ok", "down", "maintenance"


@dataclass(frozen=True, slots=True)
class StateSpan:
    """A state of a card during [start, end)."""

    start: int
    end: int
    state: str


@dataclass(frozen=True, slots=True)
class StrandedSpan:
    """`milli` of the card that its layout leaves for nobody during [start, end)."""

    start: int
    end: int
    milli: int


@dataclass(frozen=True, slots=True)
class Held:
    """`charge` milli-GPU of the card held from `start` to `end` (so far). `key` names the use."""

    key: int
    start: int
    end: int
    charge: int


@dataclass(frozen=True, slots=True)
class Hour:
    """Telemetry of one UTC hour of a card: milliseconds with samples, and of these the busy ones (None: the measure
    was missing)."""

    covered: int
    busy: int | None


@dataclass(frozen=True, slots=True)
class CardDay:
    """The sums of one card on one day."""

    installed: int
    down: int
    maintenance: int
    allocated: int
    stranded: int

    @property
    def unallocated(self) -> int:
        """What nobody held and nothing hindered, stranded parts included."""
        return self.installed - self.down - self.maintenance - self.allocated


@dataclass(frozen=True, slots=True)
class UseDay:
    """The sums of one use on one day."""

    key: int
    allocated: int
    idle: int
    unknown: int

    @property
    def effective(self) -> int:
        """Held and not seen idle."""
        return self.allocated - self.idle


def gpu_ms(use: Held, start: int, end: int) -> int:
    """GPU-milliseconds of [start, end) of a use, as the ledger cuts them (differences of floors from its start)."""
    start, end = max(start, use.start), min(end, use.end)
    if end <= start:
        return 0
    origin = use.start
    return use.charge * (end - origin) // MILLI_PER_GPU - use.charge * (start - origin) // MILLI_PER_GPU


def card_day(
    start: int,
    end: int,
    states: Sequence[StateSpan],
    uses: Sequence[Held],
    stranded: Sequence[StrandedSpan] = (),
) -> CardDay:
    """The sums of a card on [start, end). States do not overlap; time without a state counts as installed only
    while something is held then."""
    marks = {start, end}
    edges = (
        [(s.start, s.end) for s in states]
        + [(u.start, u.end) for u in uses]
        + [(s.start, s.end) for s in stranded]
    )
    marks.update(mark for edge in edges for mark in edge if start < mark < end)
    installed = down = maintenance = wasted = 0
    for left, right in pairwise(sorted(marks)):
        state = next((s.state for s in states if s.start <= left < s.end), None)
        held = sum(u.charge for u in uses if u.start <= left < u.end)
        if state is None and not held:
            continue
        installed += right - left
        free = max(0, MILLI_PER_GPU - held) * (right - left)
        if state == DOWN:
            down += free
        elif state == MAINTENANCE:
            maintenance += free
        elif state == OK:
            lost = sum(s.milli for s in stranded if s.start <= left < s.end)
            wasted += min(free, lost * (right - left))
    allocated = sum(gpu_ms(use, start, end) for use in uses)
    return CardDay(
        installed, down // MILLI_PER_GPU, maintenance // MILLI_PER_GPU, allocated, wasted // MILLI_PER_GPU
    )


def use_days(start: int, end: int, uses: Sequence[Held], hours: Mapping[int, Hour]) -> list[UseDay]:
    """What each use of one card held and wasted on [start, end). `hours` by the start of their UTC hour.

    Within an hour the busy time of the card counts for whoever held it then: `idle` is the covered part of the held
    time minus the busy time, shared by how much of the card each held.
    """
    out = []
    for use in uses:
        allocated = gpu_ms(use, start, end)
        if allocated == 0 and min(end, use.end) <= max(start, use.start):
            continue
        idle = unknown = 0
        for bucket in _buckets(max(start, use.start), min(end, use.end)):
            piece = gpu_ms(use, max(start, bucket), min(end, bucket + MS_PER_HOUR))
            held = _wall(uses, bucket)
            seen, quiet = _seen(hours.get(bucket), held)
            unknown += piece * (held - seen) // held
            idle += piece * quiet // held
        out.append(UseDay(use.key, allocated, idle, unknown))
    return out


def _buckets(start: int, end: int) -> Iterable[int]:
    return range(start - start % MS_PER_HOUR, end, MS_PER_HOUR)


def _wall(uses: Sequence[Held], bucket: int) -> int:
    """Milliseconds of an hour in which the card was held by anybody."""
    edges = sorted(
        (max(u.start, bucket), min(u.end, bucket + MS_PER_HOUR))
        for u in uses
        if u.start < bucket + MS_PER_HOUR and u.end > bucket
    )
    total, reached = 0, bucket
    for left, right in edges:
        left = max(left, reached)
        if right > left:
            total += right - left
            reached = right
    return total


def _seen(hour: Hour | None, held: int) -> tuple[int, int]:
    """Of the held milliseconds of an hour: those with telemetry, and of these the idle ones."""
    if hour is None or hour.busy is None or hour.covered <= 0:
        return 0, 0
    seen = held * min(hour.covered, MS_PER_HOUR) // MS_PER_HOUR
    return seen, max(0, seen - min(seen, hour.busy))


__all__ = [
    "DOWN",
    "MAINTENANCE",
    "OK",
    "CardDay",
    "Held",
    "Hour",
    "StateSpan",
    "StrandedSpan",
    "UseDay",
    "card_day",
    "gpu_ms",
    "use_days",
]
