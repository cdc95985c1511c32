"""The price book: what holds when, and the form that puts a rate in force."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from django import forms
from django.contrib import messages
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views.decorators.http import require_http_methods, require_safe

from portal.accounts.middleware import policy_of_request
from portal.accounts.policy import Policy
from portal.kernel.clock import now
from portal.kernel.csv_export import csv_response, machine_csv, people_csv
from portal.kernel.errors import DomainError
from portal.kernel.units import micro_from_money
from portal.ops.actor import actor_of
from quotas.models import GpuFlavour, PriceRate
from quotas.selectors.billing_time import billing_zone, month_of, previous_month
from quotas.selectors.line_rows import amount
from quotas.selectors.money import LineFilter
from quotas.selectors.month_report import ledger_mark
from quotas.selectors.price_preview import Preview, price_preview
from quotas.selectors.prices import rates
from quotas.services.prices import rate_set
from quotas.web.money.common import MONEY_ROLES, about, for_roles
from quotas.web.money.ledger import show_error


class RateForm(forms.Form):
    """A new rate of one flavour."""

    flavour = forms.ModelChoiceField(
        GpuFlavour.objects.filter(active=True), label=gettext_lazy("Flavour"), empty_label="–"
    )
    site = forms.CharField(
        label=gettext_lazy("Site"),
        max_length=48,
        required=False,
        help_text=gettext_lazy("A site's own price beats the general one. Empty: all sites."),
    )
    price = forms.DecimalField(
        label=gettext_lazy("Price of a GPU-hour"), max_digits=14, decimal_places=6, min_value=0
    )
    valid_from = forms.DateTimeField(
        label=gettext_lazy("Valid from"),
        required=False,
        widget=forms.DateTimeInput(attrs={"type": "datetime-local"}, format="%Y-%m-%dT%H:%M"),
        help_text=gettext_lazy("In the billing time zone. Empty: from now on."),
    )
    book = forms.CharField(
        label=gettext_lazy("Version"),
        max_length=48,
        required=False,
        help_text=gettext_lazy("For example 2026-07."),
    )
    reason = forms.CharField(label=gettext_lazy("Reason"), max_length=300)

    def clean_valid_from(self) -> datetime:
        """Typed as local time of the billing zone, whatever zone the reader lives in."""
        value = self.cleaned_data["valid_from"]
        if value is None:
            return now()
        return value.replace(tzinfo=billing_zone()).astimezone(UTC)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Bar:
    """One rate on the time scale; `a` and `b` in percent of it."""

    rate: PriceRate
    a: float
    b: float
    state: str
    open: bool


@dataclass(frozen=True)
class Lane:
    """The rates of one flavour and site."""

    flavour: GpuFlavour
    site: str
    bars: list[Bar]


def lanes(found: list[PriceRate], moment: datetime) -> tuple[list[Lane], float, list[datetime]]:
    """Lanes on a scale of 12 months around now; the place of now in percent; the ticks."""
    start, end = moment - timedelta(days=182), moment + timedelta(days=183)
    whole = (end - start) / timedelta(seconds=1)

    def place(at: datetime) -> float:
        return round(min(100.0, max(0.0, 100 * ((at - start) / timedelta(seconds=1)) / whole)), 2)

    out: dict[tuple[int, str], Lane] = {}
    for rate in found:
        lower, upper = rate.during.lower, rate.during.upper
        lane = out.setdefault((rate.flavour_id, rate.site_code), Lane(rate.flavour, rate.site_code, []))
        if upper is not None and upper <= start:
            continue
        state = "next" if lower > moment else "now" if upper is None or upper > moment else "past"
        lane.bars.append(Bar(rate, place(lower), place(upper or end), state, upper is None))
    return list(out.values()), place(moment), [start + (end - start) * n / 4 for n in range(5)]


@for_roles(*MONEY_ROLES)
@require_http_methods(["GET", "HEAD", "POST"])
def prices(request: HttpRequest) -> HttpResponse:
    """``/prices/``; POST puts a rate in force."""
    policy = policy_of_request(request)
    form = RateForm(request.POST or None)
    preview: Preview | None = None
    if request.method == "POST":
        policy.require(policy.keeps_books)
        if form.is_valid():
            if "preview" in request.POST:
                preview = _preview(form, policy)
            elif _save(request, form):
                return HttpResponseRedirect(reverse("quotas:prices"))
    found = list(rates())
    moment = now()
    rows, today, ticks = lanes(found, moment)
    priced = {rate.flavour_id for rate in found if rate.site_code == "" and _holds(rate, moment)}
    context: dict[str, Any] = {
        "lanes": rows,
        "today": today,
        "ticks": ticks,
        "rates": sorted(found, key=lambda r: (r.during.lower, r.pk), reverse=True)[:50],
        "missing": [f for f in GpuFlavour.objects.filter(active=True) if f.pk not in priced],
        "form": form,
        "preview": preview,
        "may_set": policy.keeps_books,
        "zone": billing_zone().key,
        "now": moment,
    }
    return render(request, "quotas/money/prices.html", context, status=400 if form.errors else 200)


def _holds(rate: PriceRate, moment: datetime) -> bool:
    return bool(rate.during.lower <= moment and (rate.during.upper is None or rate.during.upper > moment))


def _preview(form: RateForm, policy: Policy) -> Preview:
    """What last month would have cost at the price that is typed."""
    data = form.cleaned_data
    return price_preview(
        flavour=data["flavour"],
        micro_per_gpu_hour=micro_from_money(data["price"]),
        site=data["site"].strip(),
        month=previous_month(month_of(now())),
        tree=policy.tree,
    )


def _save(request: HttpRequest, form: RateForm) -> bool:
    data = form.cleaned_data
    try:
        rate = rate_set(
            acting_user=actor_of(request),
            flavour=data["flavour"],
            micro_per_gpu_hour=micro_from_money(data["price"]),
            valid_from=data["valid_from"],
            site_code=data["site"].strip(),
            book=data["book"],
            reason=data["reason"],
        )
    except DomainError as error:
        show_error(form, error)
        return False
    messages.success(request, _("Price of %(flavour)s set.") % {"flavour": rate.flavour.name})
    return True


@for_roles(*MONEY_ROLES)
@require_safe
def prices_file(request: HttpRequest) -> HttpResponse:
    """``/prices/file/?for=people|machines``: all versions."""
    found = list(rates())
    if request.GET.get("for") == "machines":
        columns = (
            "uid",
            "flavour",
            "site",
            "micro_per_gpu_hour",
            "valid_from",
            "valid_to",
            "book",
            "entered_by",
        )
        rows = (
            [
                r.uid,
                r.flavour.code,
                r.site_code,
                r.micro_per_gpu_hour,
                r.during.lower,
                r.during.upper,
                r.book,
                r.entered_by_name,
            ]
            for r in found
        )
        return csv_response("gpu-prices.csv", machine_csv(columns=columns, rows=rows))
    zone = billing_zone()
    head = about(LineFilter(), policy_of_request(request), mark=ledger_mark()[0])
    heads = [
        _("Flavour"),
        _("Site"),
        _("Price per GPU·h"),
        _("Valid from"),
        _("Valid to"),
        _("Version"),
        _("Set by"),
    ]
    lines = (
        [
            r.flavour.name,
            r.site_code or _("all sites"),
            amount(r.micro_per_gpu_hour),
            f"{r.during.lower.astimezone(zone):%Y-%m-%d %H:%M}",
            f"{r.during.upper.astimezone(zone):%Y-%m-%d %H:%M}" if r.during.upper else "",
            r.book,
            r.entered_by_name,
        ]
        for r in found
    )
    return csv_response("gpu-prices.csv", people_csv(about=head, columns=heads, rows=lines))
