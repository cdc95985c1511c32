"""The researcher's home: what needs me, what I hold, what waits, what my department may still use."""

from __future__ import annotations

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET

from portal.kernel.clock import now
from portal.web.formats import milli_gpu
from quotas.models import CapacityRequest
from quotas.selectors.approvers import Deciders
from quotas.selectors.requests import department_bars, flavour_names, own_requests
from quotas.selectors.series import progress_of_all
from quotas.selectors.user_limits import held_flavours, limits_of
from quotas.services.approvals import consent_until
from quotas.web import present
from quotas.web.views_requests import at_pool

SHOWN = 8


@login_required
@require_GET
def home(request: HttpRequest) -> HttpResponse:
    """One page, answer first: notices that need an act, GPUs (a fragment of the pool), requests, quota."""
    policy = request.policy  # type: ignore[attr-defined]
    names = flavour_names()
    rows = own_requests(request.user.pk, limit=SHOWN)
    deciders = Deciders.of_page(policy)
    progress = progress_of_all([r for r in rows if r.series])
    where = policy.tree.rows.get(request.user.home_department_id or 0)
    state = CapacityRequest.State
    holding, held = held_flavours(request.user.pk)
    context = {
        "moment": now(),
        "department": where,
        "rows": [present.row_of(r, names, deciders, progress) for r in rows],
        "at_pool": at_pool(rows),
        "total": CapacityRequest.objects.filter(requester=request.user, head=None).count(),
        "consents": [
            {
                "r": r,
                "title": present.change_title(r, names),
                "until": consent_until(r),
                "by": r.consent_change.get("by_name"),
            }
            for r in rows
            if r.state == state.NEEDS_CONSENT
        ],
        "returned": [r for r in rows if r.state == state.RETURNED],
        "bars": department_bars(where.pk, policy.tree) if where is not None else [],
        "limits": limits_of(request.user.pk),
        "holding": holding,
        "held": present.listed(f"{milli_gpu(milli)} × {name}" for name, milli in held),
        "held_milli": sum(milli for _name, milli in held),
        "may_ask": bool(policy.asks_for),
    }
    return render(request, "quotas/home.html", context)
