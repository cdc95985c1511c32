"""The period of a report: whole local days of the billing zone, and the period before that it is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, datetime, timedelta

from django.utils.translation import gettext as _

from portal.kernel.clock import now
from portal.kernel.errors import Invalid
from quotas.engine.billing import day_start, local_day
from quotas.selectors.billing_time import billing_zone, first_of_month, next_month, previous_month
from quotas.selectors.money import day_from, month_from

LONGEST = 1100
"""Days of the longest period: three years."""

DAYS = {"last7": 7, "last30": 30, "last90": 90}


@dataclass(frozen=True, slots=True)
class Period:
    """Local days `first` to `last`, both included. `code` is how it was chosen: month, last30, …, days."""

    code: str
    first: date
    last: date

    @property
    def start(self) -> datetime:
        """The first moment."""
        return day_start(self.first, billing_zone())

    @property
    def end(self) -> datetime:
        """The moment after the last."""
        return day_start(self.last + timedelta(days=1), billing_zone())

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

    def before(self) -> Period:
        """The month before a month, for a running one its first days up to the same day; else as many days before."""
        if self.is_month:
            first = previous_month(self.first)
            last = self.first - timedelta(days=1)
            if self.so_far:
                today = local_day(self.until, billing_zone())
                last = min(last, first + timedelta(days=(today - self.first).days))
            return Period("days", first, last)
        length = self.last - self.first + timedelta(days=1)
        return Period("days", self.first - length, self.first - timedelta(days=1))

    def params(self) -> dict[str, str]:
        """The query string that names these very days, whatever today is."""
        if self.is_month:
            return {"period": f"{self.first:%Y-%m}"}
        return {"period": "days", "from": self.first.isoformat(), "to": self.last.isoformat()}


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
