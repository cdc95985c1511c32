"""What a changed amount would do, beside the dialog in which an approver types it. Writes nothing."""

from __future__ import annotations

import uuid
from typing import Any

from django.contrib.auth.decorators import login_required
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils.translation import gettext as _
from django.utils.translation import pgettext
from django.views.decorators.http import require_POST

from portal.accounts.policy import policy_of
from portal.kernel.errors import DomainError
from quotas.models import CapacityRequest
from quotas.selectors.approvals import visible_steps
from quotas.services.approvals import CHANGEABLE
from quotas.services.asking import read_request
from quotas.services.judging import verdict_of
from quotas.services.requests import wishes_of
from quotas.web import present
from quotas.web.forms import seconds_of
from quotas.web.present import role_word
from quotas.web.words import gpus, money

ROLES = {"lead": "lead", "admin": "pool_admin", "finance": "finance"}


def typed_amounts(request: HttpRequest) -> dict[str, Any]:
    """The changed amounts of the dialog, as the service takes them."""
    names = [n for n in CHANGEABLE if n != "duration_s"]
    out: dict[str, Any] = {n: request.POST[n].strip() for n in names if request.POST.get(n, "").strip()}
    if text := request.POST.get("hours", "").strip():
        out["duration_s"] = seconds_of(text)
    return out


@login_required
@require_POST
def approval_preview(request: HttpRequest, uid: uuid.UUID) -> HttpResponse:
    """Quota after, borrowed part, cost and later steps: as asked, and as changed."""
    step = visible_steps(request.policy).filter(uid=uid).first()  # type: ignore[attr-defined]
    if step is None or step.request is None:
        raise Http404
    asked = step.request
    context: dict[str, Any] = {}
    try:
        context["effects"] = list(
            zip(labels(), _column(asked, {}), _column(asked, typed_amounts(request)), strict=True)
        )
    except DomainError as error:
        context["problems"] = [str(p["detail"]) for p in error.errors] or [str(error.detail)]
    return render(request, "quotas/_change_effects.html", context)


def labels() -> list[str]:
    """The rows, in order."""
    return [_("Quota after"), _("Borrowed"), _("Cost, at most"), _("Steps")]


def _column(asked: CapacityRequest, changed: dict[str, Any]) -> list[str]:
    policy = policy_of(asked.requester)
    cleaned = read_request({**wishes_of(asked), **changed}, user=asked.requester, policy=policy)
    verdict = verdict_of(cleaned, policy=policy)
    option = verdict.best
    if option is None:
        return ["–"] * 4
    plan = verdict.plan
    steps = present.listed(role_word(ROLES[s.role]) for s in plan.steps) if plan is not None else ""
    if plan is not None and plan.outcome == "refused":
        steps = _("refused by the policy")
    return [
        f"{gpus(option.used + option.charge)} / {gpus(option.limit)}",
        gpus(option.borrowed_part),
        money(verdict.dearest.cost_micro if verdict.dearest is not None else None),
        steps or pgettext("approval", "nobody"),
    ]
