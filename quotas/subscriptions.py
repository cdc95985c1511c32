"""What quotas listens to in the outbox, and the notices that it sends from its own events."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.utils.translation import gettext_lazy as _

from portal.accounts.models import User
from portal.notify import kinds
from portal.notify.services import notify
from portal.ops.actor import system
from portal.ops.outbox import subscribe
from quotas.models import ApprovalStep, CapacityRequest, GpuFlavour, QuotaChange
from quotas.selectors.approvers import Deciders
from quotas.services.dependencies import dependencies_settle
from quotas.services.series import series_follow
from quotas.services.suspension import requests_of_suspended
from quotas.services.usage import usage_recompute

DECISIONS = {
    "approved": _("approved"),
    "returned": _("returned to you"),
    "rejected": _("rejected"),
    "declined": _("change not agreed"),
    "lapsed": _("change lapsed unanswered"),
}

kinds.register(
    "quotas.step_opened",
    _("%(ref)s waits for your decision"),
    _("%(who)s asks; by %(due_at)s, then it goes to the level above."),
    group="act",
    label=_("A request waits for my decision"),
    tone="hold",
    icon="approve",
)
kinds.register(
    "quotas.consent_needed",
    _("%(ref)s waits for your consent"),
    _("%(by)s approved it with a change. Without an answer it lapses at %(until)s."),
    group="act",
    label=_("My request was approved with a change"),
    tone="warn",
    icon="edit",
)
kinds.register(
    "quotas.decided",
    _("%(ref)s: %(decision)s"),
    _("%(comment)s"),
    group="request",
    label=_("My request was approved, returned or rejected"),
    tone="info",
    icon="approve",
    prepare=lambda params: {
        **params,
        "decision": DECISIONS.get(params.get("decision", ""), params.get("decision")),
    },
)


def _moment(text: str | None) -> datetime | str:
    """A kept ISO time as a time, which a notice shows in the reader's zone."""
    return datetime.fromisoformat(text) if text else ""


def on_step_opened(payload: dict[str, Any]) -> None:
    """Tell those who are asked first, and their deputies; once per step and cause."""
    step = ApprovalStep.objects.filter(uid=payload["step"], state="open").first()
    if step is None:
        return
    subject = step.request or step.quota_change
    assert subject is not None
    deciders = Deciders.load()
    people = set(deciders.primary(step, subject))
    for principal in list(people):
        people |= deciders.deputies.get(principal, set())
    ref = subject.ref if isinstance(subject, CapacityRequest) else f"Q-{subject.pk}"
    notify(
        user_ids=sorted(people - deciders.barred(subject)),
        kind="quotas.step_opened",
        subject=step,
        threshold=f"{payload.get('cause', 'opened')}-{step.escalated_at:%m%d%H%M}"
        if step.escalated_at
        else str(payload.get("cause", "opened")),
        params={"ref": ref, "who": subject.requester.get_full_name(), "due_at": step.due_at},
        url=f"/approvals/{step.uid}/",
    )


def on_request_decided(payload: dict[str, Any]) -> None:
    """Tell the requester; what the policy passed by itself is told by its start instead."""
    request = CapacityRequest.objects.filter(uid=payload["request"]).first()
    if request is None:
        return
    url, decision = f"/requests/{request.uid}/", str(payload.get("decision", ""))
    if decision == "proposed":
        change = request.consent_change
        notify(
            user_ids=[request.requester_id],
            kind="quotas.consent_needed",
            subject=request,
            threshold=str(request.version),
            params={
                "ref": request.ref,
                "by": change.get("by_name", ""),
                "until": _moment(change.get("until")),
            },
            url=url,
        )
        return
    if decision == "approved" and not request.steps.filter(state="approved").exists():
        return
    notify(
        user_ids=[request.requester_id],
        kind="quotas.decided",
        subject=request,
        threshold=f"{decision}-{request.steps.count()}",
        params={"ref": request.ref, "decision": decision, "comment": payload.get("comment", "")},
        url=url,
    )


def on_change_decided(payload: dict[str, Any]) -> None:
    """Tell who asked for the quota change."""
    change = QuotaChange.objects.filter(uid=payload["quota_change"]).first()
    if change is None:
        return
    notify(
        user_ids=[change.requester_id],
        kind="quotas.decided",
        subject=change,
        threshold=str(payload.get("decision", "")),
        params={"ref": f"Q-{change.pk}", "decision": payload.get("decision", ""), "comment": ""},
        url=f"/quotas/changes/{change.uid}/",
    )


def on_department_changed(payload: dict[str, Any]) -> None:
    """A moved department carries its use along."""
    rows = GpuFlavour.objects.filter(usage_rows__isnull=False).order_by("pk").values_list("pk", flat=True)
    for flavour_id in rows.distinct():
        usage_recompute(flavour_id=flavour_id)


def on_user_suspended(payload: dict[str, Any]) -> None:
    """What a suspended person asked for and does not hold yet is taken back."""
    user = User.objects.filter(uid=payload["user"]).first()
    if user is not None and not user.is_active:
        requests_of_suspended(acting_user=system("suspension"), user=user)


def on_request_over(payload: dict[str, Any]) -> None:
    """It has ended, or will never run: those who wait for it hear of it, and its series moves on."""
    request = CapacityRequest.objects.filter(uid=payload["request"]).first()
    if request is None:
        return
    dependencies_settle(request)
    if request.head_id is not None:
        series_follow(head_id=request.head_id)


subscribe("quotas.request_ended", "quotas.subscriptions.on_request_over")
subscribe("quotas.request_withdrawn", "quotas.subscriptions.on_request_over")
subscribe("quotas.request_decided", "quotas.subscriptions.on_request_over")
subscribe("quotas.step_opened", "quotas.subscriptions.on_step_opened")
subscribe("quotas.request_decided", "quotas.subscriptions.on_request_decided")
subscribe("quotas.change_decided", "quotas.subscriptions.on_change_decided")
subscribe("accounts.department_changed", "quotas.subscriptions.on_department_changed")
subscribe("accounts.user_suspended", "quotas.subscriptions.on_user_suspended")
