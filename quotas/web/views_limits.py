"""Limits of single people: the list, and the form that sets those of one person or of everybody else."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from django import forms
from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.core.paginator import Paginator
from django.db.models import F
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views.decorators.http import require_http_methods

from portal.accounts.middleware import pool_reader
from portal.accounts.models import User
from portal.kernel.errors import DomainError, Invalid
from portal.kernel.units import MICRO, MILLI_PER_GPU, MS_PER_HOUR, scaled_int
from portal.ops.actor import actor_of
from quotas.models import UserLimit
from quotas.selectors.user_limits import own_limits
from quotas.services.user_limits import user_limit_clear, user_limit_set
from quotas.web.forms import ServiceForm
from quotas.web.words import number

PAGE = 50
UNITS = {
    "gpus_at_once_milli": MILLI_PER_GPU,
    "longest_lease_s": 3600,
    "gpu_ms_per_month": MS_PER_HOUR,
    "money_micro_per_month": MICRO,
    "waiting_at_once": 1,
    "running_at_once": 1,
}
"""How many of a limit's own unit one is of what people type: GPUs, hours, GPU-hours, money, requests."""
DECIMAL = {"inputmode": "decimal", "placeholder": "∞"}


def _limit(label: Any) -> forms.CharField:
    return forms.CharField(label=label, widget=forms.TextInput(attrs=DECIMAL))


class LimitForm(ServiceForm):
    """A person (none: everybody without limits of their own) and six limits; empty or ∞ is unlimited."""

    user = forms.CharField(
        label=gettext_lazy("Person"),
        required=False,
        help_text=gettext_lazy("User name. Empty: everybody who has no limits of their own."),
        widget=forms.TextInput(attrs={"list": "people"}),
    )
    gpus_at_once_milli = _limit(gettext_lazy("GPUs at once"))
    longest_lease_s = _limit(gettext_lazy("Longest lease"))
    gpu_ms_per_month = _limit(gettext_lazy("Time a month"))
    money_micro_per_month = _limit(gettext_lazy("Money a month"))
    waiting_at_once = _limit(gettext_lazy("Waiting at once"))
    running_at_once = _limit(gettext_lazy("Running at once"))

    def numbers(self) -> dict[str, int | None]:
        """The six limits in their own units; Invalid with every field that is no number."""
        values: dict[str, int | None] = {}
        problems: list[Any] = []
        for name, unit in UNITS.items():
            text = self.typed(name).replace(",", "")
            try:
                values[name] = None if text in ("", "∞") else scaled_int(text, unit)
            except ValueError:
                problems.append({"pointer": name, "detail": _("A number, or empty for unlimited.")})
        if problems:
            raise Invalid(code="invalid", detail=_("Some fields need a change."), errors=problems)
        return values


def _shown(values: dict[str, int | None]) -> dict[str, str]:
    return {
        name: "∞" if value is None else number(Decimal(value) / UNITS[name]).replace(",", "")
        for name, value in values.items()
    }


@login_required
@require_http_methods(["GET", "POST"])
def user_limits(request: HttpRequest) -> HttpResponse:
    """``/quotas/limits/``: whose limits differ from everybody's. ``?user=name`` opens those of a person."""
    policy = pool_reader(request)
    form, status = _opened(request), 200
    if request.method == "POST":
        form = LimitForm(request.POST)
        try:
            _save(request, form)
            return HttpResponseRedirect(reverse("quotas:user-limits"))
        except DomainError as error:
            if error.status == 403:
                raise
            form.take(error)
            status = error.status
    rows = UserLimit.objects.select_related("user").order_by(
        F("user__display_name").asc(nulls_first=True), "id"
    )
    context = {
        "form": form,
        "may_set": policy.administers_pool,
        "page": Paginator(rows, PAGE).get_page(request.GET.get("page")),
        "people": User.objects.filter(is_active=True).order_by("display_name", "id")[:300],
    }
    return render(request, "quotas/user_limits.html", context, status=status)


def _opened(request: HttpRequest) -> LimitForm:
    name = request.GET.get("user", "").strip()
    person = User.objects.filter(username=name).first() if name else None
    return LimitForm(initial={"user": person.username if person else "", **_shown(own_limits(person))})


def _save(request: HttpRequest, form: LimitForm) -> None:
    policy = request.policy  # type: ignore[attr-defined]
    name = form.typed("user")
    person = User.objects.filter(username=name).first() if name else None
    if name and person is None:
        raise Invalid.field("user", _("There is no person with this user name."))
    actor = actor_of(request)
    if "clear" in request.POST:
        user_limit_clear(acting_user=actor, policy=policy, user=person)
        messages.success(request, _("The limits were taken away."))
        return
    user_limit_set(acting_user=actor, policy=policy, user=person, **form.numbers())
    whose = person.get_full_name() if person is not None else _("everybody else")
    messages.success(request, _("Limits of %(name)s saved.") % {"name": whose})
