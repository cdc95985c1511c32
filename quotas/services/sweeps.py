"""What time does to approvals: reminders, escalation, changes that nobody answered. Run each minute; harmless
when run twice, and right after a missed night: each reminder is sent once, each step goes up one level a
time-out.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.db import transaction

from portal.accounts.models import Role
from portal.accounts.policy import DepartmentTree
from portal.kernel.clock import now
from portal.kernel.errors import DomainError
from portal.kernel.models import advance
from portal.ops.actor import system
from portal.ops.services.audit import audit_record
from portal.ops.services.incidents import incident_open
from quotas.models import ApprovalStep, CapacityRequest, QuotaChange
from quotas.selectors.approvers import Deciders, next_above
from quotas.services.approval_steps import tell_opened
from quotas.services.approvals import consent_lapse, consent_until
from quotas.services.history import note_event
from quotas.services.locks import quota_change_lock, request_lock, step_lock

State = ApprovalStep.State
BATCH = 500
REMIND_AT = 0.75  # of the time-out
SWEEPER = "approval clock"


def approvals_sweep() -> dict[str, int]:
    """Remind, escalate, let unanswered changes lapse; returns how many of each."""
    moment = now()
    out = {"reminded": 0, "escalated": 0, "lapsed": 0}
    deciders = Deciders.load(DepartmentTree.load())
    open_steps = ApprovalStep.objects.filter(state=State.OPEN).order_by("due_at", "id")
    for step in open_steps.filter(due_at__lte=moment)[:BATCH]:
        out["escalated"] += _escalate(step.pk, deciders)
    for step in open_steps.filter(reminded_at=None, due_at__gt=moment)[: BATCH * 4]:
        whole = timedelta(hours=step.timeout_hours)
        if step.due_at is not None and moment >= step.due_at - whole * (1 - REMIND_AT):
            out["reminded"] += _remind(step.pk)
    for request in CapacityRequest.objects.filter(state=CapacityRequest.State.NEEDS_CONSENT).order_by("id"):
        until = consent_until(request)
        if until is not None and until <= moment:
            out["lapsed"] += _lapse(request.pk)
    return out


def _subject_of(step: ApprovalStep) -> CapacityRequest | QuotaChange:
    if step.request_id is not None:
        return request_lock(step.request_id)
    assert step.quota_change_id is not None
    return quota_change_lock(step.quota_change_id)


def _remind(step_id: int) -> int:
    with transaction.atomic():
        rows = ApprovalStep.objects.filter(pk=step_id, state=State.OPEN, reminded_at=None)
        if not rows.update(reminded_at=now()):
            return 0
        tell_opened(ApprovalStep.objects.get(pk=step_id), cause="reminder")
        return 1


def _escalate(step_id: int, deciders: Deciders) -> int:
    """One level up: the lead above, then the administrators. At the top the step stays open, with an
    incident.
    """
    with transaction.atomic():
        unlocked = ApprovalStep.objects.get(pk=step_id)
        subject = _subject_of(unlocked)
        step = step_lock(step_id)
        moment = now()
        if (
            step.state != State.OPEN
            or step.due_at is None
            or step.due_at > moment
            or subject.state != "in_approval"
        ):
            return 0
        barred = deciders.barred(subject)
        values: dict[str, Any] = {
            "escalated_at": moment,
            "due_at": moment + timedelta(hours=step.timeout_hours),
        }
        above = next_above(deciders.tree, step.department_id)
        nearest = deciders.lead_place(above, barred) if step.role == Role.LEAD and above is not None else None
        before = {"role": step.role, "department": step.department_id}
        if step.role == Role.LEAD and nearest is not None and nearest[0] != step.department_id:
            values["department_id"] = nearest[0]
        elif step.role != Role.POOL_ADMIN and deciders.holders(
            Role.POOL_ADMIN, subject.department_id, barred
        ):
            values |= {"role": Role.POOL_ADMIN, "department_id": None}
        else:
            incident_open(
                kind="approval_overdue",
                dedupe_key=f"approval_overdue:{step.uid}",
                subject=subject,
                facts={"due_at": step.due_at.isoformat(), "role": step.role},
            )
        advance(ApprovalStep.objects.filter(pk=step.pk), **values, reminded_at=None)
        step.refresh_from_db()
        facts = {"from": before, "to": {"role": step.role, "department": step.department_id}}
        if isinstance(subject, CapacityRequest):
            note_event(request_id=subject.pk, kind="escalated", actor_name=SWEEPER, facts=facts)
        audit_record(
            acting_user=system(SWEEPER),
            action="approval.escalated",
            subject=subject,
            before=before,
            after=facts["to"],
            department_id=subject.department_id,
        )
        tell_opened(step, cause="escalated")
        return 1


def _lapse(request_id: int) -> int:
    try:
        with transaction.atomic():
            request = request_lock(request_id)
            until = consent_until(request)
            if request.state != CapacityRequest.State.NEEDS_CONSENT or until is None or until > now():
                return 0
            consent_lapse(request=request, actor_name=SWEEPER, kind="lapsed")
            return 1
    except DomainError:
        return 0
