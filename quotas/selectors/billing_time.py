"""The calendar of the books: months and days of the billing time zone."""

from __future__ import annotations

from datetime import date, datetime
from zoneinfo import ZoneInfo

from django.conf import settings

from quotas.engine.billing import local_day


def billing_zone() -> ZoneInfo:
    """The zone whose days and months the books follow."""
    return ZoneInfo(settings.GPUPOOL_BILLING_TIME_ZONE)


def first_of_month(day: date) -> date:
    """The first day of a day's month."""
    return day.replace(day=1)


def next_month(month: date) -> date:
    """The first day of the month after."""
    return date(month.year + month.month // 12, month.month % 12 + 1, 1)


def previous_month(month: date) -> date:
    """The first day of the month before."""
    return date(month.year - (month.month == 1), (month.month - 2) % 12 + 1, 1)


def month_of(moment: datetime) -> date:
    """First day of the billing month that a moment belongs to."""
    return first_of_month(local_day(moment, billing_zone()))
