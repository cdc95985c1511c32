"""Pages of what-ifs: the list, the form, one with its answer."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django import forms
from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from monitoring.models import Scenario
from monitoring.selectors.what_if import (
    by_department,
    comparison,
    may_look,
    scenario_for,
    scenarios_for,
    sides_of,
)
from monitoring.services.what_if import may_ask, scenario_ask, scenario_forget, scenario_share
from monitoring.web.what_if_form import PastForm, TraceForm
from monitoring.web.what_if_words import (
    change_words,
    error_words,
    figure_of,
    period_words,
    side_words,
    summary,
)
from portal.accounts.middleware import policy_of_request
from portal.accounts.policy import Policy
from portal.kernel.clock import now
from portal.kernel.errors import DomainError
from portal.ops.actor import actor_of
from quotas.engine.billing import local_day
from quotas.models import GpuFlavour
from quotas.selectors.billing_time import billing_zone
from quotas.web.money.ledger import show_error

SHOWN = 50
TONES = {"ready": "ok", "failed": "bad", "running": "info", "queued": "hold"}
ICONS = {"ready": "check", "failed": "fault", "running": "refresh", "queued": "clock"}
FIELDS = {"from": "since", "to": "until", "quotas": "guaranteed_1", "nodes": "node_count", "prices": "price"}
"""Where the form shows what the service says of a part of the question."""


def _form(request: HttpRequest, policy: Policy, kind: type[forms.Form], **more: Any) -> Any:
    data = {"data": request.POST, "files": request.FILES} if more.pop("filled") else {}
    if kind is PastForm:
        more["today"] = local_day(now(), billing_zone())
        more["departments"] = [(d.code, policy.tree.path(d.pk)) for _depth, d in _ordered(policy)]
    return kind(**data, **more)


def _ordered(policy: Policy) -> list[tuple[int, Any]]:
    return [(depth, row) for depth, row in policy.tree.ordered()]


@login_required
@require_http_methods(["GET", "HEAD", "POST"])
def what_ifs(request: HttpRequest) -> HttpResponse:
    """``/reports/what-if/``; POST asks (``source`` pool or trace)."""
    policy = policy_of_request(request)
    policy.require(may_look(policy))
    source = request.POST.get("source", "pool")
    sent = request.method == "POST"
    past = _form(request, policy, PastForm, filled=sent and source == "pool", prefix="past")
    trace = _form(request, policy, TraceForm, filled=sent and source == "trace", prefix="trace")
    form = trace if source == "trace" else past
    if sent:
        policy.require(may_ask(policy))
        if form.is_valid() and (scenario := _ask(request, form)) is not None:
            messages.success(request, _("It is being played; you will be told when it is ready."))
            return HttpResponseRedirect(reverse("monitoring:what-if", args=[scenario.uid]))
    rows = [
        {
            "scenario": one,
            "tone": TONES.get(one.state, "mute"),
            "icon": ICONS.get(one.state, ""),
            "percent": _percent(one),
        }
        for one in scenarios_for(policy)[:SHOWN]
    ]
    context = {
        "rows": [{**row, "period": period_words(row["scenario"].params)} for row in rows],  # type: ignore[attr-defined]
        "past": past,
        "trace": trace,
        "trace_open": source == "trace",
        "may_ask": may_ask(policy),
        "zone": billing_zone().key,
    }
    return render(request, "monitoring/what_if/list.html", context, status=400 if form.errors else 200)


def _percent(scenario: Scenario) -> int:
    return min(100, 100 * scenario.done // scenario.total) if scenario.total else 0


def _ask(request: HttpRequest, form: Any) -> Scenario | None:
    data = form.cleaned_data
    try:
        return scenario_ask(
            acting_user=actor_of(request),
            name=data["name"],
            params=form.params(),
            jobs=data["jobs"].read() if "jobs" in data else None,
            quotas=data["quotas"].read() if "jobs" in data else None,
        )
    except DomainError as error:
        for problem in error.errors:
            problem["pointer"] = FIELDS.get(problem["pointer"], problem["pointer"])
            if problem["pointer"] not in form.fields:
                problem["pointer"] = "name"
        show_error(form, error)
        return None


@login_required
@require_safe
def what_if(request: HttpRequest, uid: UUID) -> HttpResponse:
    """``/reports/what-if/<uid>/``: one, with its answer once there is one."""
    policy = policy_of_request(request)
    scenario = scenario_for(policy, uid)
    context: dict[str, Any] = {
        "scenario": scenario,
        "period": period_words(scenario.params),
        "changes": change_words(scenario.params, policy),
        "tone": TONES.get(scenario.state, "mute"),
        "icon": ICONS.get(scenario.state, ""),
        "percent": _percent(scenario),
        "error": error_words().get(scenario.error_code, scenario.error_code),
        "mine": scenario.owner_id == policy.user.pk,
        "trace": scenario.params.get("source") == "trace",
        "zone": billing_zone().key,
    }
    if scenario.state == Scenario.State.READY:
        groups = by_department(scenario.result)
        names = dict(GpuFlavour.objects.values_list("code", "name"))
        longest = max((s for g in groups for s in g["p50"] if s is not None), default=0)
        for group in groups:
            group["flavour"] = names.get(group["flavour"], group["flavour"])
            group["bars"] = [
                None if s is None else round(100 * s / longest, 1) if longest else 0.0 for s in group["p50"]
            ]
        context |= {
            "rows": comparison(scenario.result),
            "sides": [side_words()[side] for side in sides_of(scenario.result)],
            "groups": groups[:SHOWN],
            "more": len(groups) - SHOWN,
            "pairs": [g for g in groups if g["bars"] != [None, None]][:8],
            "figure": figure_of(scenario.result, numbered=scenario.params.get("source") == "trace"),
            "summary": summary(scenario.result),
        }
    return render(request, "monitoring/what_if/one.html", context)


@login_required
@require_POST
def what_if_act(request: HttpRequest, uid: UUID, act: str) -> HttpResponse:
    """POST ``share``, ``unshare`` or ``forget``: for its owner."""
    scenario = scenario_for(policy_of_request(request), uid)
    if act == "forget":
        scenario_forget(acting_user=actor_of(request), scenario=scenario)
        messages.success(request, _("%(name)s is gone.") % {"name": scenario.name})
        return HttpResponseRedirect(reverse("monitoring:what-ifs"))
    scenario_share(acting_user=actor_of(request), scenario=scenario, shared=act == "share")
    return HttpResponseRedirect(reverse("monitoring:what-if", args=[scenario.uid]))
