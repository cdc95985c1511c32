"""Steps of a request or quota change: made from a plan, opened one after another, skipped, escalated.

Everything here runs inside the caller's transaction with the request or change locked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from django.utils.translation import gettext_lazy as _

from portal.accounts.models import Role
from portal.kernel.clock import now
from portal.kernel.errors import Conflict
from portal.kernel.models import advance
from portal.ops.outbox import outbox_add
from quotas.engine import approval
from quotas.models import ApprovalStep, CapacityRequest, QuotaChange
from quotas.selectors.approvers import Deciders

State = ApprovalStep.State
ROLE_OF: dict[str, str] = {"lead": Role.LEAD, "admin": Role.POOL_ADMIN, "finance": Role.FINANCE}
UNDECIDED = (State.WAITING, State.OPEN)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A step to make: role, its department (leads only), hours to decide, the rule that asked for it."""

    role: str
    department_id: int | None
    timeout_hours: int
    rule: str


def wanted_steps(
    plan: approval.ApprovalPlan, subject: CapacityRequest | QuotaChange, deciders: Deciders
) -> list[Wanted]:
    """The plan's steps with the people in mind: a lead step goes to the nearest lead who may decide; where a
    role has nobody who may, the administrators take it. Conflict ``no_approver`` when there is nobody at all:
    the installation needs another person first.
    """
    barred = deciders.barred(subject)
    out: list[Wanted] = []
    for step in plan.steps:
        role, place, found = ROLE_OF[step.role], None, True
        if role == Role.LEAD:
            nearest = deciders.lead_place(subject.department_id, barred)
            found = nearest is not None
            place = nearest[0] if nearest is not None else None
        else:
            found = bool(deciders.holders(role, subject.department_id, barred))
        if not found:
            role, place = Role.POOL_ADMIN, None
            if not deciders.holders(role, subject.department_id, barred):
                raise Conflict(
                    code="no_approver",
                    detail=_(
                        "Nobody may decide this request: the only approver is its requester. A second "
                        "department lead or pool administrator has to be appointed first."
                    ),
                    extra={"role": ROLE_OF[step.role]},
                )
        if all((w.role, w.department_id) != (role, place) for w in out):
            out.append(Wanted(role, place, step.timeout_hours, step.rule))
    return out


def steps_make(subject: CapacityRequest | QuotaChange, wanted: Sequence[Wanted]) -> list[ApprovalStep]:
    """A new round of steps; those of older rounds that nobody decided are skipped. The first one opens."""
    steps_skip(subject)
    last = subject.steps.order_by("-round", "-position").first()
    number = (last.round if last is not None else 0) + 1
    made = [
        ApprovalStep(
            **owner_of(subject),
            requester_id=subject.requester_id,
            round=number,
            position=position,
            role=want.role,
            department_id=want.department_id,
            timeout_hours=want.timeout_hours,
            rule=want.rule,
        )
        for position, want in enumerate(wanted, 1)
    ]
    ApprovalStep.objects.bulk_create(made)
    step_open_next(subject)
    return made


def owner_of(subject: CapacityRequest | QuotaChange) -> dict[str, CapacityRequest | QuotaChange]:
    """The foreign key that names the subject."""
    return {"request": subject} if isinstance(subject, CapacityRequest) else {"quota_change": subject}


def step_open_next(subject: CapacityRequest | QuotaChange) -> ApprovalStep | None:
    """Open the first waiting step; None when none is left."""
    step = subject.steps.filter(state=State.WAITING).order_by("round", "position").first()
    if step is None:
        return None
    moment = now()
    advance(
        ApprovalStep.objects.filter(pk=step.pk),
        state=State.OPEN,
        opened_at=moment,
        due_at=moment + timedelta(hours=step.timeout_hours),
    )
    step.refresh_from_db()
    tell_opened(step)
    return step


def tell_opened(step: ApprovalStep, cause: str = "opened") -> None:
    """Tell subscribers that a step waits for a decision."""
    subject = step.request or step.quota_change
    assert subject is not None
    outbox_add(
        "quotas.step_opened",
        {
            "step": str(step.uid),
            "request": str(step.request.uid) if step.request is not None else None,
            "quota_change": str(step.quota_change.uid) if step.quota_change is not None else None,
            "role": step.role,
            "due_at": step.due_at.isoformat() if step.due_at else None,
            "cause": cause,
        },
        key=str(subject)[:100],
    )


def steps_skip(subject: CapacityRequest | QuotaChange) -> int:
    """What nobody decided is not needed any more."""
    return advance(subject.steps.filter(state__in=UNDECIDED), state=State.SKIPPED)


def step_decide_row(
    step: ApprovalStep,
    *,
    state: str,
    decided_by_id: int | None,
    on_behalf_of_id: int | None,
    comment: str,
    changed_to: dict[str, object] | None = None,
) -> ApprovalStep:
    """Write one decision; Conflict ``already_decided`` with who and when, if somebody was faster."""
    changed = advance(
        ApprovalStep.objects.filter(pk=step.pk, state=State.OPEN, version=step.version),
        state=state,
        decided_at=now(),
        decided_by_id=decided_by_id,
        on_behalf_of_id=on_behalf_of_id,
        comment=comment,
        changed_to=changed_to or {},
    )
    step.refresh_from_db()
    if not changed:
        raise decided_already(step)
    return step


def decided_already(step: ApprovalStep) -> Conflict:
    """The error of whoever comes second."""
    name = step.decided_by.get_full_name() if step.decided_by is not None else None
    if name is None:
        detail: object = _("This step is not open any more.")
    else:
        detail = _("{name} decided this already: {state}.").format(name=name, state=step.get_state_display())
    return Conflict(
        code="already_decided",
        detail=detail,
        extra={
            "state": step.state,
            "decided_by": name,
            "decided_at": step.decided_at.isoformat() if step.decided_at else None,
        },
    )
