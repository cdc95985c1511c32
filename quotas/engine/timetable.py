"""How many replicas a service wants: by the hour of the week in a zone of its own, or from a number that it
reports. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

HOURS = 24
DAYS = 7
HOUR_S = 3600
WEEK = timedelta(days=8)
"""A little more than a week, so that weeks with a changed clock are covered."""


@dataclass(frozen=True, slots=True)
class Timetable:
    """``replicas[day][hour]``, day 0 = Monday, hours of the wall clock in ``zone``. On a day with a repeated
    hour its figure holds twice as long; a skipped hour's figure does not occur.
    """

    zone: str
    replicas: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if len(self.replicas) != DAYS or any(len(day) != HOURS for day in self.replicas):
            raise ValueError("a timetable has 7 days of 24 hours")

    def at(self, moment: datetime) -> int:
        """Replicas wanted at an aware moment."""
        local = moment.astimezone(ZoneInfo(self.zone))
        return self.replicas[local.weekday()][local.hour]

    @property
    def least(self) -> int:
        """The smallest figure of the week."""
        return min(min(day) for day in self.replicas)

    @property
    def most(self) -> int:
        """The largest figure of the week."""
        return max(max(day) for day in self.replicas)


def next_hour(moment: datetime, zone: ZoneInfo) -> datetime:
    """When clocks of ``zone`` next show a full hour; always later than ``moment``."""
    local = moment.astimezone(zone)
    passed = timedelta(minutes=local.minute, seconds=local.second, microseconds=local.microsecond)
    return moment + timedelta(hours=1) - passed


def next_change(timetable: Timetable, moment: datetime) -> tuple[datetime, int] | None:
    """When the figure next becomes another one, and which; None where it never changes."""
    zone, now = ZoneInfo(timetable.zone), timetable.at(moment)
    at = next_hour(moment, zone)
    while at <= moment + WEEK:
        if timetable.at(at) != now:
            return at, timetable.at(at)
        at = next_hour(at, zone)
    return None


def replica_seconds(timetable: Timetable, start: datetime, end: datetime) -> int:
    """Replicas × real seconds over [start, end): what the timetable is charged for."""
    zone, total, at = ZoneInfo(timetable.zone), 0.0, start
    while at < end:
        following = min(end, next_hour(at, zone))
        total += timetable.at(at) * (following - at).total_seconds()
        at = following
    return round(total)


def wanted_now(timetable: Timetable, moment: datetime, lead_s: int) -> int:
    """The figure to have now: that of the hour, or a higher one due within ``lead_s`` seconds, so that
    lent-out cards are back in time.
    """
    ahead = moment + timedelta(seconds=lead_s)
    return max(timetable.at(moment), timetable.at(ahead))


def wanted_by_signal(value: int, per_replica: int, least: int, most: int) -> int:
    """Replicas for a reported load, rounded up: ``value`` 250 at 100 a replica → 3; within [least, most]."""
    if per_replica < 1:
        raise ValueError("a replica carries at least 1")
    return max(least, min(most, -(-value // per_replica)))


def damped(recent: Sequence[tuple[datetime, int]], moment: datetime, calm_s: int) -> int:
    """The highest figure wanted within the last ``calm_s`` seconds, else the newest: up at once, down only
    after calm. ``recent`` is (when, wanted), not empty, oldest first.
    """
    since = moment - timedelta(seconds=calm_s)
    return max([wanted for at, wanted in recent if at >= since] or [recent[-1][1]])
