"""Pages about taking back: cases, modes of departments, what was only advised, departments over quota, rules."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.core.paginator import Paginator
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import get_object_or_404, render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import pgettext
from django.views.decorators.http import require_GET, require_http_methods

from pool.models import DepartmentMode, ReclaimAdvice, ReclaimCase
from pool.selectors.reclaim import Modes
from pool.services.modes import mode_set
from pool.services.reclaim_rules import rules_active, rules_publish
from pool.services.surplus import departments_over, surplus_reclaim
from pool.web.reclaim_forms import ModeForm, RulesForm
from portal.accounts.middleware import pool_reader
from portal.accounts.models import Department
from portal.kernel.errors import DomainError
from portal.ops.actor import actor_of
from quotas.models import GpuFlavour
from quotas.web.forms import seconds_of

PER_PAGE = 50


def tabs(current: str) -> list[dict[str, Any]]:
    """The views of taking back."""
    rows = [
        ("cases", "pool:reclaim", _("Being taken back")),
        ("modes", "pool:reclaim-modes", _("Modes")),
        ("advice", "pool:reclaim-advice", _("Advice")),
        ("surplus", "pool:reclaim-surplus", _("Over quota")),
        ("rules", "pool:reclaim-rules", _("Rules")),
    ]
    return [{"url": reverse(url), "label": label, "current": name == current} for name, url, label in rows]


@login_required
@require_GET
def cases(request: HttpRequest) -> HttpResponse:
    """Cases: `state` open (default) or closed, `cause` one of the causes."""
    pool_reader(request)
    state = request.GET.get("state", "open")
    found = ReclaimCase.objects.select_related(
        "allocation__holder", "allocation__department", "allocation__flavour", "for_request", "window"
    )
    found = found.filter(closed_at=None) if state == "open" else found.filter(closed_at__isnull=False)
    cause = request.GET.get("cause", "")
    if cause in ReclaimCase.Cause.values:
        found = found.filter(cause=cause)
    context = {
        "page_obj": Paginator(found.order_by("-id"), PER_PAGE).get_page(request.GET.get("page")),
        "tabs": tabs("cases"),
        "state": state,
        "cause": cause,
        "causes": ReclaimCase.Cause.choices,
        "state_options": [("open", pgettext("reclaim", "Open")), ("closed", pgettext("reclaim", "Closed"))],
    }
    return render(request, "pool/reclaim_cases.html", context)


@login_required
@require_http_methods(["GET", "POST"])
def modes(request: HttpRequest) -> HttpResponse:
    """The tree of departments with their modes; one is changed at a time (`department`: its uid, or `all`)."""
    policy = pool_reader(request)
    chosen = request.GET.get("department", "")
    department = get_object_or_404(Department, uid=chosen) if chosen not in ("", "all") else None
    loaded = Modes.load(policy.tree)
    own = loaded.own.get(department.pk if department is not None else None)
    minimum = loaded.minimum.get(department.pk) if department is not None else None
    form = ModeForm(
        request.POST if request.method == "POST" else None,
        initial={
            "mode": own.mode if own else "",
            "willing": bool(own and own.willing),
            "min_run_preempt_s": hours_of(minimum.min_run_preempt_s) if minimum else "",
            "min_run_reclaim_s": hours_of(minimum.min_run_reclaim_s) if minimum else "",
        },
    )
    if request.method == "POST":
        policy.require(policy.administers_pool)
        try:
            mode_set(
                acting_user=actor_of(request),
                department=department,
                mode=form.typed("mode") or None,
                willing=bool(form.typed("willing")),
                minimum_s=None
                if department is None
                else (
                    seconds_of(form.typed("min_run_preempt_s")),
                    seconds_of(form.typed("min_run_reclaim_s")),
                ),
                reason=form.typed("reason")[:500],
            )
            name = department.name if department is not None else _("The installation")
            messages.success(request, _("%(name)s: the mode is set.") % {"name": name})
            return HttpResponseRedirect(reverse("pool:reclaim-modes"))
        except DomainError as error:
            form.take(error)
    rows = [
        {
            "depth": depth,
            "department": row,
            "mode": loaded.mode_of(row.pk),
            "own": loaded.own.get(row.pk),
            "from": loaded.row_of(row.pk),
            "minimum": loaded.minimum.get(row.pk),
        }
        for depth, row in policy.tree.ordered()
        if row.is_open
    ]
    context = {
        "tabs": tabs("modes"),
        "rows": rows,
        "whole": loaded.own.get(None),
        "whole_mode": (loaded.own[None].mode if None in loaded.own else DepartmentMode.Mode.ENFORCE.value),
        "form": form,
        "chosen": chosen,
        "department": department,
        "may_act": policy.administers_pool,
    }
    return render(request, "pool/reclaim_modes.html", context, status=400 if form.errors else 200)


def hours_of(seconds: int | None) -> str:
    """Hours as one would type them."""
    return "" if seconds is None else f"{seconds / 3600:.4g}"


@login_required
@require_GET
def advice(request: HttpRequest) -> HttpResponse:
    """What would have been taken back, newest first."""
    pool_reader(request)
    found = ReclaimAdvice.objects.select_related(
        "allocation__holder", "allocation__department", "allocation__flavour", "for_request"
    )
    page = Paginator(found.order_by("-last_at", "-id"), PER_PAGE).get_page(request.GET.get("page"))
    open_now = ReclaimAdvice.objects.exclude(allocation__state="ended")
    context = {
        "tabs": tabs("advice"),
        "page_obj": page,
        "running": open_now.count(),
        "running_milli": sum(set_of_charges(open_now)),
    }
    return render(request, "pool/reclaim_advice.html", context)


def set_of_charges(rows: Any) -> list[int]:
    """The charge of each allocation once, however often it was advised."""
    return list(dict(rows.values_list("allocation_id", "allocation__charge_milli")).values())


@login_required
@require_http_methods(["GET", "POST"])
def surplus(request: HttpRequest) -> HttpResponse:
    """Departments over their quota: let it run out (nothing to do), or take back with notice."""
    policy = pool_reader(request)
    if request.method == "POST":
        policy.require(policy.administers_pool)
        department = get_object_or_404(Department, uid=request.POST.get("department") or None)
        flavour = get_object_or_404(GpuFlavour, code=request.POST.get("flavour", ""))
        try:
            notice = seconds_of(request.POST.get("hours", "").strip()) or 0
            made = surplus_reclaim(
                acting_user=actor_of(request),
                department=department,
                flavour=flavour,
                reason=request.POST.get("reason", "")[:500],
                notice_s=notice if isinstance(notice, int) else -1,
            )
            messages.success(request, _("%(n)d allocations were given notice.") % {"n": len(made)})
        except DomainError as error:
            messages.error(request, " ".join(str(p["detail"]) for p in error.errors) or str(error.detail))
        return HttpResponseRedirect(reverse("pool:reclaim-surplus"))
    rows = departments_over(policy.tree)
    context = {
        "tabs": tabs("surplus"),
        "rows": rows,
        "hours": rules_active()[1].grace_over_quota_s // 3600,
        "may_act": policy.administers_pool,
    }
    return render(request, "pool/reclaim_surplus.html", context)


@login_required
@require_http_methods(["GET", "POST"])
def rules(request: HttpRequest) -> HttpResponse:
    """The numbers of taking back, and who published them."""
    policy = pool_reader(request)
    row, active = rules_active()
    form = RulesForm(request.POST if request.method == "POST" else None, initial=asdict(active))
    if request.method == "POST":
        policy.require(policy.administers_pool)
        seen = request.POST.get("seen", "")
        try:
            rules_publish(
                acting_user=actor_of(request),
                values=form.values(),
                reason=form.typed("reason"),
                seen_version=int(seen) if seen.isdecimal() else None,
            )
            messages.success(request, _("The rules are in force."))
            return HttpResponseRedirect(reverse("pool:reclaim-rules"))
        except DomainError as error:
            form.take(error)
    context = {
        "tabs": tabs("rules"),
        "form": form,
        "row": row,
        "seen": row.pk if row is not None else 0,
        "may_act": policy.administers_pool,
    }
    return render(request, "pool/reclaim_rules.html", context, status=400 if form.errors else 200)
