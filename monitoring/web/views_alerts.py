"""Pages of alert rules: what is watched, what fires now, one rule with its history, the form."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django import forms
from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.core.paginator import Paginator
from django.db.models import Count, Q
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views.decorators.http import require_http_methods, require_safe

from monitoring.models import AlertRule
from monitoring.services.alerts import alert_rule_save, open_incident
from pool.models import Site
from portal.accounts.middleware import pool_reader
from portal.kernel.errors import DomainError, PreconditionFailed
from portal.ops.actor import actor_of
from quotas.web.forms import ServiceForm

PER_PAGE = 50
WHOLE = {"inputmode": "numeric"}


class RuleForm(ServiceForm):
    """An alert rule; the service checks."""

    name = forms.CharField(label=gettext_lazy("Name"), widget=forms.TextInput(attrs={"maxlength": "120"}))
    metric = forms.ChoiceField(label=gettext_lazy("Measure"), choices=AlertRule.Metric.choices)
    direction = forms.ChoiceField(label=gettext_lazy("When it lies"), choices=AlertRule.Above.choices)
    threshold = forms.CharField(label=gettext_lazy("Threshold"), widget=forms.TextInput(attrs=WHOLE))
    for_s = forms.CharField(label=gettext_lazy("For at least"), widget=forms.TextInput(attrs=WHOLE))
    severity = forms.ChoiceField(label=gettext_lazy("Severity"), choices=AlertRule.Severity.choices)
    site_code = forms.ChoiceField(label=gettext_lazy("Site"), required=False)
    tell_holder = forms.BooleanField(label=gettext_lazy("Also tell the holder of the card"), required=False)
    active = forms.BooleanField(label=gettext_lazy("Watch it"), required=False)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        field = self.fields["site_code"]
        assert isinstance(field, forms.ChoiceField)
        field.choices = [("", _("All sites")), *Site.objects.values_list("code", "name")]

    def values(self) -> dict[str, Any]:
        """What was typed, numbers as numbers where they are such."""
        out: dict[str, Any] = {name: self.typed(name) for name in self.fields}
        for name in ("threshold", "for_s"):
            text = out[name].replace("\u2212", "-")
            out[name] = int(text) if text.lstrip("-").isdecimal() and len(text) < 12 else text
        return out | {"tell_holder": bool(out["tell_holder"]), "active": bool(out["active"])}


@login_required
@require_safe
def alert_rules(request: HttpRequest) -> HttpResponse:
    """``/alerts/``: all rules with how many of their subjects fire now."""
    policy = pool_reader(request)
    standing = Q(firings__closed_at=None, firings__opened_at__isnull=False)
    rows = AlertRule.objects.annotate(firing=Count("firings", filter=standing)).order_by(
        "-active", "-firing", "name", "id"
    )
    page = Paginator(rows, PER_PAGE).get_page(request.GET.get("page"))
    return render(
        request, "monitoring/alert_rules.html", {"page": page, "may_change": policy.administers_pool}
    )


@login_required
@require_http_methods(["GET", "HEAD", "POST"])
def alert_rule(request: HttpRequest, uid: UUID | None = None) -> HttpResponse:
    """``/alerts/new/`` and ``/alerts/<uid>/``: the form, what fires, what fired."""
    policy = pool_reader(request)
    rule = AlertRule.objects.filter(uid=uid).first() if uid is not None else None
    if uid is not None and rule is None:
        raise Http404
    fresh = rule or AlertRule()
    form = RuleForm(
        request.POST if request.method == "POST" else None,
        initial={
            name: getattr(fresh, name)
            for name in RuleForm.base_fields
            if rule is not None or name != "threshold"
        },
    )
    status = 200
    if request.method == "POST":
        try:
            seen = request.POST.get("seen", "")
            saved = alert_rule_save(
                acting_user=actor_of(request),
                policy=policy,
                values=form.values(),
                rule=rule,
                seen_version=int(seen) if seen.isdecimal() else None,
            )
            messages.success(request, _("%(name)s is kept.") % {"name": saved.name})
            return redirect("monitoring:alert-rule", uid=saved.uid)
        except DomainError as error:
            form.take(error)
            status = 412 if isinstance(error, PreconditionFailed) else 400
            if error.status == 403:
                raise
    context = {
        "rule": rule,
        "form": form,
        "may_change": policy.administers_pool,
        "firings": rule.firings.order_by("closed_at", "-id")[:PER_PAGE] if rule is not None else [],
        "incident": open_incident(rule) if rule is not None else None,
    }
    return render(request, "monitoring/alert_rule.html", context, status=status)
