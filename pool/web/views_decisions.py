"""Pages about the scheduler's decisions and its policy: what one cycle decided and why, replayed on demand; versions
of the policy from draft to roll-back.
"""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.core.paginator import Paginator
from django.db import transaction
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import get_object_or_404, render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import pgettext
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from pool.models import SchedulerCycle, SchedulingPolicy
from pool.selectors.decisions import cycles_listed, ops_read
from pool.services.decisions import decision_replay
from pool.services.policies import (
    policy_change,
    policy_discard,
    policy_draft,
    policy_publish,
    policy_roll_back,
)
from pool.tasks import preview_policy
from pool.web.policy_forms import PolicyForm, differing
from portal.accounts.middleware import pool_reader
from portal.kernel.errors import DomainError
from portal.ops.actor import actor_of

PER_PAGE = 50
STEPS = ("read", "decide", "keep", "apply", "write")
NAMES = {"class_weights": "class_weights_training"}
"""Problems of the weights stand beside the first of their fields."""


def tabs(current: str) -> list[dict[str, Any]]:
    """The views of the scheduler."""
    rows = [
        ("decisions", "pool:decisions", pgettext("scheduler", "Decisions")),
        ("policies", "pool:policies", pgettext("scheduler", "Policy")),
    ]
    return [{"url": reverse(url), "label": label, "current": name == current} for name, url, label in rows]


@login_required
@require_GET
def decision_list(request: HttpRequest) -> HttpResponse:
    """Cycles that decided something; `kind` placed, evicted, refused; `request` a number."""
    pool_reader(request)
    kind, asked = request.GET.get("kind", ""), request.GET.get("request", "")
    page = Paginator(cycles_listed(kind=kind, request=asked), PER_PAGE).get_page(request.GET.get("page"))
    context = {
        "tabs": tabs("decisions"),
        "page_obj": page,
        "kind": kind,
        "asked": asked,
        "kind_options": [
            ("", _("All")),
            ("placed", _("Placed")),
            ("evicted", _("Took back")),
            ("refused", _("Left out on writing")),
        ],
    }
    return render(request, "pool/decision_list.html", context)


@login_required
@require_GET
def decision(request: HttpRequest, uid: Any) -> HttpResponse:
    """One decision as a proof: what was looked at, each step with its rule and figures, what was left out."""
    pool_reader(request)
    cycle = get_object_or_404(SchedulerCycle.objects.select_related("policy", "snapshot"), uid=uid)
    context = {
        "cycle": cycle,
        "ops": ops_read(cycle),
        "more": max(0, len(cycle.ops) - 200),
        "switches": differing(cycle.policy),
        "timings": [
            (name, cycle.timings[name])
            for name in ("read", "decide", "keep", "apply", "write")
            if name in cycle.timings
        ],
    }
    return render(request, "pool/decision.html", context)


@login_required
@require_POST
def decision_again(request: HttpRequest, uid: Any) -> HttpResponse:
    """Decide it again from what was kept, and say whether the same came out (a fragment)."""
    pool_reader(request)
    cycle = get_object_or_404(SchedulerCycle.objects.select_related("policy", "snapshot"), uid=uid)
    context: dict[str, Any] = {"cycle": cycle}
    try:
        context["found"] = decision_replay(cycle=cycle)
    except DomainError as error:
        context["error"] = error.detail
    return render(request, "pool/_decision_replay.html", context)


@login_required
@require_GET
def policy_list(request: HttpRequest) -> HttpResponse:
    """All versions, the one in force first."""
    policy = pool_reader(request)
    rows = SchedulingPolicy.objects.select_related("based_on").order_by("-active", "-published_at", "-id")
    context = {
        "tabs": tabs("policies"),
        "page_obj": Paginator(rows, PER_PAGE).get_page(request.GET.get("page")),
        "active": next((row for row in rows[:1] if row.active), None),
        "may_act": policy.administers_pool,
    }
    return render(request, "pool/policy_list.html", context)


