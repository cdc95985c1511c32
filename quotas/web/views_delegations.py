"""Delegation: who decides in whose place, from when to when."""

from __future__ import annotations

import uuid

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.db.models import Q
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.views.decorators.http import require_http_methods, require_POST

from portal.accounts.models import User
from portal.kernel.clock import now
from portal.kernel.errors import DomainError, Invalid
from portal.ops.actor import actor_of
from quotas.models import Delegation
from quotas.services.delegations import delegation_create, delegation_revoke
from quotas.web.delegation_form import DelegationForm


@login_required
@require_http_methods(["GET", "POST"])
def delegations(request: HttpRequest) -> HttpResponse:
    """Own delegations, given and received; a form for a new one."""
    policy = request.policy  # type: ignore[attr-defined]
    policy.require(policy.has("lead", "pool_admin", "finance") or _receives(request))
    form, status = DelegationForm(), 200
    if request.method == "POST":
        form = DelegationForm(request.POST)
        try:
            deputy = User.objects.filter(username=form.typed("deputy"), is_active=True).first()
            if deputy is None:
                raise Invalid.field("deputy", _("There is no active person with this user name."))
            start, end = form.moment("starts_at"), form.moment("ends_at")
            if end is None or isinstance(end, str) or isinstance(start, str):
                raise Invalid.field("ends_at", _("A date and time is needed here."))
            made = delegation_create(
                acting_user=actor_of(request), policy=policy, deputy=deputy, starts_at=start, ends_at=end
            )
            messages.success(
                request, _("%(name)s decides in your place.") % {"name": made.deputy.get_full_name()}
            )
            return HttpResponseRedirect(reverse("quotas:delegations"))
        except DomainError as error:
            if error.status == 403:
                raise
            form.take(error)
            status = error.status
    rows = (
        Delegation.objects.filter(Q(principal=request.user) | Q(deputy=request.user))
        .select_related("principal", "deputy")
        .order_by("-id")[:50]
    )
    moment = now()
    context = {
        "form": form,
        "rows": [{"d": d, "state": _state(d, moment)} for d in rows],
        "people": User.objects.filter(is_active=True)
        .exclude(pk=request.user.pk)
        .order_by("display_name")[:300],
        "may_give": policy.has("lead", "pool_admin", "finance"),
    }
    return render(request, "quotas/delegations.html", context, status=status)


def _receives(request: HttpRequest) -> bool:
    return Delegation.objects.filter(deputy_id=request.user.pk).exists()


def _state(row: Delegation, moment: object) -> str:
    if row.revoked_at is not None:
        return "revoked"
    if row.ends_at <= moment:  # type: ignore[operator]
        return "expired"
    return "active" if row.starts_at <= moment else "waiting"  # type: ignore[operator]


@login_required
@require_POST
def delegation_end(request: HttpRequest, uid: uuid.UUID) -> HttpResponse:
    """End a delegation at once."""
    row = (
        Delegation.objects.filter(uid=uid).filter(Q(principal=request.user) | Q(deputy=request.user)).first()
    )
    if row is None:
        raise Http404
    try:
        delegation_revoke(acting_user=actor_of(request), policy=request.policy, delegation=row)  # type: ignore[attr-defined]
        messages.success(request, _("The delegation ended."))
    except DomainError as error:
        messages.error(request, str(error.detail))
    return HttpResponseRedirect(reverse("quotas:delegations"))
