"""The period of a report: whole local days of the billing zone, and the period before that it is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, datetime, timedelta

from django.utils.translation import gettext as _

from portal.kernel.clock import now
from portal.kernel.errors import Invalid
from quotas.engine.billing import day_bounds, day_start, local_day
from quotas.selectors.billing_time import billing_zone, first_of_month, next_month, previous_month
from quotas.selectors.money import day_from, month_from

LONGEST = 1100
"""Days of the longest period: three years."""

DAYS = {"last7": 7, "last30": 30, "last90": 90}


@dataclass(frozen=True, slots=True)
class Period:
    """Local days `first` to `last`, both included. `code` is how it was chosen: month, last30, …, days.

    `part`: of the last day only so much counts, as (minutes passed, minutes of the day that passes); so a running
    period is compared with the same part of an earlier one.
    """

    code: str
    first: date
    last: date
    part: tuple[int, int] | None = None

    @property
    def start(self) -> datetime:
        """The first moment."""
        return day_start(self.first, billing_zone())

    @property
    def end(self) -> datetime:
        """The moment after the last."""
        end = day_start(self.last + timedelta(days=1), billing_zone())
        if self.part is None:
            return end
        start = day_start(self.last, billing_zone())
        passed, length = self.part
        return start + (end - start) * passed / length

    @property
    def until(self) -> datetime:
        """The end, or now while it lasts."""
        return min(self.end, now())

    @property
    def days(self) -> list[date]:
        """All its days."""
        return [self.first + timedelta(days=n) for n in range((self.last - self.first).days + 1)]

    @property
    def is_month(self) -> bool:
        """Whether it is one whole month."""
        return self.first.day == 1 and self.last + timedelta(days=1) == next_month(self.first)

    @property
    def so_far(self) -> bool:
        """Whether it still lasts."""
        return self.until < self.end

    def before(self, at: datetime | None = None) -> Period:
        """The month before a month, else as many days before. Of a period that still lasts only as much as has passed
        of it `at` (now if not given): the same days, and the same part of the last of them.
        """
        if self.is_month:
            first, last = previous_month(self.first), self.first - timedelta(days=1)
        else:
            first = self.first - (self.last - self.first) - timedelta(days=1)
            last = self.first - timedelta(days=1)
        if not self.so_far:
            return Period("days", first, last)
        moment = max(self.start, min(at or self.until, self.until))
        today = local_day(moment, billing_zone())
        return Period("days", first, min(last, first + (today - self.first)), passed_of(today, moment))

    def params(self) -> dict[str, str]:
        """The query string that names these very days, whatever today is."""
        if self.is_month:
            return {"period": f"{self.first:%Y-%m}"}
        return {"period": "days", "from": self.first.isoformat(), "to": self.last.isoformat()}


def passed_of(day: date, moment: datetime) -> tuple[int, int]:
    """Minutes of a local day that have passed, and all it has."""
    minute = timedelta(minutes=1)
    start, end = day_bounds(day, billing_zone())
    return (moment - start) // minute, (end - start) // minute


def period_from(params: Mapping[str, str]) -> Period:
    """`?period=2026-05`, `last7|last30|last90`, or `days` with `from` and `to`; the present month by default.
    Invalid for anything else.
    """
    text = params.get("period", "")
    today = local_day(now(), billing_zone())
    if text in DAYS:
        return Period(text, today - timedelta(days=DAYS[text] - 1), today)
    if text == "days":
        return _days(params)
    month = month_from(text) if text else first_of_month(today)
    if month > today:
        raise Invalid.field("period", _("This period has not begun."))
    return Period("month", month, next_month(month) - timedelta(days=1))


def _days(params: Mapping[str, str]) -> Period:
    first, last = (day_from(name, params.get(name, "")) for name in ("from", "to"))
    if last < first:
        raise Invalid.field("to", _("The last day lies before the first."))
    if (last - first).days >= LONGEST:
        raise Invalid.field("to", _("Choose three years at most."))
    return Period("days", first, last)
