"""Decisions on open steps: approve, approve with a change, return, reject; and the requester's answer to a
change.

One lock order (request or change, then step) makes two deciders at once a winner and somebody who is told.
Self- approval is refused here for page, API, token and delegate alike, and by the database below.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db import transaction
from django.utils.translation import gettext_lazy as _

from portal.accounts.policy import Policy, policy_of
from portal.kernel.clock import now
from portal.kernel.errors import Conflict, DomainError, Invalid, NotFound, Refused
from portal.ops.actor import Actor
from portal.ops.outbox import outbox_add
from portal.ops.services.audit import audit_record
from quotas.models import ApprovalStep, CapacityRequest, QuotaChange
from quotas.selectors.approvers import Deciders, May
from quotas.selectors.shapes import AskShape
from quotas.services.approval_steps import (
    UNDECIDED,
    decided_already,
    step_decide_row,
    step_open_next,
    steps_make,
    steps_skip,
)
from quotas.services.asking import read_request
from quotas.services.history import note_event
from quotas.services.judging import judge
from quotas.services.locks import quota_change_lock, request_lock, step_lock
from quotas.services.quota_changes import change_decided
from quotas.services.requests import request_queue, wishes_of
from quotas.transitions import move, move_change

State = ApprovalStep.State
CONSENT_HOURS = 24
CHANGEABLE = ("gpus_per_node", "nodes", "fraction_milli", "fraction_mib", "mig_count", "duration_s")
BULK_MOST_MILLI = 4000
BULK_MOST_ROWS = 200


def step_decide(
    *,
    acting_user: Actor,
    policy: Policy,
    step: ApprovalStep,
    decision: str,
    comment: str = "",
    changed: Mapping[str, Any] | None = None,
    override: bool = False,
    version: int | None = None,
) -> ApprovalStep:
    """Decide one open step: ``approve``, ``change`` (approve other amounts; the requester must consent),
    ``return`` or ``reject``; the last three need a comment. ``override`` accepts sums of guarantees that do
    not add up (quota changes by administrators only).

    Refused ``self_approval`` or ``not_your_step``; Conflict ``already_decided`` or ``wrong_state``.
    """
    if decision not in ("approve", "change", "return", "reject"):
        raise Invalid.field("decision", _("approve, change, return or reject."))
    comment = comment.strip()[:2000]
    if decision in ("return", "reject") and not comment:
        raise Invalid.field("comment", _("Give the requester a reason: it goes with the decision."))
    with transaction.atomic():
        subject = _lock_subject(step)
        held = step_lock(step.pk)
        may = _require(acting_user, policy, held, subject)
        if held.state != State.OPEN:
            raise decided_already(held)
        if subject.state != "in_approval":
            raise Conflict(
                code="wrong_state",
                detail=_("It waits for something else now: {state}.").format(
                    state=subject.get_state_display()
                ),
                extra={"state": subject.state},
            )
        if version is not None and held.version != version:
            raise Conflict(
                code="version_changed",
                detail=_("It was changed by somebody else meanwhile. Load it again and repeat the change."),
                extra={"current_version": held.version},
            )
        if decision == "change":
            if isinstance(subject, QuotaChange):
                raise Invalid.field("decision", _("A quota change is returned with a proposal instead."))
            return _propose(acting_user, may, held, subject, comment, changed or {})
        _decide(acting_user, may, held, subject, decision, comment, override)
        return held


def _lock_subject(step: ApprovalStep) -> CapacityRequest | QuotaChange:
    if step.request_id is not None:
        return request_lock(step.request_id)
    assert step.quota_change_id is not None
    return quota_change_lock(step.quota_change_id)


def _require(
    acting_user: Actor, policy: Policy, step: ApprovalStep, subject: CapacityRequest | QuotaChange
) -> May:
    """May the person decide? Roles are read anew under the lock, not from the page that was shown."""
    if acting_user.user is None:
        raise Refused(code="person_needed", detail=_("Only a person decides."))
    may = Deciders.load(policy.tree).may(acting_user.user.pk, step, subject)
    if may.ok:
        return may
    if may.why == "self_approval":
        raise Refused(
            code="self_approval",
            detail=_(
                "Nobody decides their own request, nor does a delegate of theirs: another person has to."
            ),
        )
    raise Refused(code="not_your_step", detail=_("Your roles do not allow this: the step belongs to others."))


def _decide(
    acting_user: Actor,
    may: May,
    step: ApprovalStep,
    subject: CapacityRequest | QuotaChange,
    decision: str,
    comment: str,
    override: bool,
) -> None:
    states = {"approve": State.APPROVED, "return": State.RETURNED, "reject": State.REJECTED}
    step_decide_row(
        step,
        state=states[decision],
        decided_by_id=acting_user.user_id,
        on_behalf_of_id=may.behalf,
        comment=comment,
    )
    kind = {"approve": "approved", "return": "returned", "reject": "rejected"}[decision]
    facts = {"role": step.role, "rule": step.rule, "position": step.position}
    if may.behalf is not None:
        facts["on_behalf_of"] = Deciders.load().names.get(may.behalf, str(may.behalf))
    if isinstance(subject, CapacityRequest):
        note_event(request_id=subject.pk, kind=kind, actor_name=acting_user.name, facts=facts, text=comment)
    audit_record(
        acting_user=acting_user,
        action=f"approval.{kind}",
        subject=subject,
        after={"step": str(step.uid), **facts},
        reason=comment,
        department_id=subject.department_id,
    )
    if decision == "approve":
        if step_open_next(subject) is not None:
            return
        if isinstance(subject, CapacityRequest):
            request_queue(request=subject, rule=subject.policy_rule, actor_name=acting_user.name)
        else:
            move_change(subject, "approve", decided_at=now())
            change_decided(acting_user=acting_user, change=subject, override=override)
        return
    steps_skip(subject)
    if isinstance(subject, CapacityRequest):
        values = {"decided_at": now()} | (
            {"ended_at": now(), "end_reason": "rejected"} if kind == "rejected" else {}
        )
        move(subject, decision, **values)
        outbox_add(
            "quotas.request_decided",
            {"request": str(subject.uid), "decision": kind, "comment": comment},
            key=subject.ref,
        )
    else:
        move_change(subject, decision, decided_at=now())
        outbox_add(
            "quotas.change_decided",
            {"quota_change": str(subject.uid), "decision": kind},
            key=str(subject)[:100],
        )


def _propose(
    acting_user: Actor,
    may: May,
    step: ApprovalStep,
    request: CapacityRequest,
    comment: str,
    changed: Mapping[str, Any],
) -> ApprovalStep:
    """Approve with other amounts: the step stays open until the requester agrees."""
    if not comment:
        raise Invalid.field("comment", _("Give the requester a reason: it goes with the decision."))
    values = {
        name: value for name, value in changed.items() if name in CHANGEABLE and value not in ("", None)
    }
    unknown = sorted(set(changed) - set(CHANGEABLE))
    if unknown:
        raise Invalid.field(unknown[0], _("An approver may change amounts and the duration, nothing else."))
    requester_policy = policy_of(request.requester)
    cleaned = read_request({**wishes_of(request), **values}, user=request.requester, policy=requester_policy)
    values = {name: cleaned[name] for name in values if cleaned[name] != getattr(request, name)}
    if not values:
        raise Invalid.field("changed", _("This changes nothing: approve it as it is."))
    judged = judge(cleaned, user=request.requester, policy=requester_policy)
    until = now() + timedelta(hours=CONSENT_HOURS)
    proposal = {
        "values": values,
        "before": {name: getattr(request, name) for name in values},
        "charge_milli": judged.fields["charge_milli"],
        "cost_at_most_micro": judged.fields["cost_at_most_micro"],
        "step": str(step.uid),
        "by_id": acting_user.user_id,
        "by_name": acting_user.name,
        "behalf_id": may.behalf,
        "comment": comment,
        "until": until.isoformat(),
    }
    move(request, "propose", consent_change=proposal)
    facts = {"before": proposal["before"], "after": values, "until": proposal["until"]}
    note_event(request_id=request.pk, kind="proposed", actor_name=acting_user.name, facts=facts, text=comment)
    audit_record(
        acting_user=acting_user,
        action="approval.proposed",
        subject=request,
        before=facts["before"],
        after=values,
        reason=comment,
    )
    outbox_add(
        "quotas.request_decided", {"request": str(request.uid), "decision": "proposed"}, key=request.ref
    )
    return step


def request_consent(
    *, acting_user: Actor, policy: Policy, request: CapacityRequest, agree: bool, version: int | None = None
) -> CapacityRequest:
    """The requester's answer to changed amounts. Agreed: the step counts as approved and the policy is asked
    again with the new amounts (a step may fall away or come). Not agreed: the step is open again.
    """
    with transaction.atomic():
        held = request_lock(request.pk)
        if acting_user.user_id != held.requester_id:
            raise Refused(code="not_yours", detail=_("Only its requester can agree to a change."))
        if version is not None and held.version != version:
            raise Conflict(
                code="version_changed",
                detail=_("It was changed by somebody else meanwhile. Load it again and repeat the change."),
                extra={"current_version": held.version},
            )
        proposal = dict(held.consent_change)
        if not agree:
            return consent_lapse(request=held, actor_name=acting_user.name, kind="declined")
        user = held.requester
        cleaned = read_request({**wishes_of(held), **proposal.get("values", {})}, user=user, policy=policy)
        judged = judge(cleaned, user=user, policy=policy)
        values = proposal.get("values", {})
        fields = {key: judged.fields[key] for key in judged.fields if key != "policy_rule"}
        move(held, "consent", consent_change={}, **values, **fields)
        note_event(request_id=held.pk, kind="consented", actor_name=acting_user.name, facts={"after": values})
        audit_record(
            acting_user=acting_user,
            action="request.consented",
            subject=held,
            before=proposal.get("before", {}),
            after=values,
        )
        step = step_lock(ApprovalStep.objects.values_list("pk", flat=True).get(uid=proposal["step"]))
        step_decide_row(
            step,
            state=State.APPROVED,
            decided_by_id=proposal["by_id"],
            on_behalf_of_id=proposal.get("behalf_id"),
            comment=proposal["comment"],
            changed_to=values,
        )
        note_event(
            request_id=held.pk,
            kind="approved",
            actor_name=proposal["by_name"],
            facts={"role": step.role, "rule": step.rule, "changed": values},
            text=proposal["comment"],
        )
        agreed = {
            (s.role, s.department_id) for s in held.steps.filter(round=step.round, state=State.APPROVED)
        }
        left = [want for want in judged.steps if (want.role, want.department_id) not in agreed]
        planned = list(held.steps.filter(state__in=UNDECIDED).order_by("position"))
        if [(s.role, s.department_id) for s in planned] != [(w.role, w.department_id) for w in left]:
            steps_make(held, left)
        else:
            step_open_next(held)
        if not held.steps.filter(state__in=UNDECIDED).exists():
            request_queue(request=held, rule=judged.rule, actor_name=acting_user.name)
        return held


def consent_lapse(*, request: CapacityRequest, actor_name: str, kind: str) -> CapacityRequest:
    """No agreement (``declined``, or ``lapsed`` after the time): back to the approver. Inside the caller's
    lock.
    """
    proposal = dict(request.consent_change)
    move(request, "decline", consent_change={})
    note_event(
        request_id=request.pk,
        kind=kind,
        actor_name=actor_name,
        facts={"proposed": proposal.get("values", {})},
    )
    step = ApprovalStep.objects.filter(uid=proposal.get("step"), state=State.OPEN).first()
    if step is not None and step.due_at is not None and step.due_at < now() + timedelta(hours=4):
        # The approver gets time to decide again: the wait was not the approver's
        ApprovalStep.objects.filter(pk=step.pk).update(due_at=now() + timedelta(hours=step.timeout_hours))
    outbox_add("quotas.request_decided", {"request": str(request.uid), "decision": kind}, key=request.ref)
    return request


@dataclass(frozen=True, slots=True)
class BulkResult:
    """What became of one row of a bulk decision."""

    uid: uuid.UUID
    label: str
    ok: bool
    code: str = ""
    detail: str = ""


def steps_approve(
    *, acting_user: Actor, policy: Policy, step_uids: Sequence[uuid.UUID], comment: str = ""
) -> list[BulkResult]:
    """Approve several requests of one small shape, each in its own transaction with its own result. Invalid
    where the rows are of different shapes, above 4 GPUs, or too many: then nothing is decided.
    """
    wanted = list(dict.fromkeys(step_uids))
    rows = {
        s.uid: s
        for s in ApprovalStep.objects.filter(uid__in=wanted, request__isnull=False).select_related(
            "request__flavour"
        )
    }
    if not wanted or len(wanted) > BULK_MOST_ROWS:
        raise Invalid.field("steps", _("Choose between 1 and {n} requests.").format(n=BULK_MOST_ROWS))
    shapes = {(r.request.flavour_id, AskShape.of(r.request)) for r in rows.values() if r.request is not None}
    if len(shapes) > 1:
        raise Invalid.field(
            "steps", _("Only requests of the same flavour and shape can be decided together.")
        )
    if any(r.request is not None and r.request.charge_milli > BULK_MOST_MILLI for r in rows.values()):
        raise Invalid.field("steps", _("Requests of more than 4 GPUs are decided one by one."))
    out: list[BulkResult] = []
    for uid in wanted:
        step = rows.get(uid)
        if step is None or step.request is None:
            out.append(BulkResult(uid, str(uid), False, "not_found", str(_("There is no such step."))))
            continue
        try:
            step_decide(
                acting_user=acting_user, policy=policy, step=step, decision="approve", comment=comment
            )
            out.append(BulkResult(uid, step.request.ref, True))
        except DomainError as error:
            out.append(BulkResult(uid, step.request.ref, False, error.code, str(error.detail)))
    return out


def consent_until(request: CapacityRequest) -> datetime | None:
    """When an unanswered change lapses."""
    text = request.consent_change.get("until")
    return datetime.fromisoformat(text) if text else None


def open_step_of(subject: CapacityRequest | QuotaChange) -> ApprovalStep:
    """The step that waits for a decision now; NotFound when there is none."""
    step = subject.steps.filter(state=State.OPEN).order_by("round", "position").first()
    if step is None:
        raise NotFound(code="no_open_step", detail=_("Nothing is open to decide here."))
    return step
