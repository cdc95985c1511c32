"""The price book: what holds when, and the form that puts a rate in force."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from django import forms
from django.contrib import messages
from django.core.paginator import Paginator
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import render
from django.urls import NoReverseMatch, reverse
from django.utils.http import urlencode
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, pgettext
from django.views.decorators.http import require_http_methods, require_safe

from portal.accounts.middleware import policy_of_request
from portal.accounts.models import Department
from portal.accounts.policy import Policy
from portal.kernel.clock import now
from portal.kernel.csv_export import csv_response, machine_csv, people_csv
from portal.kernel.errors import DomainError
from portal.kernel.tabular import column_of, row_of
from portal.kernel.units import micro_from_money
from portal.ops.actor import actor_of
from quotas.models import GpuFlavour, PriceRate
from quotas.selectors.billing_time import billing_zone, month_of, previous_month
from quotas.selectors.line_rows import amount
from quotas.selectors.money import LineFilter
from quotas.selectors.month_report import ledger_mark
from quotas.selectors.pool_names import sites_named
from quotas.selectors.price_preview import Preview, price_preview
from quotas.selectors.prices import rates
from quotas.services.price_import import Taken, prices_import
from quotas.services.prices import rate_set
from quotas.web.money.common import MONEY_ROLES, about, for_roles
from quotas.web.money.ledger import show_error
from quotas.web.money.look import Head, Look, remembered


class RateField(forms.DecimalField):
    """An amount of the billing currency per GPU-hour, from 0, to the micro unit."""

    def __init__(self, **options: Any) -> None:
        super().__init__(max_digits=14, decimal_places=6, min_value=0, **options)


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
    department: forms.ModelChoiceField[Department] = forms.ModelChoiceField(
        Department.objects.none(),
        label=gettext_lazy("Department"),
        required=False,
        to_field_name="code",
        empty_label=gettext_lazy("all departments"),
        help_text=gettext_lazy("Its own price holds for all below it and beats the general one."),
    )
    price = RateField(label=gettext_lazy("Price of a GPU-hour"))
    list_price = RateField(
        label=gettext_lazy("List price"),
        required=False,
        help_text=gettext_lazy("Shown beside what is charged, and in FOCUS files. Empty: the same."),
    )
    power = RateField(
        label=gettext_lazy("Power surcharge"),
        required=False,
        help_text=gettext_lazy("On top of the price of every GPU-hour held; stated apart. Empty: none."),
    )
    idle = RateField(
        label=gettext_lazy("Idle surcharge"),
        required=False,
        help_text=gettext_lazy(
            "On GPU-hours held idle, booked when a day's telemetry has settled. Empty: none."
        ),
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

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        field = self.fields["department"]
        assert isinstance(field, forms.ModelChoiceField)
        field.queryset = Department.objects.without_tree_fields().filter(closed_at=None).order_by("name")
        if known := sites_named():
            site = self.fields["site"]
            self.fields["site"] = forms.ChoiceField(
                choices=[("", gettext_lazy("all sites")), *known.items()],
                label=site.label,
                required=False,
                help_text=gettext_lazy("A site's own price beats the general one."),
            )

    def clean_valid_from(self) -> datetime:
        """Typed as local time of the billing zone, whatever zone the reader lives in."""
        value = self.cleaned_data["valid_from"]
        if value is None:
            return now()
        try:
            return value.replace(tzinfo=billing_zone()).astimezone(UTC)  # type: ignore[no-any-return]
        except OverflowError:
            raise forms.ValidationError(_("This date is out of range.")) from None


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
    """The rates of one flavour, site and department."""

    flavour: GpuFlavour
    site: str
    department: Department | None
    bars: list[Bar]


def lanes(found: list[PriceRate], moment: datetime) -> tuple[list[Lane], float, list[datetime]]:
    """Lanes on a scale of 12 months around now; the place of now in percent; the ticks."""
    start, end = moment - timedelta(days=182), moment + timedelta(days=183)
    whole = (end - start) / timedelta(seconds=1)

    def place(at: datetime) -> float:
        return round(min(100.0, max(0.0, 100 * ((at - start) / timedelta(seconds=1)) / whole)), 2)

    out: dict[tuple[int, str, int | None], Lane] = {}
    for rate in found:
        lower, upper = rate.during.lower, rate.during.upper
        lane = out.setdefault(
            (rate.flavour_id, rate.site_code, rate.department_id),
            Lane(rate.flavour, rate.site_code, rate.department, []),
        )
        if upper is not None and upper <= start:
            continue
        state = "next" if lower > moment else "now" if upper is None or upper > moment else "past"
        lane.bars.append(Bar(rate, place(lower), place(upper or end), state, upper is None))
    return list(out.values()), place(moment), [start + (end - start) * n / 4 for n in range(5)]


def price_heads() -> list[Head]:
    """The columns of the list of versions."""
    return [
        Head("flavour", _("Flavour"), numeric=False), Head("price", _("Price")),
        Head("valid", pgettext("period", "Valid"), numeric=False),
        Head("book", _("Version, set by"), numeric=False), Head("state", _("State"), numeric=False, sorts=False),
    ]  # fmt: skip


VALUES: dict[str, Callable[[PriceRate], Any]] = {
    "flavour": lambda rate: (rate.flavour.name, rate.site_code, rate.department_id or 0),
    "price": lambda rate: rate.charged_micro,
    "valid": lambda rate: rate.during.lower,
    "book": lambda rate: (rate.book, rate.entered_by_name),
}


@for_roles(*MONEY_ROLES)
@require_http_methods(["GET", "HEAD", "POST"])
@remembered("prices")
def prices(request: HttpRequest) -> HttpResponse:
    """``/prices/``; POST puts a rate in force."""
    policy = policy_of_request(request)
    importing = request.method == "POST" and "import" in request.POST
    form = RateForm(request.POST if request.method == "POST" and not importing else None)
    preview: Preview | None = None
    idle_preview = ""
    imported: Imported | None = None
    if request.method == "POST":
        policy.require(policy.keeps_books)
        if importing:
            imported = _import(request)
            if imported.done:
                return HttpResponseRedirect(reverse("quotas:prices"))
        elif form.is_valid():
            if "preview" in request.POST:
                preview = _preview(form, policy)
                idle_preview = _idle_preview(form, preview)
            elif _save(request, form):
                return HttpResponseRedirect(reverse("quotas:prices"))
    found = list(rates())
    moment = now()
    rows, today, ticks = lanes(found, moment)
    priced = {
        rate.flavour_id
        for rate in found
        if rate.site_code == "" and rate.department_id is None and _holds(rate, moment)
    }
    heads = price_heads()
    look = Look.of(request.GET.dict(), heads)
    newest = sorted(found, key=lambda r: (r.during.lower, r.pk), reverse=True)
    context: dict[str, Any] = {
        "lanes": rows,
        "today": today,
        "ticks": ticks,
        "rates": Paginator(look.ordered(newest, VALUES), 50).get_page(request.GET.get("page")),
        "heads": look.shown(heads),
        "hide": look.hide,
        "columns": look.choices(heads, request.GET),
        "missing": [f for f in GpuFlavour.objects.filter(active=True) if f.pk not in priced],
        "form": form,
        "preview": preview,
        "idle_preview": idle_preview,
        "imported": imported,
        "may_set": policy.keeps_books,
        "zone": billing_zone().key,
        "now": moment,
    }
    wrong = form.errors or (imported is not None and imported.problems)
    return render(request, "quotas/money/prices.html", context, status=400 if wrong else 200)


@dataclass(frozen=True)
class Imported:
    """What a file would set or what is wrong with it; `done` once it was taken."""

    done: bool
    rows: list[Taken]
    problems: list[tuple[int, str, Any]]

    @property
    def new(self) -> int:
        """How many rows set a price."""
        return sum(row.new for row in self.rows)


def _import(request: HttpRequest) -> Imported:
    """POST with a file: ``import=check`` shows what it would do, ``import=take`` does it."""
    file = request.FILES.get("file")
    dry_run = request.POST["import"] != "take"
    if file is None:
        return Imported(False, [], [(0, "", _("Choose a file."))])
    try:
        rows = prices_import(
            acting_user=actor_of(request),
            file=file.read(),
            reason=request.POST.get("reason", "")[:300],
            dry_run=dry_run,
        )
    except DomainError as error:
        found = [(row_of(p), column_of(p), p["detail"]) for p in error.errors] or [(0, "", error.detail)]
        return Imported(False, [], found)
    done = Imported(not dry_run, rows, [])
    if done.done:
        messages.success(request, _("%(n)s prices set.") % {"n": done.new})
    return done


def _holds(rate: PriceRate, moment: datetime) -> bool:
    return bool(rate.during.lower <= moment and (rate.during.upper is None or rate.during.upper > moment))


def _preview(form: RateForm, policy: Policy) -> Preview:
    """What last month would have cost at the price that is typed."""
    data = form.cleaned_data
    return price_preview(
        flavour=data["flavour"],
        micro_per_gpu_hour=micro_from_money(data["price"]) + micro_from_money(data["power"] or 0),
        site=data["site"].strip(),
        month=previous_month(month_of(now())),
        tree=policy.tree,
        department_id=getattr(data["department"], "pk", None),
    )


def _idle_preview(form: RateForm, preview: Preview) -> str:
    """Where the idle hours of that month are told, when a surcharge on them is typed."""
    micro = micro_from_money(form.cleaned_data["idle"] or 0)
    if not micro:
        return ""
    asked = {"period": f"{preview.month:%Y-%m}", "flavour": preview.flavour.code, "idle": micro}
    if preview.site:
        asked["site"] = preview.site
    if form.cleaned_data["department"] is not None:
        asked["department"] = form.cleaned_data["department"].code
    try:
        return f"{reverse('monitoring:report-idle-preview')}?{urlencode(asked)}"
    except NoReverseMatch:
        return ""


def _save(request: HttpRequest, form: RateForm) -> bool:
    data = form.cleaned_data
    try:
        rate = rate_set(
            acting_user=actor_of(request),
            flavour=data["flavour"],
            micro_per_gpu_hour=micro_from_money(data["price"]),
            valid_from=data["valid_from"],
            site_code=data["site"].strip(),
            department=data["department"],
            list_micro_per_gpu_hour=None
            if data["list_price"] is None
            else micro_from_money(data["list_price"]),
            power_micro_per_gpu_hour=micro_from_money(data["power"] or 0),
            idle_micro_per_gpu_hour=micro_from_money(data["idle"] or 0),
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
            "department",
            "micro_per_gpu_hour",
            "list_micro_per_gpu_hour",
            "power_micro_per_gpu_hour",
            "idle_micro_per_gpu_hour",
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
                r.department.code if r.department is not None else "",
                r.micro_per_gpu_hour,
                r.list_micro_per_gpu_hour,
                r.power_micro_per_gpu_hour,
                r.idle_micro_per_gpu_hour,
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
        _("Department"),
        _("Price per GPU·h"),
        _("List price"),
        _("Power surcharge"),
        _("Idle surcharge"),
        _("Valid from"),
        _("Valid to"),
        _("Version"),
        _("Set by"),
    ]
    lines = (
        [
            r.flavour.name,
            r.site_code or _("all sites"),
            r.department.name if r.department is not None else _("all departments"),
            amount(r.micro_per_gpu_hour),
            amount(r.list_micro),
            amount(r.power_micro_per_gpu_hour),
            amount(r.idle_micro_per_gpu_hour),
            f"{r.during.lower.astimezone(zone):%Y-%m-%d %H:%M}",
            f"{r.during.upper.astimezone(zone):%Y-%m-%d %H:%M}" if r.during.upper else "",
            r.book,
            r.entered_by_name,
        ]
        for r in found
    )
    return csv_response("gpu-prices.csv", people_csv(about=head, columns=heads, rows=lines))
