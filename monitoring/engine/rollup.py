"""Arithmetic of rollups: sums, counts and maxima can be added; a mean is made at the end, beside its coverage."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from portal.kernel.units import EPOCH

STEPS = (60, 3600, 86400)
SLOT_S = 10  # a ten-second slot is covered when it holds at least one sample
MEASURES = ("util", "sm", "mem", "temp", "power")


@dataclass(slots=True)
class Sums:
    """One measure in one bucket: `n` samples had it, `total` is their sum, `top` their maximum."""

    n: int = 0
    total: int = 0
    top: int | None = None

    def add(self, value: int | None) -> None:
        """Take one sample; a missing measure changes nothing (it is not a 0)."""
        if value is None:
            return
        self.n += 1
        self.total += value
        self.top = value if self.top is None else max(self.top, value)

    def merge(self, other: Sums) -> None:
        """Take another bucket in: associative and commutative, so days are exactly the sum of their hours."""
        self.n += other.n
        self.total += other.total
        if other.top is not None:
            self.top = other.top if self.top is None else max(self.top, other.top)


def mean(total: int, n: int) -> float | None:
    """The mean of the samples that had the measure; None (not 0) where none had."""
    return total / n if n else None


def coverage(covered_s: int, span_s: int) -> float | None:
    """Share of a span with telemetry, 0 to 1; None for an empty span."""
    return min(1.0, covered_s / span_s) if span_s > 0 else None


def covered_seconds(at_ms: Iterable[int]) -> int:
    """Seconds covered by samples at these times: distinct ten-second slots times ten."""
    return len({moment // (SLOT_S * 1000) for moment in at_ms}) * SLOT_S


def bucket_start(moment: datetime, step: int) -> datetime:
    """Start of the UTC bucket of `step` seconds that holds `moment` (aware)."""
    seconds = (moment.astimezone(UTC) - EPOCH) // timedelta(seconds=1)
    return EPOCH + timedelta(seconds=seconds - seconds % step)
