"""Carrying out what a plan takes back: evictions with the places they free, moves, new layouts of cards.

The evictions of one request stand or fall together: either all its victims can be taken and its places be kept,
or nothing is done and the next cycle decides anew. Locks: allocations by id, then nothing else of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import structlog
from django.db import DatabaseError, IntegrityError, transaction
from django.utils.translation import gettext_lazy as _

from pool.engine.model import Evict, Kept, Move, Plan
from pool.locks import allocation_lock, lock_wait_limit
from pool.models import Allocation, ReclaimCase, SchedulerCycle
from pool.selectors.reclaim import Modes, evictions_by_request
from pool.services.keeps import MARGIN, keep_place, keeps_settle
from pool.services.ladder import case_begin
from pool.services.layouts import layout_ask
from pool.services.modes import advice_note
from pool.services.reclaim_rules import rules_active
from portal.kernel.clock import now
from portal.kernel.errors import Conflict, DomainError
from portal.kernel.units import to_ms
from portal.ops.actor import Actor, system
from portal.ops.services import incident_open
from quotas.models import CapacityRequest
from quotas.services.locks import request_lock

log = structlog.get_logger(__name__)
SCHEDULER = system("scheduler")
CONSOLIDATE = "consolidate"


@dataclass(frozen=True, slots=True)
class Evicted:
    """What became of one request's evictions: the cases, or the code why nothing was done."""

    request_id: int
    cases: tuple[ReclaimCase, ...] = ()
    refusal: str = ""


def plan_reclaim_apply(
    *, plan: Plan, cycle: SchedulerCycle | None = None, acting_user: Actor = SCHEDULER
) -> list[Evicted]:
    """Carry out all that a plan takes back, request by request, and note what modes spared."""
    if plan.keeps:
        keeps_settle()
    keeps = {keep.request_id: keep for keep in plan.keeps}
    groups: dict[int, list[Evict]] = {}
    for evict in plan.evicts:
        groups.setdefault(evict.for_request_id, []).append(evict)
    modes = Modes.load() if groups or plan.moves or plan.spared else None
    answers = [
        evictions_apply(
            evicts=group, keep=keeps.get(request_id), cycle=cycle, acting_user=acting_user, modes=modes
        )
        for request_id, group in groups.items()
    ]
    answers += [
        move_apply(move=move, cycle=cycle, acting_user=acting_user, modes=modes) for move in plan.moves
    ]
    moved = {move.for_request_id for move in plan.moves}
    for keep in plan.keeps:
        if keep.request_id in moved - groups.keys():
            _keep_for_moves(keep, cycle)
    for layout in plan.layouts:
        layout_ask(layout=layout, cycle=cycle)
    spared_note(evicts=plan.spared)
    return answers


def evictions_apply(
    *,
    evicts: Sequence[Evict],
    keep: Kept | None,
    cycle: SchedulerCycle | None = None,
    acting_user: Actor = SCHEDULER,
    modes: Modes | None = None,
) -> Evicted:
    """Begin the ladder for all victims of one request and keep its places; nothing is half done.

    ``modes``: those of the departments, where the caller has read them after the plan was made.
    Refused (by code) where the request waits no more, a victim ended, is not interruptible, is promised to
    another request or spared by its department's mode, or a place is kept for somebody else.
    """
    request_id = evicts[0].for_request_id
    try:
        with transaction.atomic():
            cases = _evict(evicts, keep, cycle, acting_user, modes)
    except _Spared as spared:
        advice_note(
            allocation_id=spared.evict.allocation_id,
            cause=ReclaimCase.Cause.PREEMPTED,
            rule=spared.evict.rule,
            mode=spared.mode,
            figures=spared.evict.figures,
            for_request_id=request_id,
        )
        return Evicted(request_id, refusal="spared")
    except DomainError as error:
        return _refused(request_id, error.code)
    except IntegrityError as error:
        diag = getattr(error.__cause__, "diag", None)
        return _refused(request_id, str(getattr(diag, "constraint_name", "") or "constraint"))
    except DatabaseError as error:  # a lock that did not come in time: the next cycle tries again
        return _refused(request_id, f"database_{type(error).__name__.lower()}")
    _alert_of_thrashing(cases)
    return Evicted(request_id, tuple(cases))


class _Spared(Exception):
    def __init__(self, evict: Evict, mode: str) -> None:
        super().__init__(mode)
        self.evict, self.mode = evict, mode


def _refused(request_id: int, code: str) -> Evicted:
    log.info("eviction_refused", request=request_id, refusal=code)
    return Evicted(request_id, refusal=code)


