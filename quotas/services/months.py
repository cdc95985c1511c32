"""Month close: what must be true first, the lock, and corrections by hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import date, datetime
from typing import Any

from django.db import connection, transaction
from django.db.models import Count, Max, Q, Sum
from django.utils.translation import gettext_lazy as _

from portal.accounts.policy import policy_of
from portal.kernel.clock import now
from portal.kernel.errors import Conflict, Invalid, NotFound
from portal.ops.actor import Actor
from portal.ops.models import Incident, TaskRun
from portal.ops.outbox import outbox_add
from portal.ops.services import audit_record
from quotas.engine.billing import month_bounds
from quotas.models import LedgerEntry, LedgerMonth, UsageSpan
from quotas.selectors.billing_time import billing_zone, first_of_month
from quotas.services.books import books_for_booking, books_for_closing
from quotas.services.ledger import correction_of
from quotas.services.reconcile import reconcile

MONEY_INCIDENTS = ("price_missing", "counters_differ", "ledger_differs", "sums_differ")


@dataclass(frozen=True)
class Check:
    """One line of the checklist. `figures` fill the texts of the page; `ok` lets the month close."""

    code: str
    ok: bool
    figures: dict[str, Any] = field(default_factory=dict)


def month_checks(*, month: date, compare: bool = True) -> list[Check]:
    """What must hold before a month closes, in the order of the page.

    With `compare` the books are compared now, which may open or end an incident; without it the figures of the
    last hourly comparison are taken, and nothing is written.
    """
    zone = billing_zone()
    start, end = month_bounds(month.year, month.month, zone)
    behind = UsageSpan.objects.filter(started_at__lt=end, accrued_to__lt=end).filter(
        Q(ended_at=None) | Q(ended_at__gt=end)
    )
    reconciled = _compared_now(start) if compare else _compared_last()
    unpriced = LedgerEntry.objects.filter(
        booked_month=month, kind=LedgerEntry.Kind.USAGE, rate_uid=None
    ).exclude(corrections__rate_uid__isnull=False)
    incidents = Incident.objects.filter(kind__in=MONEY_INCIDENTS).exclude(state="closed")
    earlier = (
        LedgerEntry.objects.filter(booked_month__lt=month)
        .exclude(booked_month__in=LedgerMonth.objects.exclude(closed_at=None).values("month"))
        .order_by("booked_month")
        .values_list("booked_month", flat=True)
        .first()
    )
    with connection.cursor() as cursor:  # three counts in one look
        parts = [rows.values("pk").query.sql_with_params() for rows in (behind, unpriced, incidents)]
        counts = ", ".join(f"(SELECT count(*) FROM ({sql}) x)" for sql, _params in parts)
        cursor.execute(f"SELECT {counts}", [param for _sql, params in parts for param in params])
        late, missing, open_incidents = cursor.fetchone()
    return [
        Check("month_over", now() >= end, {"end": end}),
        Check("all_booked", late == 0, {"count": late}),
        reconciled,
        Check("priced", missing == 0, {"count": missing}),
        Check("no_incident", open_incidents == 0, {"count": open_incidents}),
        Check("in_order", earlier is None, {"month": earlier}),
    ]


def _compared_now(since: datetime) -> Check:
    found = reconcile(since=since)
    figures = {"differences": found.differences, "spans": found.closed_spans}
    return Check("reconciled", found.differences == 0, figures)


def _compared_last() -> Check:
    """The last comparison that ran through; without one the check is not met."""
    run = TaskRun.objects.filter(name="quotas.reconcile", outcome="ok").order_by("-id").first()
    if run is None:
        return Check("reconciled", False, {"differences": None, "spans": 0})
    differences = run.facts.get("differences", 0)
    figures = {"differences": differences, "spans": run.facts.get("closed_spans", 0), "run": run}
    return Check("reconciled", differences == 0, figures)


def month_close(*, acting_user: Actor, month: date) -> LedgerMonth:
    """Close a month: from now on what belongs to it is booked in a later one. Closed for good.

    Refused without the finance role over the installation; Conflict `month_closed` when it is closed,
    `month_not_ready` with the codes of the failing checks.
    """
    if not acting_user.is_system:
        policy = policy_of(acting_user.user)
        policy.require(policy.keeps_books)
    month = first_of_month(month)
    with transaction.atomic():
        books_for_closing()
        row, _made = LedgerMonth.objects.select_for_update().get_or_create(month=month)
        if row.closed_at is not None:
            raise Conflict(code="month_closed", detail=_("This month is closed already."))
        failing = [check.code for check in month_checks(month=month) if not check.ok]
        if failing:
            raise Conflict(
                code="month_not_ready",
                detail=_("The month cannot be closed yet: some checks are not met."),
                extra={"checks": failing},
            )
        row.totals = LedgerEntry.objects.filter(booked_month=month).aggregate(
            gpu_ms=Sum("gpu_ms", default=0),
            amount_micro=Sum("amount_micro", default=0),
            entries=Count("pk"),
            last_entry=Max("pk", default=0),
        )
        row.totals = {key: int(value) for key, value in row.totals.items()}
        row.closed_at = now()
        row.closed_by_name = acting_user.name
        row.save()
        audit_record(
            acting_user=acting_user,
            action="month.closed",
            subject=row,
            after={"month": f"{month:%Y-%m}", **row.totals},
        )
        outbox_add("quotas.month_closed", {"month": f"{month:%Y-%m}"}, key=f"month_closed:{month}")
        return row


MOST_CORRECTED_MS = 10_000 * 3_600_000
MOST_CORRECTED_MICRO = 10**13
"""What one correction may add or take: a line is a lease's part of one day."""


