"""Tell the ledger what was held idle, once a day's telemetry has settled, where a price has a surcharge on it."""

from __future__ import annotations

from datetime import date, timedelta

from django.db.models import Exists, OuterRef

from monitoring.models import BuiltDay, UseDay
from monitoring.services.day_sums import SETTLE_DAYS
from portal.kernel.clock import now
from quotas.engine.billing import local_day
from quotas.models import LedgerEntry, PriceRate
from quotas.selectors.billing_time import billing_zone
from quotas.services.surcharges import Idle, idle_surcharges_book

LOOK_BACK = timedelta(days=35)
"""How late a surcharge is still booked: a month, should nothing have run meanwhile."""

BATCH = 500


def idle_surcharges_sweep() -> int:
    """Book what is due; returns the lines added. Safe at any time and twice."""
    rated = set(PriceRate.objects.filter(idle_micro_per_gpu_hour__gt=0).values_list("flavour_id", flat=True))
    if not rated:
        return 0
    booked = LedgerEntry.objects.filter(
        kind=LedgerEntry.Kind.IDLE, span_id=OuterRef("span_id"), local_day=OuterRef("local_day")
    )
    due = (
        UseDay.objects.filter(local_day__in=_settled_days(), flavour_id__in=rated, idle_ms__gt=0)
        .exclude(Exists(booked))
        .order_by("id")
        .values_list("id", "span_id", "local_day", "idle_ms")
    )
    added, after = 0, 0
    while True:
        rows = list(due.filter(id__gt=after)[:BATCH])
        if not rows:
            return added
        added += idle_surcharges_book([Idle(span, day, idle) for _pk, span, day, idle in rows])
        after = rows[-1][0]


def _settled_days() -> list[date]:
    """Days that telemetry changes no more."""
    today = local_day(now(), billing_zone())
    last = today - timedelta(days=SETTLE_DAYS + 1)
    return list(
        BuiltDay.objects.filter(whole=True, local_day__range=(last - LOOK_BACK, last)).values_list(
            "local_day", flat=True
        )
    )
