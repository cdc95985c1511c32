"""Carrying out what a plan takes back: evictions with the places they free, moves, new layouts of cards.

The evictions of one request stand or fall together: either all its victims can be taken and its places be kept,
or nothing is done and the next cycle decides anew. Those of all requests are judged under the same locks and written
by a few statements. Locks: requests by id, then allocations by id, then nothing else of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice

import structlog
from django.db import DatabaseError, IntegrityError, transaction
from django.utils.translation import gettext_lazy as _

from pool.engine.model import Evict, Kept, Move, Plan
from pool.locks import allocation_unknown, allocations_lock, lock_wait_limit
from pool.models import Allocation, ReclaimCase, SchedulerCycle
from pool.selectors.reclaim import Modes, evictions_by_request
from pool.services.keeps import MARGIN, keep_place, keep_places, keeps_settle
from pool.services.ladder import Notice, cases_begin, cases_open, notice_judge, promised_already
from pool.services.layouts import layout_ask
from pool.services.modes import advice_note
from pool.services.reclaim_rules import rules_active
from portal.kernel.clock import now
from portal.kernel.errors import Conflict, DomainError
from portal.kernel.units import to_ms
from portal.ops.actor import Actor, system
from portal.ops.services import incident_open
from quotas.models import CapacityRequest
from quotas.services.lifecycle_batch import requests_lock

log = structlog.get_logger(__name__)
SCHEDULER = system("scheduler")
CONSOLIDATE = "consolidate"


@dataclass(frozen=True, slots=True)
class Evicted:
    """What became of one request's evictions: the cases, or the code why nothing was done."""

    request_id: int
    cases: tuple[ReclaimCase, ...] = ()
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    """All that one request takes back, and the places that it is for."""

    evicts: Sequence[Evict]
    keep: Kept | None

    @property
    def request_id(self) -> int:
        return self.evicts[0].for_request_id


def plan_reclaim_apply(
    *, plan: Plan, cycle: SchedulerCycle | None = None, acting_user: Actor = SCHEDULER
) -> list[Evicted]:
    """Carry out all that a plan takes back, and note what modes spared."""
    if plan.keeps:
        keeps_settle()
    keeps = {keep.request_id: keep for keep in plan.keeps}
    groups: dict[int, list[Evict]] = {}
    for evict in plan.evicts:
        groups.setdefault(evict.for_request_id, []).append(evict)
    modes = Modes.load() if groups or plan.moves or plan.spared else None
    wanted = [Group(evicts, keeps.get(request_id)) for request_id, evicts in groups.items()]
    answers = groups_apply(groups=wanted, cycle=cycle, acting_user=acting_user, modes=modes)
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


def groups_apply(
    *,
    groups: Sequence[Group],
    cycle: SchedulerCycle | None = None,
    acting_user: Actor = SCHEDULER,
    modes: Modes | None = None,
) -> list[Evicted]:
    """Begin the ladder for all victims of each request and keep its places; of no request anything is half done.

    ``modes``: those of the departments, where the caller has read them after the plan was made.
    One transaction for all. Refused (by code) is a request that waits no more, or one of whose victims ended, is not
    interruptible, is promised to another request or spared by its department's mode. Where the database refuses (a
    place is kept for somebody else, a lock did not come in time), each is tried by itself.
    """
    if not groups:
        return []
    try:
        with transaction.atomic():
            answers, spared = _evict(groups, cycle, acting_user, modes)
            for one in spared:
                advice_note(
                    allocation_id=one.evict.allocation_id,
                    cause=ReclaimCase.Cause.PREEMPTED,
                    rule=one.evict.rule,
                    mode=one.mode,
                    figures=one.evict.figures,
                    for_request_id=one.evict.for_request_id,
                )
    except DatabaseError as error:
        if len(groups) == 1:
            return [_refused(groups[0].request_id, _code(error))]
        log.warning("evictions_refused", error=type(error).__name__, requests=len(groups))
        return [
            answer
            for group in groups
            for answer in groups_apply(groups=[group], cycle=cycle, acting_user=acting_user, modes=modes)
        ]
    _alert_of_thrashing([case for answer in answers for case in answer.cases])
    return answers


def evictions_apply(
    *,
    evicts: Sequence[Evict],
    keep: Kept | None,
    cycle: SchedulerCycle | None = None,
    acting_user: Actor = SCHEDULER,
    modes: Modes | None = None,
) -> Evicted:
    """The same for one request."""
    group = Group(evicts, keep)
    return groups_apply(groups=[group], cycle=cycle, acting_user=acting_user, modes=modes)[0]