def correction_book(
    *, acting_user: Actor, entry_uid: Any, gpu_ms: int, amount_micro: int, reason: str
) -> LedgerEntry:
    """A signed correction of one line by a person of finance; the line itself stays as it is.

    What a line and its corrections sum to never falls below 0. It stands in the line's month, or in the
    present one when that is closed.
    """
    if not acting_user.is_system:
        policy = policy_of(acting_user.user)
        policy.require(policy.keeps_books)
    if not reason.strip():
        raise Invalid.field("reason", _("Say in a sentence what was wrong and what shows it."))
    if gpu_ms == 0 and amount_micro == 0:
        raise Invalid.field("amount", _("A correction changes hours or money; both are 0."))
    if abs(gpu_ms) > MOST_CORRECTED_MS or abs(amount_micro) > MOST_CORRECTED_MICRO:
        raise Invalid.field(
            "amount",
            _("More than 10,000 GPU-hours or 10,000,000 in one correction is a slip. Check the figures."),
        )
    with transaction.atomic():
        entry = LedgerEntry.objects.select_for_update(no_key=True).filter(uid=entry_uid).first()
        if entry is None:
            raise NotFound(code="not_found", detail=_("There is no such line in the ledger."))
        if entry.kind == LedgerEntry.Kind.CORRECTION:
            raise Conflict(
                code="correction_of_correction", detail=_("Correct the line itself, not its correction.")
            )
        so_far = entry.corrections.aggregate(h=Sum("gpu_ms", default=0), m=Sum("amount_micro", default=0))
        if entry.gpu_ms + so_far["h"] + gpu_ms < 0 or entry.amount_micro + so_far["m"] + amount_micro < 0:
            raise Invalid.field("amount", _("This takes back more than the line and its corrections hold."))
        correction = correction_of(
            entry,
            gpu_ms=gpu_ms,
            amount_micro=amount_micro,
            reason=reason.strip(),
            booked_month=books_for_booking().month_for(entry.local_day),
        )
        correction.save()
        audit_record(
            acting_user=acting_user,
            action="ledger.corrected",
            subject=correction,
            after={"corrects": entry.pk, "gpu_ms": gpu_ms, "amount_micro": amount_micro},
            reason=reason.strip(),
            department_id=entry.department_id_ref,
        )
        return correction
