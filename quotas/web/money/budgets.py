"""Budgets: how much is used, what it will come to, and the form that sets one."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import date
from typing import Any

from django import forms
from django.contrib import messages
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views.decorators.http import require_http_methods, require_POST

from portal.accounts.middleware import policy_of_request
from portal.accounts.models import Department, Role
from portal.kernel.clock import now
from portal.kernel.errors import DomainError
from portal.kernel.units import MS_PER_HOUR, micro_from_money, scaled_int
from portal.ops.actor import actor_of
from quotas.models import Budget, BudgetWarning
from quotas.selectors.billing_time import billing_zone, month_of, next_month
from quotas.selectors.budgets import BudgetState, budget_states, seen_budgets
from quotas.services.budgets import budget_end, budget_for, budget_set
from quotas.templatetags.money_tags import month_name
from quotas.web.money.common import MONEY_ROLES, for_roles
from quotas.web.money.ledger import show_error
from quotas.web.money.look import Head, Look, remembered


class BudgetForm(forms.Form):
    """A budget of one department."""

    department: forms.ModelChoiceField[Department] = forms.ModelChoiceField(
        Department.objects.none(), label=gettext_lazy("Department"), empty_label="–", to_field_name="code"
    )
    period = forms.ChoiceField(label=gettext_lazy("Period"), choices=Budget.Period.choices)
    starts_on = forms.ChoiceField(label=gettext_lazy("Starts with"))
    amount = forms.DecimalField(
        label=gettext_lazy("Money"), max_digits=16, decimal_places=2, required=False, min_value=0
    )
    hours = forms.DecimalField(
        label=gettext_lazy("GPU-hours"), max_digits=14, decimal_places=2, required=False, min_value=0
    )
    stops = forms.BooleanField(
        label=gettext_lazy("Once it is used up, start nothing new above the guarantee"), required=False
    )
    note = forms.CharField(label=gettext_lazy("Reason"), max_length=300)

    def __init__(self, *args: Any, months: list[date], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        field = self.fields["department"]
        assert isinstance(field, forms.ModelChoiceField)
        field.queryset = Department.objects.without_tree_fields().filter(closed_at=None).order_by("name")
        start = self.fields["starts_on"]
        assert isinstance(start, forms.ChoiceField)
        start.choices = [(f"{m:%Y-%m-%d}", month_name(m)) for m in months]


def months_offered() -> list[date]:
    """The present month, the eleven before it (a year's budget may be set late), and the twelve after."""
    present = month_of(now())
    found = [date(present.year - 1, present.month, 1)]
    while len(found) < 25:
        found.append(next_month(found[-1]))
    return found


def budget_heads() -> list[Head]:
    """The columns of the budgets in force."""
    return [
        Head("department", _("Department"), numeric=False), Head("used", _("Used"), numeric=False),
        Head("limit", _("Budget"), sorts=False), Head("forecast", _("Forecast to its end")),
        Head("warned", _("Warned"), numeric=False, sorts=False),
    ]  # fmt: skip


VALUES: dict[str, Callable[[BudgetState], Any]] = {
    "department": lambda state: state.path,
    "used": lambda state: state.worst.percent,
    "forecast": lambda state: max(
        (m.forecast_percent for m in state.measures if m.forecast_percent is not None), default=None
    ),
}


@for_roles(*MONEY_ROLES, Role.LEAD)
@require_http_methods(["GET", "HEAD", "POST"])
@remembered("budgets")
def budgets(request: HttpRequest) -> HttpResponse:
    """``/budgets/``; POST sets one."""
    policy = policy_of_request(request)
    form = BudgetForm(
        request.POST or None, months=months_offered(), initial={"starts_on": f"{month_of(now()):%Y-%m-%d}"}
    )
    if request.method == "POST":
        policy.require(policy.keeps_books)
        if form.is_valid() and _save(request, form):
            return HttpResponseRedirect(reverse("quotas:budgets"))
    present = month_of(now())
    found = list(seen_budgets(policy, present))
    states = sorted(budget_states(found, policy.tree), key=lambda s: (-s.worst.percent, s.path))
    warned: dict[int, list[BudgetWarning]] = {}
    for warning in BudgetWarning.objects.filter(budget__in=found).order_by("-at"):
        warned.setdefault(warning.budget_id, []).append(warning)
    later = (
        Budget.objects.filter(ended_at=None, starts_on__gt=present)
        .select_related("department")
        .order_by("starts_on", "id")
    )
    if not policy.reads_money.everything:
        later = later.filter(policy.reads_money.q("department_id"))
    heads = budget_heads()
    look = Look.of(request.GET.dict(), heads)
    context = {
        "states": [(state, warned.get(state.budget.pk, [])) for state in look.ordered(states, VALUES)],
        "heads": look.shown(heads),
        "hide": look.hide,
        "columns": look.choices(heads, request.GET),
        "later": later.order_by("starts_on", "id")[:50],
        "form": form,
        "may_set": policy.keeps_books,
        "zone": billing_zone().key,
    }
    return render(request, "quotas/money/budgets.html", context, status=400 if form.errors else 200)


def _save(request: HttpRequest, form: BudgetForm) -> bool:
    data = form.cleaned_data
    try:
        budget = budget_set(
            acting_user=actor_of(request),
            department=data["department"],
            period=data["period"],
            starts_on=date.fromisoformat(data["starts_on"]),
            amount_micro=None if data["amount"] is None else micro_from_money(data["amount"]),
            gpu_ms=None if data["hours"] is None else scaled_int(data["hours"], MS_PER_HOUR),
            stops=data["stops"],
            note=data["note"],
        )
    except DomainError as error:
        show_error(form, error)
        return False
    messages.success(request, _("Budget of %(department)s set.") % {"department": budget.department.name})
    return True


@for_roles(*MONEY_ROLES)
@require_POST
def budget_end_view(request: HttpRequest, uid: uuid.UUID) -> HttpResponse:
    """POST: take a budget back."""
    policy = policy_of_request(request)
    policy.require(policy.keeps_books)
    budget = budget_for(uid)
    budget_end(acting_user=actor_of(request), budget=budget, reason=request.POST.get("reason", ""))
    messages.success(
        request, _("Budget of %(department)s taken back.") % {"department": budget.department.name}
    )
    return HttpResponseRedirect(reverse("quotas:budgets"))
