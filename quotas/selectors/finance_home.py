"""What the finance home shows beside the month's figures: what waits for a decision, and a forecast."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import Any

from django.db.models import QuerySet

from portal.accounts.models import Role
from portal.accounts.policy import Policy
from portal.ops.models import Incident
from quotas.engine.billing import month_bounds
from quotas.models import ApprovalStep
from quotas.selectors.billing_time import billing_zone, previous_month
from quotas.selectors.money import BookMonth
from quotas.selectors.month_report import MonthReport
from quotas.services.months import MONEY_INCIDENTS

CLOSE_WITHIN = timedelta(days=18)
BASIS_DAYS = 7


@dataclass(frozen=True)
class Forecast:
    """What the whole month will cost if its rest runs like recent days: a range, micro units."""

    low_micro: int
    high_micro: int
    days: int


@dataclass(frozen=True)
class Decisions:
    """What waits for finance. `close` is a month that is over and open, with the day it is due; `unpriced` are
    incidents of use without a price.
    """

    steps: list[ApprovalStep]
    close: date | None
    close_by: datetime | None
    unpriced: list[Incident]
    incidents: list[Incident]

    @property
    def count(self) -> int:
        """How many rows the table has."""
        return len(self.steps) + len(self.unpriced) + len(self.incidents) + (self.close is not None)


def decisions(policy: Policy, months: list[BookMonth], *, limit: int = 10) -> Decisions:
    """Open finance steps in the reader's scope, the month to close, missing prices, money incidents."""
    steps: QuerySet[ApprovalStep, Any] = (
        ApprovalStep.objects.filter(state=ApprovalStep.State.OPEN, role=Role.FINANCE)
        .exclude(requester=policy.user)
        .select_related(
            "request__requester", "request__department", "request__flavour", "quota_change__department"
        )
        .order_by("due_at", "id")
    )
    present = next((m.month for m in months if m.present), None)
    before = previous_month(present) if present else None
    close = next((m.month for m in months if m.month == before and not m.closed), None)
    close_by = None
    if close is not None:
        _start, end = month_bounds(close.year, close.month, billing_zone())
        close_by = end + CLOSE_WITHIN
    incidents = Incident.objects.filter(kind__in=MONEY_INCIDENTS).exclude(state="closed").order_by("-id")
    found = list(incidents[: 2 * limit])
    return Decisions(
        steps=list(steps[:limit]),
        close=close,
        close_by=close_by,
        unpriced=[i for i in found if i.kind == "price_missing"][:limit],
        incidents=[i for i in found if i.kind != "price_missing"][:limit],
    )


def forecast(report: MonthReport) -> Forecast | None:
    """So far, and the rest of the month at the lowest and the highest of the last whole days; None before
    there are three of them, and for a month that is over.
    """
    if not report.so_far:
        return None
    daily = [report.money_of(day) for day in report.days[:-1]][-BASIS_DAYS:]
    if len(daily) < 3:
        return None
    left = (report.end - report.until) / timedelta(days=1)
    mean = sum(daily) / len(daily)
    spread = (sum((x - mean) ** 2 for x in daily) / len(daily)) ** 0.5
    so_far = report.total.amount_micro
    return Forecast(
        low_micro=so_far + round(left * max(0.0, mean - spread)),
        high_micro=so_far + round(left * (mean + spread)),
        days=len(daily),
    )
