"""The reclaim ladder: notice → grace → checkpoint hook → stop → seen free → granted again.

One open case per allocation. Each step is a conditional move of the case under its allocation's row, stamped,
told in the allocation's history and through the outbox, each once. A worker that dies between two steps loses
nothing: the sweep finds what is due. What is not stopped yet can be withdrawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from django.db import transaction
from django.db.models import Q
from django.utils.translation import gettext_lazy as _

from pool.engine.ladder import NO_HOOK, CaseFacts, Rules, hook_of, next_act, times
from pool.locks import allocation_lock
from pool.models import (
    AgentCommand,
    Allocation,
    AllocationEvent,
    MaintenanceWindow,
    ReclaimCase,
    ReclaimRuleSet,
    SchedulerCycle,
)
from pool.services import hooks, stopping
from pool.services.keeps import MARGIN, keep_extend
from pool.services.reclaim_rules import rules_active
from pool.services.shrinking import members_stop
from pool.transitions import LIVE, WITHDRAWABLE, climb
from portal.kernel.bulk import rows_copy
from portal.kernel.clock import now
from portal.kernel.errors import Conflict, Invalid
from portal.kernel.models import advance
from portal.kernel.units import from_ms, to_ms
from portal.ops.actor import Actor, system
from portal.ops.outbox import outbox_add, outbox_add_many
from portal.ops.services import audit_record
from portal.ops.services.audit import AuditRow, audit_record_many, audit_row
from quotas.models import CapacityRequest

RULES = system("rules")
Cause, Step = ReclaimCase.Cause, ReclaimCase.Step
SWEEP_LIMIT = 2000


# -- begin ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Notice:
    """What is to be taken back (an allocation whose row the caller holds), why, and with how much time."""

    allocation: Allocation
    cause: str
    rule: str
    grace_s: int = 0
    reason: str = ""
    figures: Mapping[str, Any] | None = None
    for_request_id: int | None = None
    cycle: SchedulerCycle | None = None
    window: MaintenanceWindow | None = None
    members: Sequence[int] = ()
    """Ranks of a gang that are taken alone."""


def case_begin(
    *,
    acting_user: Actor,
    allocation_id: int,
    cause: str,
    rule: str,
    grace_s: int = 0,
    reason: str = "",
    figures: Mapping[str, Any] | None = None,
    window: MaintenanceWindow | None = None,
) -> ReclaimCase:
    """Give notice: the work is stopped after ``grace_s`` and not before its checkpoint hook had its time.

    A case that is open already goes on; the earlier stop wins, with its cause. Conflict `wrong_state` where it is
    ending. What is due at once is done after commit.
    """
    if cause not in Cause.values:
        raise Invalid.field("cause", _("There is no such cause."))
    with transaction.atomic():
        notice = Notice(allocation_lock(allocation_id), cause, rule, grace_s, reason, figures, window=window)
        (case,) = cases_begin(acting_user=acting_user, notices=[notice])
        transaction.on_commit(lambda: case_step(case_id=case.pk), robust=True)
    return case


def cases_begin(*, acting_user: Actor, notices: Sequence[Notice]) -> list[ReclaimCase]:
    """Give notice of many at once, in the caller's transaction and by a few statements; a case each, in the same
    order. Conflict, and nothing written, as `notice_judge` says.
    """
    at, (row, rules) = now(), rules_active()
    known = cases_open([one.allocation.pk for one in notices])
    cases: list[ReclaimCase] = []
    for one in notices:
        notice_judge(one, known.get(one.allocation.pk))
    made: list[ReclaimCase] = []
    told: list[tuple[Notice, ReclaimCase]] = []
    for one in notices:
        case, fields = known.get(one.allocation.pk), _fields(one, acting_user, at, row, rules)
        if case is None:
            case = ReclaimCase(allocation=one.allocation, for_request_id=one.for_request_id, **fields)
            made.append(case)
            known[one.allocation.pk] = case
        elif case.pk is None or not _joined(case, one, fields):
            cases.append(case)
            continue
        cases.append(case)
        told.append((one, case))
    ReclaimCase.objects.bulk_create(made)
    _tell_notices(acting_user, told)
    for one, case in told:
        # A cycle takes back many: what each needs at once is a worker's to do.
        if one.for_request_id is not None and next_act(_facts(case), to_ms(at)) is not None:
            transaction.on_commit(partial(_step_soon, case.pk), robust=True)
    return cases


def cases_open(allocation_ids: Sequence[int]) -> dict[int, ReclaimCase]:
    """Open cases by allocation."""
    rows = ReclaimCase.objects.filter(allocation_id__in=allocation_ids, closed_at=None)
    return {case.allocation_id: case for case in rows}


def notice_judge(notice: Notice, case: ReclaimCase | None) -> None:
    """Conflict `wrong_state` where the work is ending, `promised_already` where its places are promised to another
    request by its open case (one preemptor per victim).
    """
    if notice.allocation.state not in LIVE:
        raise Conflict(code="wrong_state", detail=_("It is ending already."))
    if case is None or notice.for_request_id is None:
        return
    if case.for_request_id not in (None, notice.for_request_id):
        raise promised_already()


def promised_already() -> Conflict:
    """One preemptor per victim: somebody else is to have its places."""
    return Conflict(code="promised_already", detail=_("Its places are promised to another request already."))


def _fields(
    notice: Notice, actor: Actor, at: datetime, row: ReclaimRuleSet | None, rules: Rules
) -> dict[str, Any]:
    allocation = notice.allocation
    runs = allocation.state == Allocation.State.RUNNING
    hook = hook_of(allocation.request.checkpoint, rules) if runs else NO_HOOK
    # Work that did not begin has nothing to lose: who needs its place does not wait for it.
    grace = 0 if notice.cause == Cause.PREEMPTED and not runs else max(0, notice.grace_s)
    planned = times(at=to_ms(at), grace_s=grace, hook=hook)
    return {
        "cause": notice.cause,
        "rule": notice.rule[:64],
        "figures": dict(notice.figures or {}),
        "text": notice.reason,
        "by_name": actor.name,
        "rules": row,
        "cycle": notice.cycle,
        "window": notice.window,
        "members": sorted(notice.members),
        "requeue": notice.cause in stopping.BACK_IN_LINE,
        "noticed_at": at,
        "grace_until": from_ms(planned.stop_at),
        "hook": hook.kind,
        "hook_at": from_ms(planned.hook_at) if hook.kind else None,
    }


def _step_soon(case_id: int) -> None:
    """Have a worker take the next step now; a lost message costs seconds: the sweep finds what is due."""
    from pool.tasks import step_case

    step_case.apply_async((case_id,), retry=False)


def _joined(case: ReclaimCase, notice: Notice, fields: dict[str, Any]) -> bool:
    """Whether an open case took over the new fields: only where all of it is stopped sooner by them."""
    if (
        notice.members
        or case.step not in WITHDRAWABLE
        or (case.grace_until and case.grace_until <= fields["grace_until"])
    ):
        return False
    if case.step == Step.CHECKPOINT:  # its hook was called: only the stop moves
        fields = {name: value for name, value in fields.items() if name not in ("hook", "hook_at")}
    advance(
        ReclaimCase.objects.filter(pk=case.pk),
        for_request_id=notice.for_request_id or case.for_request_id,
        **fields,
    )
    case.refresh_from_db()
    return True


def _tell_notices(actor: Actor, told: Sequence[tuple[Notice, ReclaimCase]]) -> None:
    events: list[AllocationEvent] = []
    audits: list[AuditRow] = []
    news: list[tuple[str, dict[str, Any], str]] = []
    for notice, case in told:
        assert case.grace_until is not None and case.noticed_at is not None
        allocation, reason = notice.allocation, notice.reason
        facts = {
            "cause": case.cause,
            "rule": case.rule,
            "grace_until": case.grace_until.isoformat(),
            "figures": case.figures,
            "members": case.members,
        }
        events.append(
            AllocationEvent(
                allocation=allocation,
                at=case.noticed_at,
                kind="reclaim_notice",
                actor_name=actor.name,
                facts=facts,
                text=reason,
            )
        )
        audits.append(
            audit_row(
                acting_user=actor,
                action="allocation.reclaim_noticed",
                subject=allocation,
                after=facts,
                reason=reason,
            )
        )
        if case.cause != Cause.RELEASED:  # who gives back needs no warning
            payload = {
                "allocation": str(allocation.uid),
                "case": str(case.uid),
                "holder_id": allocation.holder_id,
                "reason": reason,
                **facts,
            }
            news.append(("pool.allocation_reclaim", payload, allocation.ref))
    rows_copy(events)
    audit_record_many(audits)
    outbox_add_many(news)


def take_back(
    *, acting_user: Actor, allocation_id: int, cause: str, rule: str = "", reason: str = ""
) -> Allocation:
    """End it now, for a person or a rule: through its checkpoint hook where that is a command or an address,
    else by the stop itself, which carries the checkpoint signal.

    Asked again while the hook works, it is stopped at once. Conflict where it is ending already.
    """
    with transaction.atomic():
        allocation = allocation_lock(allocation_id)
        case = stopping.case_open(allocation)
        hook = hook_of(allocation.request.checkpoint, rules_active()[1])
        asked = case is not None and case.checkpoint_at is not None
        if allocation.state == Allocation.State.RUNNING and hook.kind in ("command", "url") and not asked:
            case_begin(
                acting_user=acting_user, allocation_id=allocation_id, cause=cause, rule=rule, reason=reason
            )
            allocation.refresh_from_db()
            return allocation
        return stopping.stop(
            acting_user=acting_user, allocation_id=allocation_id, cause=cause, rule=rule, reason=reason
        )


# -- step ----------------------------------------------------------------------------------------------------


def case_step(*, case_id: int) -> str:
    """Do what is due for a case now: `hook`, `stop`, or `` (nothing, or another worker did it)."""
    with transaction.atomic():
        allocation_id = (
            ReclaimCase.objects.filter(pk=case_id, closed_at=None)
            .values_list("allocation_id", flat=True)
            .first()
        )
        if allocation_id is None:
            return ""
        allocation = allocation_lock(allocation_id)
        case = ReclaimCase.objects.get(pk=case_id)
        if not case.is_open or allocation.state not in LIVE:
            return ""
        if case.hook and case.step == Step.NOTICE and allocation.state != Allocation.State.RUNNING:
            advance(ReclaimCase.objects.filter(pk=case.pk), hook="", hook_at=None)
            case.refresh_from_db()
        act = next_act(_facts(case), to_ms(now()))
        if act == "hook":
            _call_hook(allocation, case)
        elif act == "stop" and case.members:
            members_stop(acting_user=RULES, allocation=allocation, case=case)
        elif act == "stop":
            stopping.stop(
                acting_user=RULES,
                allocation_id=allocation.pk,
                cause=case.cause,
                rule=case.rule,
                reason=case.text,
            )
        return act or ""


def _facts(case: ReclaimCase) -> CaseFacts:
    return CaseFacts(
        step=case.step,  # type: ignore[arg-type]
        hook=case.hook,  # type: ignore[arg-type]
        hook_at=to_ms(case.hook_at) if case.hook_at else 0,
        stop_at=to_ms(case.grace_until) if case.grace_until else 0,
        checkpoint_done=case.checkpoint_done_at is not None,
    )


def _call_hook(allocation: Allocation, case: ReclaimCase) -> None:
    """Call the hook, with all its seconds even where it comes late (a worker was away, the clock jumped)."""
    at = now()
    assert case.grace_until is not None and case.hook_at is not None
    seconds = (case.grace_until - case.hook_at).total_seconds()
    until = max(case.grace_until, at + timedelta(seconds=seconds))
    if not climb(case, "hook", checkpoint_at=at, grace_until=until):
        return
    if case.for_request_id is not None:
        keep_extend(request_id=case.for_request_id, until=until + MARGIN)
    facts = {"cause": case.cause, "hook": case.hook, "seconds": round(seconds), "until": until.isoformat()}
    AllocationEvent.objects.create(
        allocation=allocation, at=at, kind="checkpoint_asked", actor_name=RULES.name, facts=facts
    )
    outbox_add(
        "pool.reclaim_step",
        {"allocation": str(allocation.uid), "case": str(case.uid), "step": str(case.step), **facts},
        key=allocation.ref,
    )
    hooks.order_after_commit(allocation=allocation, case=case, seconds=seconds)


def checkpoint_reported(
    *, case_id: int, member: int | None, ok: bool, detail: str = "", exit_code: int | None = None
) -> bool:
    """A hook told its end: of one member, or (None) of all of it. True where it was news.

    When all have saved themselves, the stop need not wait for the end of the grace; a failure shortens nothing. A
    signal is only delivered: what it began ends with the process, so it is not waited for less.
    """
    with transaction.atomic():
        allocation_id = ReclaimCase.objects.values_list("allocation_id", flat=True).get(pk=case_id)
        allocation = allocation_lock(allocation_id)
        case = ReclaimCase.objects.get(pk=case_id)
        name = "all" if member is None else str(member)
        if case.step != Step.CHECKPOINT or name in case.checkpoint_result:
            return False
        at = now()
        result = {**case.checkpoint_result, name: {"ok": ok, "detail": detail[:500], "exit_code": exit_code}}
        due = hooks.members_due(allocation, case)
        told = {key: one for key, one in result.items() if isinstance(one, dict)}
        through = case.hook != ReclaimCase.Hook.SIGNAL and (name == "all" or due <= set(told))
        through = through and all(one["ok"] for one in told.values())
        advance(
            ReclaimCase.objects.filter(pk=case.pk),
            checkpoint_result=result,
            checkpoint_done_at=at if through else None,
        )
        AllocationEvent.objects.create(
            allocation=allocation,
            at=at,
            kind="checkpoint_done" if ok else "checkpoint_failed",
            actor_name="agent" if member is not None else RULES.name,
            facts={"member": member, "detail": detail[:500], "exit_code": exit_code, "hook": case.hook},
        )
        if through:
            transaction.on_commit(lambda: case_step(case_id=case_id), robust=True)
    return True


# -- withdraw ------------------------------------------------------------------------------------------------


def case_withdraw(*, acting_user: Actor, case_id: int, why: str) -> bool:
    """Take the notice back while the work is not stopped; it goes on as if nothing had been. False where it
    was stopped or closed meanwhile."""
    with transaction.atomic():
        allocation_id = ReclaimCase.objects.values_list("allocation_id", flat=True).get(pk=case_id)
        allocation = allocation_lock(allocation_id)
        case = ReclaimCase.objects.get(pk=case_id)
        at = now()
        if allocation.state not in LIVE or not climb(case, "withdraw", closed_at=at, withdrawn_why=why[:32]):
            return False
        advance(
            AgentCommand.objects.filter(
                allocation=allocation, kind="checkpoint", acked_at=None, cancelled_at=None
            ),
            cancelled_at=at,
        )
        facts = {"cause": case.cause, "rule": case.rule, "why": why}
        AllocationEvent.objects.create(
            allocation=allocation, at=at, kind="reclaim_withdrawn", actor_name=acting_user.name, facts=facts
        )
        audit_record(
            acting_user=acting_user, action="allocation.reclaim_withdrawn", subject=allocation, after=facts
        )
        outbox_add(
            "pool.reclaim_withdrawn",
            {
                "allocation": str(allocation.uid),
                "case": str(case.uid),
                "holder_id": allocation.holder_id,
                **facts,
            },
            key=allocation.ref,
        )
    return True


def displacements_settle(*, request_id: int | None = None) -> int:
    """Withdraw evictions whose request does not wait any more (cancelled, or started elsewhere), where the
    victim has not stopped. Returns how many. `None`: of all requests."""
    found = ReclaimCase.objects.filter(
        closed_at=None, cause=Cause.PREEMPTED, step__in=WITHDRAWABLE, for_request__isnull=False
    ).exclude(for_request__state=CapacityRequest.State.QUEUED)
    if request_id is not None:
        found = found.filter(for_request_id=request_id)
    rows = list(found.order_by("allocation_id").values_list("pk", "for_request__state"))
    gone = frozenset({CapacityRequest.State.ALLOCATED})
    return sum(
        case_withdraw(acting_user=RULES, case_id=pk, why="not_needed" if state in gone else "requester_left")
        for pk, state in rows
    )


# -- sweep ---------------------------------------------------------------------------------------------------


def ladder_sweep() -> dict[str, int]:
    """Do all that is due; returns how many hooks were called, works stopped, notices withdrawn."""
    done = {"hooks": 0, "stopped": 0, "withdrawn": displacements_settle()}
    for pk in cases_due(now()):
        act = case_step(case_id=pk)
        if act:
            done["hooks" if act == "hook" else "stopped"] += 1
    return done


def cases_due(at: datetime) -> list[int]:
    """Open cases with something to do at ``at``, the longest due first."""
    due = (
        Q(step=Step.NOTICE, hook_at__lte=at)
        | Q(step__in=[Step.NOTICE, Step.CHECKPOINT], grace_until__lte=at)
        | Q(step=Step.CHECKPOINT, checkpoint_done_at__isnull=False)
    )
    rows = ReclaimCase.objects.filter(due, closed_at=None, allocation__state__in=LIVE)
    return list(rows.order_by("grace_until", "id").values_list("pk", flat=True)[:SWEEP_LIMIT])
