"""Month close: the checklist that fills by itself, and the lock."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.db.models import Count, Sum
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.views.decorators.http import require_http_methods

from portal.accounts.middleware import policy_of_request
from portal.kernel.clock import now
from portal.kernel.errors import DomainError
from portal.ops.actor import actor_of
from quotas.models import LedgerEntry, LedgerMonth
from quotas.selectors.billing_time import billing_zone, month_of, previous_month
from quotas.selectors.money import book_months, month_from
from quotas.services.months import Check, month_checks, month_close
from quotas.templatetags.money_tags import month_name
from quotas.web.money.common import MONEY_ROLES, for_roles


def check_texts(check: Check) -> tuple[str, str, str]:
    """(what, detail, figure) of a line of the checklist, in the reader's language."""
    f = check.figures
    texts: dict[str, tuple[str, str, str]] = {
        "month_over": (_("The month is over"), _("the last day ends at midnight of the billing zone"), ""),
        "all_booked": (
            _("Running leases are booked to the month's end"),
            _("a day is booked 15 minutes after it ended"),
            str(f.get("count", "")),
        ),
        "reconciled": (
            _("Leases and ledger agree, counters too"),
            _("compared each hour, and once more at the close"),
            _("not compared yet")
            if f.get("differences") is None
            else _("%(n)s differ") % {"n": f["differences"]},
        ),
        "priced": (
            _("No price is missing"),
            _("lines without a price count as 0"),
            _("%(n)s lines") % {"n": f.get("count", 0)},
        ),
        "no_incident": (
            _("No incident of the books is open"),
            _("prices missing, counters or ledger that differ"),
            str(f.get("count", "")),
        ),
        "in_order": (_("Earlier months are closed"), _("months close one after the other"), ""),
    }
    what, detail, figure = texts[check.code]
    if check.code == "in_order" and f.get("month"):
        figure = month_name(f["month"])
    return what, detail, figure


@for_roles(*MONEY_ROLES)
@require_http_methods(["GET", "HEAD", "POST"])
def month_close_page(request: HttpRequest) -> HttpResponse:
    """``/months/close/?month=2026-05``; POST closes."""
    policy = policy_of_request(request)
    text = request.GET.get("month", "")
    month = month_from(text) if text else previous_month(month_of(now()))
    if request.method == "POST":
        policy.require(policy.keeps_books)
        try:
            month_close(acting_user=actor_of(request), month=month)
        except DomainError as error:
            messages.error(request, str(error.detail))
        else:
            messages.success(request, _("%(month)s is closed.") % {"month": month_name(month)})
        return HttpResponseRedirect(f"{reverse('quotas:month-close')}?month={month:%Y-%m}")
    months = book_months()
    closed = any(m.closed for m in months if m.month == month)
    row = LedgerMonth.objects.filter(month=month).first() if closed else None
    checks = [] if closed else month_checks(month=month, compare=False)
    books = LedgerEntry.objects.filter(booked_month=month)
    context: dict[str, Any] = {
        "month": month,
        "row": row,
        "checks": [(check, *check_texts(check)) for check in checks],
        "met": sum(check.ok for check in checks),
        "ready": all(check.ok for check in checks),
        "totals": books.aggregate(
            ms=Sum("gpu_ms", default=0), micro=Sum("amount_micro", default=0), n=Count("pk")
        ),
        "corrections": books.filter(kind=LedgerEntry.Kind.CORRECTION)
        .select_related("corrects")
        .order_by("-id")[:50],
        "reconciled": next(
            (check.figures.get("run") for check in checks if check.code == "reconciled"), None
        ),
        "months": months,
        "zone": billing_zone().key,
        "may_close": policy.keeps_books,
    }
    return render(request, "quotas/money/month_close.html", context)
