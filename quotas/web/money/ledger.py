"""The ledger as a list, one entry with its corrections, and the form that corrects it."""

from __future__ import annotations

import uuid
from typing import Any

from django import forms
from django.conf import settings
from django.core.paginator import Paginator
from django.db.models import OuterRef, Subquery, Sum
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import render
from django.urls import reverse
from django.utils.translation import gettext_lazy as _
from django.views.decorators.http import require_http_methods, require_safe

from portal.accounts.middleware import policy_of_request
from portal.kernel.csv_export import csv_response, machine_csv, people_csv
from portal.kernel.errors import DomainError, NotFound
from portal.kernel.units import MS_PER_HOUR, micro_from_money, scaled_int
from portal.ops.actor import actor_of
from quotas.models import CapacityRequest, LedgerEntry
from quotas.selectors import line_rows as files
from quotas.selectors.billing_time import billing_zone
from quotas.selectors.money import LineFilter, Lines, book_months
from quotas.selectors.month_report import ledger_mark
from quotas.selectors.running import one_look
from quotas.services.months import correction_book
from quotas.web.money.common import about, filter_chips, lines_of, signed_in, too_many
from quotas.web.money.look import Head, Look, remembered

SORTS = {
    "entry": "id", "time": "starts_at", "request": "request_id_ref", "department": "department_path",
    "person": "user_name", "place": "flavour_name", "hours": "gpu_ms", "price": "micro_per_gpu_hour",
    "cost": "amount_micro",
}  # fmt: skip
"""Column of the page: column of the ledger."""

RUNNING_SHOWN = 5
"""Running lines above the first page; the files have every one."""


def ledger_heads() -> list[Head]:
    """The columns of the list."""
    return [
        Head("entry", _("Entry")),
        Head("time", _("From, to"), numeric=False),
        Head("request", _("Request"), numeric=False),
        Head("department", _("Department, then"), numeric=False),
        Head("person", _("Person"), numeric=False),
        Head("place", _("Flavour, place"), numeric=False),
        Head("hours", _("GPU·h")),
        Head("price", _("Price")),
        Head("cost", str(settings.GPUPOOL_CURRENCY)),
    ]


@signed_in
@require_safe
@remembered("ledger")
@one_look()
def ledger(request: HttpRequest) -> HttpResponse:
    """``/ledger/``: booked lines, newest first if nothing else is chosen, 50 a page; above the first page what runs."""
    policy = policy_of_request(request)
    lines = lines_of(request)
    heads = ledger_heads()
    look = Look.of(request.GET.dict(), heads)
    booked = lines.booked()
    if look.sort:
        column = SORTS[look.sort.removeprefix("-")]
        booked = booked.order_by(f"-{column}" if look.sort.startswith("-") else column, "-id")
    totals = lines.sums().aggregate(
        ms=Sum("gpu_ms", default=0), micro=Sum("amount_micro", default=0), n=Sum("lines", default=0)
    )
    # as a subquery: with joins the planner walks all books backwards for a page of a narrow filter
    asked_by = CapacityRequest.objects.filter(pk=OuterRef("request_id_ref")).values("uid")[:1]
    paginator = Paginator(booked.annotate(request_uid=Subquery(asked_by)), 50)
    paginator.__dict__["count"] = totals["n"]  # counted with the sums: no second look
    page = paginator.get_page(request.GET.get("page"))
    running = lines.running_cuts()
    running_ms = sum(row.cut.gpu_ms for row in running)
    running_micro = sum(row.cut.amount_micro for row in running)
    context = {
        "page": page,
        "running_count": len(running),
        "running_shown": lines.running(RUNNING_SHOWN) if page.number == 1 else [],
        "running_more": page.number == 1 and len(running) > RUNNING_SHOWN,
        "running_ms": running_ms,
        "running_micro": running_micro,
        "total_ms": totals["ms"],
        "total_micro": totals["micro"],
        "all_ms": totals["ms"] + running_ms,
        "all_micro": totals["micro"] + running_micro,
        "chosen": lines.filter,
        "months": book_months(),
        "chips": filter_chips(lines.filter, policy),
        "kinds": LedgerEntry.Kind.choices,
        "zone": billing_zone().key,
        "only_own": not policy.reads_money,
        "heads": look.shown(heads),
        "hide": look.hide,
        "columns": look.choices(heads, request.GET),
    }
    return render(request, "quotas/money/ledger.html", context)


@signed_in
@require_safe
@one_look()
def ledger_file(request: HttpRequest) -> HttpResponse:
    """``/ledger/file/?for=people|machines`` with the list's filter."""
    policy = policy_of_request(request)
    lines = lines_of(request)
    if moved := too_many(request, lines):
        return moved
    if request.GET.get("for") == "machines":
        chunks = machine_csv(columns=files.MACHINE_COLUMNS, rows=files.machine_rows(lines.all()))
    else:
        head = about(lines.filter, policy, mark=ledger_mark()[0])
        chunks = people_csv(about=head, columns=files.people_columns(), rows=files.people_rows(lines.all()))
    return csv_response("gpu-ledger.csv", chunks)


class CorrectionForm(forms.Form):
    """Signed hours and money, and why."""

    hours = forms.DecimalField(label=_("Change of GPU-hours"), max_digits=14, decimal_places=6, initial=0)
    amount = forms.DecimalField(label=_("Change of cost"), max_digits=16, decimal_places=6, initial=0)
    reason = forms.CharField(label=_("Reason and evidence"), max_length=500)


@signed_in
@require_http_methods(["GET", "HEAD", "POST"])
def entry(request: HttpRequest, uid: uuid.UUID) -> HttpResponse:
    """``/ledger/<uid>/``: one line, its sum, its corrections; finance corrects it here."""
    policy = policy_of_request(request)
    line = (
        Lines(policy, LineFilter())
        .booked()
        .select_related("flavour", "span__request", "corrects")
        .filter(uid=uid)
        .first()
    )
    if line is None:
        raise NotFound(code="not_found", detail=_("There is no such line in the ledger."))
    may_correct = policy.keeps_books and line.kind != LedgerEntry.Kind.CORRECTION
    form = CorrectionForm(request.POST or None)
    if request.method == "POST" and form.is_valid():
        try:
            _correct(request, line, form.cleaned_data)
        except DomainError as error:
            _show(form, error)
        else:
            return HttpResponseRedirect(reverse("quotas:ledger-entry", args=[line.uid]))
    corrections = list(line.corrections.order_by("id"))
    context = {
        "line": line,
        "corrections": corrections,
        "net_ms": line.gpu_ms + sum(c.gpu_ms for c in corrections),
        "net_micro": line.amount_micro + sum(c.amount_micro for c in corrections),
        "form": form,
        "may_correct": may_correct,
        "zone": billing_zone().key,
    }
    return render(request, "quotas/money/entry.html", context, status=400 if form.errors else 200)


def _correct(request: HttpRequest, line: LedgerEntry, data: dict[str, Any]) -> None:
    hours = data["hours"] * MS_PER_HOUR
    correction_book(
        acting_user=actor_of(request),
        entry_uid=line.uid,
        gpu_ms=scaled_int(hours.to_integral_value(), 1),
        amount_micro=micro_from_money(data["amount"]),
        reason=data["reason"],
    )


def _show(form: forms.Form, error: DomainError) -> None:
    """A refusal beside its field, the rest above the form."""
    placed = False
    for problem in error.errors:
        if problem["pointer"] in form.fields:
            form.add_error(problem["pointer"], str(problem["detail"]))
            placed = True
    if not placed:
        form.add_error(None, str(error.detail))


show_error = _show