def _code(error: DatabaseError) -> str:
    """What to call a refusal of the database; a lock that did not come in time: the next cycle tries again."""
    if isinstance(error, IntegrityError):
        diag = getattr(error.__cause__, "diag", None)
        return str(getattr(diag, "constraint_name", "") or "constraint")
    return f"database_{type(error).__name__.lower()}"


class _Spared(Exception):
    def __init__(self, evict: Evict, mode: str) -> None:
        super().__init__(mode)
        self.evict, self.mode = evict, mode


def _refused(request_id: int, code: str) -> Evicted:
    log.info("eviction_refused", request=request_id, refusal=code)
    return Evicted(request_id, refusal=code)


def _evict(
    groups: Sequence[Group], cycle: SchedulerCycle | None, actor: Actor, modes: Modes | None
) -> tuple[list[Evicted], list[_Spared]]:
    """Judge each request's evictions under the locks, then write those that hold; what modes spared beside."""
    lock_wait_limit()
    requests = requests_lock({group.request_id for group in groups})
    allocations = allocations_lock(evict.allocation_id for group in groups for evict in group.evicts)
    modes, grace_s = modes or Modes.load(), rules_active()[1].grace_preempted_s
    known = cases_open(list(allocations))
    promised: dict[int, int] = {}
    answers: dict[int, Evicted] = {}
    spared: list[_Spared] = []
    held: list[tuple[Group, list[Notice]]] = []
    for group in groups:
        try:
            _waiting(requests.get(group.request_id))
            notices = [
                _judge(group, evict, allocations, known, modes, grace_s, cycle)
                for evict in sorted(group.evicts, key=lambda one: one.allocation_id)
            ]
            if any(promised.get(one.allocation.pk, group.request_id) != group.request_id for one in notices):
                raise promised_already()
        except _Spared as one:
            spared.append(one)
            answers[group.request_id] = _refused(group.request_id, "spared")
        except DomainError as error:
            answers[group.request_id] = _refused(group.request_id, error.code)
        else:
            promised |= {one.allocation.pk: group.request_id for one in notices}
            held.append((group, notices))
    cases = iter(cases_begin(acting_user=actor, notices=[one for _, notices in held for one in notices]))
    keeps: list[tuple[Kept, datetime]] = []
    for group, notices in held:
        mine = tuple(islice(cases, len(notices)))
        answers[group.request_id] = Evicted(group.request_id, mine)
        if group.keep is not None:
            last = max(case.grace_until for case in mine if case.grace_until is not None)
            keeps.append((group.keep, last + MARGIN))
    keep_places(keeps=keeps, cycle=cycle)
    return [answers[group.request_id] for group in groups], spared


def _judge(
    group: Group,
    evict: Evict,
    allocations: Mapping[int, Allocation],
    known: Mapping[int, ReclaimCase],
    modes: Modes,
    grace_s: int,
    cycle: SchedulerCycle | None,
) -> Notice:
    """The notice of one victim; DomainError where it cannot be taken, _Spared where its mode spares it."""
    allocation = allocations.get(evict.allocation_id)
    if allocation is None:
        raise allocation_unknown()
    mode = modes.spares(allocation.department_id, allocation.request_id)
    if mode is not None:
        raise _Spared(evict, mode)
    if not allocation.interruptible:
        raise Conflict(code="not_interruptible", detail=_("It may not be interrupted."))
    notice = Notice(
        allocation,
        ReclaimCase.Cause.PREEMPTED,
        evict.rule,
        grace_s,
        figures={"kind": evict.cause, **evict.figures},
        for_request_id=group.request_id,
        cycle=cycle,
        members=evict.members,
    )
    notice_judge(notice, known.get(allocation.pk))
    return notice


def _waiting(request: CapacityRequest | None) -> None:
    if request is None or request.state != CapacityRequest.State.QUEUED:
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
            (answer,), _spared = _evict([Group([evict], None)], cycle, acting_user, modes)
            for case in answer.cases:
                until = (case.grace_until or now()) + MARGIN
                keep = Kept(case.allocation.request_id, move.members, to_ms(until))
                keep_place(keep=keep, cycle=cycle, moving=case.allocation)
    except DatabaseError as error:
        return _refused(move.for_request_id, _code(error))
    return answer


def _keep_for_moves(keep: Kept, cycle: SchedulerCycle | None) -> None:
    """The places that moves free for a blocked request; where they cannot be kept the next cycle decides anew."""
    try:
        with transaction.atomic():
            _waiting(requests_lock([keep.request_id]).get(keep.request_id))
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
