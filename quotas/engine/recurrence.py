"""Weekly windows in a time zone of their own: which stretches of real time a rule like "Mon to Fri, 09:00 to
17:00, Asia/Shanghai" means.

The rule is kept in local wall-clock time, so a window stays at its hours when clocks change, and its real
length then differs. Both ends go through one mapping from wall clock to real time that never runs backwards:
a time that clocks show twice is its first showing, a time that they skip is the moment of the skip. So an end
never lies before its start, windows that touch on the clock touch in real time, and what lies wholly inside a
skipped hour does not occur. Pure: zones come from the standard library's database.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from zoneinfo import ZoneInfo

DAY = timedelta(days=1)
_SECOND = timedelta(seconds=1)


@dataclass(frozen=True, slots=True)
class Weekly:
    """``days``: 0 = Monday. ``end`` ≤ ``begin`` means the next day, so two windows never overlap. ``first`` and
    ``until`` are days on which windows begin, both included; ``skip`` are those left out.
    """

    days: frozenset[int]
    begin: time
    end: time
    zone: str
    first: date
    until: date
    skip: frozenset[date] = frozenset()


@dataclass(frozen=True, slots=True)
class Occurrence:
    """One window: the local day on which it begins, and [start, end) in UTC, start < end."""

    day: date
    start: datetime
    end: datetime

    @property
    def seconds(self) -> int:
        """Real length."""
        return int((self.end - self.start).total_seconds())


def instant(day: date, clock: time, zone: ZoneInfo) -> datetime:
    """The moment (UTC) at which clocks of ``zone`` first show ``clock`` on ``day``; where they skip it, the
    moment of the skip. Never decreases with the wall-clock time.
    """
    local = datetime.combine(day, clock)
    before = local.replace(tzinfo=zone, fold=0).astimezone(UTC)
    if before.astimezone(zone).replace(tzinfo=None) == local:
        return before
    # Skipped: the offset changes somewhere between the readings under the two offsets.
    low = local.replace(tzinfo=zone, fold=1).astimezone(UTC)
    high = before
    offset = low.astimezone(zone).utcoffset()
    while high - low > _SECOND:
        middle = low + (high - low) / 2
        middle -= timedelta(microseconds=middle.microsecond)
        if middle <= low:
            break
        if middle.astimezone(zone).utcoffset() == offset:
            low = middle
        else:
            high = middle
    return high


def occurrence_on(rule: Weekly, day: date) -> Occurrence | None:
    """The window that begins on ``day``, or None where the rule has none there."""
    if day.weekday() not in rule.days or not rule.first <= day <= rule.until or day in rule.skip:
        return None
    zone = ZoneInfo(rule.zone)
    start = instant(day, rule.begin, zone)
    end = instant(day if rule.end > rule.begin else day + DAY, rule.end, zone)
    return Occurrence(day, start, end) if start < end else None


def occurrences(rule: Weekly, since: datetime, before: datetime) -> Iterator[Occurrence]:
    """Windows that are not over at ``since`` and begin before ``before``, in order of time."""
    zone = ZoneInfo(rule.zone)
    day = max(rule.first, since.astimezone(zone).date() - 2 * DAY)
    last = min(rule.until, before.astimezone(zone).date() + DAY)
    while day <= last:
        found = occurrence_on(rule, day)
        if found is not None and found.end > since and found.start < before:
            yield found
        day += DAY


def total_seconds(rule: Weekly) -> int:
    """Real time of all windows together."""
    return sum(one.seconds for one in _all(rule))


def count(rule: Weekly) -> int:
    """How many windows there are."""
    return sum(1 for _ in _all(rule))


def instant_after(rule: Weekly) -> datetime:
    """The end of the last day on which a window may end: nothing of the rule is left then."""
    return instant(rule.until + 2 * DAY, time(), ZoneInfo(rule.zone))


def _all(rule: Weekly) -> Iterator[Occurrence]:
    day = rule.first
    while day <= rule.until:
        found = occurrence_on(rule, day)
        if found is not None:
            yield found
        day += DAY
