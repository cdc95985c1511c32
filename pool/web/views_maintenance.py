"""Pages of maintenance windows: list, new, one window with whom it hits, calling it off."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.core.paginator import Paginator
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import get_object_or_404, render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import pgettext
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from pool.models import MaintenanceWindow, Node, Site
from pool.services.maintenance import nodes_of, window_cancel, window_plan, work_in_the_way
from pool.transitions import WINDOW_OPEN
from pool.web.reclaim_forms import WindowForm
from portal.accounts.middleware import policy_of_request
from portal.kernel.clock import now
from portal.kernel.errors import DomainError
from portal.kernel.units import to_ms
from portal.ops.actor import actor_of
from quotas.web.forms import local_input, seconds_of

PER_PAGE = 50


@login_required
@require_GET
def window_list(request: HttpRequest) -> HttpResponse:
    """Windows to come and under way (default), or those that are over. Everybody may know when nodes go away."""
    state = request.GET.get("state", "open")
    found = MaintenanceWindow.objects.select_related("site").prefetch_related("nodes")
    found = (
        found.filter(state__in=WINDOW_OPEN).order_by("starts_at", "id")
        if state == "open"
        else found.exclude(state__in=WINDOW_OPEN).order_by("-starts_at", "-id")
    )
    context = {
        "page_obj": Paginator(found, PER_PAGE).get_page(request.GET.get("page")),
        "state": state,
        "state_options": [
            ("open", _("To come and under way")),
            ("over", pgettext("maintenance", "Over")),
        ],
        "may_act": policy_of_request(request).administers_pool,
    }
    return render(request, "pool/maintenance_list.html", context)


@login_required
@require_http_methods(["GET", "POST"])
def window_new(request: HttpRequest) -> HttpResponse:
    """Plan a window; `node` in the address chooses one."""
    policy = policy_of_request(request)
    policy.require(policy.administers_pool)
    begin = now().replace(minute=0, second=0, microsecond=0) + timedelta(days=1)
    initial = {
        "starts_at": local_input(begin),
        "ends_at": local_input(begin + timedelta(hours=2)),
        "notice_h": "24",
        "nodes": [request.GET.get("node", "")],
    }
    form = WindowForm(request.POST if request.method == "POST" else None, initial=initial)
    if request.method == "POST":
        window = _planned(request, form)
        if window is not None:
            messages.success(request, _("%(ref)s is planned.") % {"ref": window.ref})
            return HttpResponseRedirect(reverse("pool:maintenance-window", args=[window.uid]))
    return render(request, "pool/maintenance_new.html", {"form": form}, status=400 if form.errors else 200)


def _planned(request: HttpRequest, form: WindowForm) -> MaintenanceWindow | None:
    starts, ends = form.moment("starts_at"), form.moment("ends_at")
    notice = seconds_of(form.typed("notice_h"))
    site = Site.objects.filter(code=form.typed("site")).first() if form.typed("site") else None
    nodes = list(Node.objects.filter(uid__in=form.picked())) if site is None else []
    far = now() - timedelta(days=1)
    try:
        return window_plan(
            acting_user=actor_of(request),
            title=form.typed("title"),
            reason=form.typed("reason"),
            starts_at=starts if isinstance(starts, datetime) else far,
            ends_at=ends if isinstance(ends, datetime) else far,
            notice_s=notice if isinstance(notice, int) else -1,
            site=site,
            nodes=nodes,
        )
    except DomainError as error:
        form.take(error, {"notice_s": "notice_h"})
        return None


@login_required
@require_GET
def window_detail(request: HttpRequest, uid: Any) -> HttpResponse:
    """One window: when, which nodes, whom it hits, what became of them."""
    policy = policy_of_request(request)
    window = get_object_or_404(MaintenanceWindow.objects.select_related("site"), uid=uid)
    window.uid_text = str(window.uid)  # type: ignore[attr-defined]
    told = list(
        window.cases.select_related(
            "allocation__holder", "allocation__department", "allocation__flavour", "allocation__request"
        ).order_by("-id")[:100]
    )
    is_open = window.state in WINDOW_OPEN
    ahead = []
    if is_open:
        ahead = list(
            work_in_the_way(window)
            .exclude(pk__in=[case.allocation_id for case in told if case.is_open])
            .select_related("holder", "department", "flavour")[:100]
        )
    for row in [*ahead, *[case.allocation for case in told]]:
        row.seen = row.holder_id == request.user.pk or row.department_id in policy.reads  # type: ignore[attr-defined]
    touched = {row.pk: row for row in [*ahead, *[case.allocation for case in told if case.is_open]]}
    context = {
        "window": window,
        "nodes": list(nodes_of(window)[:200]),
        "told": told,
        "ahead": ahead,
        "people": len({row.holder_id for row in touched.values()}),
        "touched": len(touched),
        "rest_ms": sum(_rest_ms(row) for row in touched.values()),
        "is_open": is_open,
        "may_act": policy.administers_pool,
    }
    return render(request, "pool/maintenance_window.html", context)


def _rest_ms(allocation: Any) -> int:
    """GPU-milliseconds of its lease that are not run yet."""
    if allocation.expires_at is None:
        return 0
    return int(max(0, to_ms(allocation.expires_at) - to_ms(now())) * allocation.charge_milli // 1000)


@login_required
@require_POST
def window_act(request: HttpRequest, uid: Any) -> HttpResponse:
    """Call it off, or end it early."""
    window = get_object_or_404(MaintenanceWindow, uid=uid)
    try:
        window = window_cancel(
            acting_user=actor_of(request), window=window, reason=request.POST.get("reason", "")[:1000]
        )
        messages.success(
            request, _("%(ref)s: %(state)s.") % {"ref": window.ref, "state": window.get_state_display()}
        )
    except DomainError as error:
        messages.error(request, " ".join(str(p["detail"]) for p in error.errors) or str(error.detail))
    return HttpResponseRedirect(reverse("pool:maintenance-window", args=[window.uid]))