def _evict(
    evicts: Sequence[Evict],
    keep: Kept | None,
    cycle: SchedulerCycle | None,
    actor: Actor,
    modes: Modes | None,
) -> list[ReclaimCase]:
    lock_wait_limit()
    _waiting(evicts[0].for_request_id)
    modes, grace_s = modes or Modes.load(), rules_active()[1].grace_preempted_s
    cases: list[ReclaimCase] = []
    for evict in sorted(evicts, key=lambda one: one.allocation_id):
        allocation = allocation_lock(evict.allocation_id)
        mode = modes.spares(allocation.department_id, allocation.request_id)
        if mode is not None:
            raise _Spared(evict, mode)
        if not allocation.interruptible:
            raise Conflict(code="not_interruptible", detail=_("It may not be interrupted."))
        cases.append(
            case_begin(
                acting_user=actor,
                allocation_id=allocation.pk,
                cause=ReclaimCase.Cause.PREEMPTED,
                rule=evict.rule,
                grace_s=grace_s,
                figures={"kind": evict.cause, **evict.figures},
                for_request_id=evict.for_request_id,
                cycle=cycle,
                members=evict.members,
            )
        )
    if keep is not None:
        last = max(case.grace_until for case in cases if case.grace_until is not None)
        keep_place(keep=keep, cycle=cycle, not_before=last + MARGIN)
    return cases


def _waiting(request_id: int) -> None:
    request = request_lock(request_id)
    if request.state != CapacityRequest.State.QUEUED:
        raise Conflict(code="requester_left", detail=_("The request that wanted the places waits no more."))


def move_apply(
    *,
    move: Move,
    cycle: SchedulerCycle | None = None,
    acting_user: Actor = SCHEDULER,
    modes: Modes | None = None,
) -> Evicted:
    """Consolidation: stop an allocation so that its request starts again on other places, which are kept."""
    evict = Evict(
        move.allocation_id, move.for_request_id, "consolidate", CONSOLIDATE, {"nodes": len(move.members)}
    )
    try:
        with transaction.atomic():
            cases = _evict([evict], None, cycle, acting_user, modes)
            allocation = Allocation.objects.get(pk=move.allocation_id)
            until = (cases[0].grace_until or now()) + MARGIN
            keep_place(
                keep=Kept(allocation.request_id, move.members, to_ms(until)), cycle=cycle, moving=allocation
            )
    except _Spared:
        return _refused(move.for_request_id, "spared")
    except DomainError as error:
        return _refused(move.for_request_id, error.code)
    except DatabaseError as error:
        return _refused(move.for_request_id, f"database_{type(error).__name__.lower()}")
    return Evicted(move.for_request_id, tuple(cases))


def _keep_for_moves(keep: Kept, cycle: SchedulerCycle | None) -> None:
    """The places that moves free for a blocked request; where they cannot be kept the next cycle decides anew."""
    try:
        with transaction.atomic():
            _waiting(keep.request_id)
            keep_place(keep=keep, cycle=cycle)
    except (DomainError, DatabaseError) as error:
        log.info("keep_refused", request=keep.request_id, error=repr(error)[:200])


def spared_note(*, evicts: Iterable[Evict]) -> int:
    """Keep as advice what modes spared; returns how much."""
    spared = list(evicts)
    if not spared:
        return 0
    modes = Modes.load()
    count = 0
    for evict in spared:
        allocation = Allocation.objects.get(pk=evict.allocation_id)
        advice_note(
            allocation_id=allocation.pk,
            cause=ReclaimCase.Cause.PREEMPTED,
            rule=evict.rule,
            mode=modes.spares(allocation.department_id, allocation.request_id)
            or modes.mode_of(allocation.department_id),
            figures={"kind": evict.cause, **evict.figures},
            for_request_id=evict.for_request_id,
        )
        count += 1
    return count


def _alert_of_thrashing(cases: Sequence[ReclaimCase]) -> None:
    """Tell people of a request that is displaced again and again; the scheduler backs off by itself."""
    often = rules_active()[1].evictions_alert
    requests = {case.allocation.request_id: case.allocation.request for case in cases}
    for request_id, displaced in evictions_by_request(requests).items():
        if displaced.times >= often:
            request = requests[request_id]
            incident_open(
                kind="reclaim_thrashing",
                dedupe_key=f"reclaim_thrashing:{request.uid}",
                subject=request,
                facts={"times": displaced.times, "last_at": displaced.last_at.isoformat()},
            )