@login_required
@require_http_methods(["GET", "POST"])
def policy_new(request: HttpRequest) -> HttpResponse:
    """Begin a draft from the version in force, or from another (`from`: its uid)."""
    pool_reader(request).require(request.policy.administers_pool)  # type: ignore[attr-defined]
    base = SchedulingPolicy.objects.filter(active=True).first()
    if request.GET.get("from"):
        base = get_object_or_404(SchedulingPolicy, uid=request.GET["from"])
    form = PolicyForm(request.POST if request.method == "POST" else None, values=base.values if base else {})
    if request.method == "POST":
        try:
            made = policy_draft(
                acting_user=actor_of(request),
                name=form.typed("name"),
                values=form.values(),
                note=form.typed("note"),
                based_on=base,
            )
            return HttpResponseRedirect(reverse("pool:policy", args=[made.uid]))
        except DomainError as error:
            form.take(error, NAMES)
    context = {"form": form, "base": base, "tabs": tabs("policies")}
    return render(request, "pool/policy_form.html", context, status=400 if form.errors else 200)


@login_required
@require_http_methods(["GET", "POST"])
def policy_detail(request: HttpRequest, uid: Any) -> HttpResponse:
    """One version: what it changes, its preview, and for a draft its form."""
    policy = pool_reader(request)
    row = get_object_or_404(SchedulingPolicy.objects.select_related("based_on"), uid=uid)
    draft = row.published_at is None
    data = request.POST if request.method == "POST" else None
    form = (
        PolicyForm(data, values=row.values, initial={"name": row.name, "note": row.note}) if draft else None
    )
    if request.method == "POST":
        policy.require(policy.administers_pool)
        try:
            policy_change(
                acting_user=actor_of(request),
                policy=row,
                values=form.values() if form is not None else {},
                note=form.typed("note") if form is not None else "",
                version=int(request.POST.get("version", "0") or 0),
            )
            messages.success(request, _("The draft is saved."))
            return HttpResponseRedirect(reverse("pool:policy", args=[row.uid]))
        except DomainError as error:
            if form is None:
                raise
            form.take(error, NAMES)
    context = {
        "row": row,
        "form": form,
        "draft": draft,
        "switches": differing(row),
        "may_act": policy.administers_pool,
        "tabs": tabs("policies"),
    }
    status = 400 if form is not None and form.is_bound and form.errors else 200
    return render(request, "pool/policy_detail.html", context, status=status)


@login_required
@require_POST
def policy_act(request: HttpRequest, uid: Any, act: str) -> HttpResponse:
    """`preview`, `publish`, `discard`; `roll-back` of the version in force."""
    policy = pool_reader(request)
    policy.require(policy.administers_pool)
    row = get_object_or_404(SchedulingPolicy, uid=uid)
    actor, reason = actor_of(request), request.POST.get("reason", "")[:500]
    target = reverse("pool:policy", args=[row.uid])
    try:
        if act == "preview":
            SchedulingPolicy.objects.filter(pk=row.pk).update(preview={"running": True})
            transaction.on_commit(lambda: preview_policy.apply_async((row.pk,), retry=False), robust=True)
        elif act == "publish":
            policy_publish(acting_user=actor, policy=row, reason=reason)
            messages.success(request, _("%(policy)s is in force from the next cycle on.") % {"policy": row})
        elif act == "discard":
            policy_discard(acting_user=actor, policy=row)
            target = reverse("pool:policies")
        elif act == "roll-back":
            back = policy_roll_back(acting_user=actor, reason=reason)
            messages.success(request, _("%(policy)s is in force again.") % {"policy": back})
            target = reverse("pool:policies")
        else:
            return HttpResponse(status=404)
    except DomainError as error:
        messages.error(request, " ".join(str(p["detail"]) for p in error.errors) or str(error.detail))
    return HttpResponseRedirect(target)


@login_required
@require_GET
def policy_preview_part(request: HttpRequest, uid: Any) -> HttpResponse:
    """The preview as a fragment; asks again while it is being made."""
    pool_reader(request)
    return render(request, "pool/_policy_preview.html", {"row": get_object_or_404(SchedulingPolicy, uid=uid)})
