"""The scheduling cycle: bring the memory up to date, decide, carry it out, and write why everyone else waits. One
planner at a time, whichever process it is.

A cycle is **whole** (everybody in line is judged) or **quick** (only requests that came in line since the last one:
nothing was given back since, so those judged before still cannot start, and the promises made to them hold). What
makes a whole one due: something was freed, limits, nodes, modes or the policy changed (the memory's news), a planned
moment came, a new request waits that may take something back, or the floor of `WHOLE_S`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial

import structlog
from django.db import connection, transaction

from pool.engine.decide import decide
from pool.engine.model import Place, Plan, Policy, Snapshot, Waiting
from pool.engine.waits import Outlook
from pool.engine.world import World
from pool.models import SchedulerCycle
from pool.rubbish import rubbish_left
from pool.selectors.planner_history import mix_learn, outlook_learn, use_by_person
from pool.services.decisions import cycle_close, cycle_open, decides
from pool.services.feed import Look, feed_clean
from pool.services.plan_apply import Applied
from pool.services.plan_batch import places_apply
from pool.services.planner import PlannerMemory
from pool.services.poison import Quarantine
from pool.services.promises import promises_tell
from pool.services.queue_entries import entries_known, entries_write
from pool.services.reclaim import plan_reclaim_apply
from pool.services.snapshot import policy_active
from pool.services.snapshot_store import SnapshotStore
from portal.kernel.clock import now
from portal.kernel.locks import try_advisory_lock
from portal.kernel.units import to_ms

log = structlog.get_logger(__name__)
PLANNER = "pool.planner"
ROUNDS = 4
"""A refused placement frees what the plan counted on, and news come in meanwhile: so many looks in one cycle."""
LOOKS = 3
WHOLE_S = 60.0
"""A whole cycle at least so often."""
PRESSED_S = 5.0
"""A blocked new request makes a whole cycle due, but not sooner than so long after the last one."""
REST = 10
"""Neither sooner than so many times as long as the last whole one took."""
CLEAN_S = 600.0
"""The feed is cleaned so often, of what was seen by then the last time: who looks seldom need not read all anew."""
STARTS_A_MESSAGE = 10
"""So many starts are ordered by one message to a worker at most,"""
STARTS_SPREAD = 16
"""and no more than leaves so many messages, for several workers to share."""
LEARN_EVERY = timedelta(hours=1)
WAITS_FOR_OTHERS = frozenset(
    {"waiting_for_release", "no_node_fits", "no_card_fits", "no_slice_free", "behind", "quota_blocked"}
)
"""Reasons that end when others end; all else says nothing of a time."""

_planning: ContextVar[bool] = ContextVar("pool_planning", default=False)


@dataclass(frozen=True, slots=True)
class CycleResult:
    """``ran`` False: another planner is at work. ``placed`` are the ids of new allocations; ``waiting`` counts
    everybody in line afterwards; ``whole`` tells whether everybody was judged.
    """

    ran: bool
    placed: tuple[int, ...] = ()
    refused: int = 0
    waiting: int = 0
    whole: bool = False

    def __add__(self, after: CycleResult) -> CycleResult:
        return CycleResult(
            self.ran or after.ran,
            (*self.placed, *after.placed),
            self.refused + after.refused,
            after.waiting if after.ran else self.waiting,
            self.whole or after.whole,
        )


@dataclass(slots=True)
class Planner:
    """What a process keeps between its cycles. Used under the planner's lock only."""

    memory: PlannerMemory = field(default_factory=PlannerMemory)
    store: SnapshotStore = field(default_factory=SnapshotStore)
    quarantine: Quarantine = field(default_factory=Quarantine)
    whole_at: datetime | None = None
    whole_took_s: float = 0.0
    next_moment: int | None = None
    pressed: bool = False
    learnt_at: datetime | None = None
    outlook: Outlook = field(default_factory=Outlook)
    world: World | None = None
    """The engine's state of the pool as the last decision saw it."""
    cleaned: float = field(default_factory=time.monotonic)
    clean_below: Look | None = None

    def learn(self, at: datetime) -> None:
        """Learn from history once an hour."""
        if self.learnt_at is not None and timedelta(0) <= at - self.learnt_at < LEARN_EVERY:
            return
        self.memory.mix = mix_learn(self.memory.facts, at)
        self.memory.user_use = use_by_person(at)
        self.outlook = outlook_learn(at)
        self.learnt_at = at

    def judge(self, seen: Snapshot, policy: Policy, at: datetime, only: tuple[int, ...] | None) -> Plan:
        """Decide in the world of the last decision, brought up to date; a failed one leaves none behind."""
        with self.in_world(seen) as world:
            return decide(seen, policy, to_ms(at), only=only, world=world)

    @contextmanager
    def in_world(self, seen: Snapshot) -> Iterator[World]:
        """The world of the last look, brought up to date; it is kept where what was done in it did not fail."""
        world, self.world = self.world, None
        if world is None or not world.follow(seen):
            world = World(seen)
        yield world
        self.world = world

    def scope(self, at: datetime) -> tuple[int, ...] | None:
        """Whom to judge now: None everybody, otherwise these requests (perhaps nobody)."""
        news = self.memory.news
        since = None if self.whole_at is None else (at - self.whole_at).total_seconds()
        if news.freed or since is None or since < 0 or since >= max(WHOLE_S, REST * self.whole_took_s):
            return None
        if self.pressed and since >= max(PRESSED_S, REST * self.whole_took_s):
            return None
        if self.next_moment is not None and to_ms(at) >= self.next_moment:
            return None
        return tuple(sorted(news.queued))


_planner = Planner()


def planner_reset() -> None:
    """Forget everything: the next cycle reads the database anew."""
    global _planner
    _planner = Planner()


def schedule_cycle(*, cause: str = "beat") -> CycleResult:
    """Decide and carry it out. Must not run inside a transaction: placements commit by themselves.

    Who finds the lock taken leaves at once. So whoever held it looks once more after letting go: what was committed
    meanwhile, and whose event found the lock taken, is planned then and not at the next beat.
    """
    if connection.in_atomic_block:
        raise RuntimeError("a cycle commits placement by placement: it cannot run inside a transaction")
    if _planning.get():
        # The database lock is the session's: it would let the same session in again.
        return CycleResult(False)
    token = _planning.set(True)
    result = CycleResult(False)
    try:
        for _look in range(LOOKS):
            with try_advisory_lock(PLANNER) as got:
                if not got:
                    return result
                with rubbish_left():
                    result += _run(_planner, cause)
            if not _planner.memory.behind():
                return result
            if result.whole:
                break
        _again()
        return result
    finally:
        _planning.reset(token)


def _again() -> None:
    """Have a worker plan on: this cycle has done its share, and there is more."""
    from pool.tasks import schedule_cycle as task

    task.apply_async(("again",), retry=False)


def _run(planner: Planner, cause: str) -> CycleResult:
    """Rounds of looking and planning: everybody is judged at most once, and again only where something was refused
    on writing; news that need more are left to the next cycle.
    """
    result = CycleResult(True)
    try:
        for _round in range(ROUNDS):
            began = time.monotonic()
            planner.memory.refresh()
            at = now()
            only = planner.scope(at)
            if only == () or (only is None and result.whole and not result.refused):
                break
            result += _round_of(planner, cause, at, only, began)
        _clean(planner)
    except BaseException:
        planner.memory.forget()
        raise
    return result + CycleResult(True, waiting=len(planner.memory.asked))


def _round_of(
    planner: Planner, cause: str, at: datetime, only: tuple[int, ...] | None, began: float
) -> CycleResult:
    memory, steps = planner.memory, {"read": _ms_since(began)}
    because = memory.news.freed
    planner.learn(at)
    policy_row, policy = policy_active()
    moment = time.monotonic()
    plan, snapshot = planner.quarantine.decide(
        memory.snapshot(policy, promised=only is not None),
        lambda seen: planner.judge(seen, policy, at, only),
    )
    steps["decide"], moment = _ms_since(moment), time.monotonic()
    cycle = None
    if decides(plan):
        stored = planner.store.keep(snapshot)
        cycle = cycle_open(
            plan=plan, stored=stored, snapshot=snapshot, policy=policy_row, cause=cause, at=at, only=only
        )
        steps["keep"], moment = _ms_since(moment), time.monotonic()
    applied = _apply(memory, plan, cycle)
    if plan.evicts or plan.moves or plan.keeps or plan.layouts or plan.spared:
        plan_reclaim_apply(plan=plan, cycle=cycle)
    steps["apply"], moment = _ms_since(moment), time.monotonic()
    failed = {one.request_id: one.refusal for one in applied if one.allocation is None}
    memory.planned(plan.reserves if only is None else None)
    if only is None:
        promises_tell(plan.reserves)
    _write(planner, plan, failed, at, everybody=only is None)
    steps["write"] = _ms_since(moment)
    if only is None:
        planner.whole_at, planner.pressed = at, False
        planner.whole_took_s = time.monotonic() - began
        planner.next_moment = _next_moment(plan, snapshot, policy, to_ms(at))
    else:
        planner.pressed = planner.pressed or bool(plan.waiting) and (policy.reclaim or policy.preempt)
    if failed:
        memory.news.freed = "refused"
    if cycle is not None:
        cycle_close(cycle=cycle, applied=applied, steps=steps, took_ms=_ms_since(began))
    log.info(
        "cycle", cause=cause, because=because, whole=only is None, placed=len(applied) - len(failed),
        refused=len(failed), waiting=len(plan.waiting), **{f"{name}_ms": value for name, value in steps.items()},
    )  # fmt: skip
    placed = tuple(one.allocation.pk for one in applied if one.allocation is not None)
    return CycleResult(True, placed, len(failed), len(plan.waiting), only is None)


def _apply(memory: PlannerMemory, plan: Plan, cycle: SchedulerCycle | None) -> list[Applied]:
    applied = places_apply(
        places=plan.places,
        departments={
            place.request_id: memory.asked[place.request_id].item.department_id for place in plan.places
        },
        flavour_ids=memory.flavour_ids,
        cycle=cycle,
    )
    _start([one.allocation.pk for one in applied if one.allocation is not None])
    return applied


def _start(allocation_ids: Sequence[int]) -> None:
    """Ask workers to start them, after commit. A lost message costs seconds: the sweep finds reserved ones."""
    from pool.tasks import start_allocation, start_allocations

    each = max(1, min(STARTS_A_MESSAGE, len(allocation_ids) // STARTS_SPREAD))
    for first in range(0, len(allocation_ids), each):
        ids = list(allocation_ids[first : first + each])
        task, told = (start_allocation, ids[0]) if each == 1 else (start_allocations, ids)
        transaction.on_commit(partial(task.apply_async, (told,), retry=False), robust=True)


def _write(planner: Planner, plan: Plan, failed: dict[int, str], at: datetime, *, everybody: bool) -> None:
    memory = planner.memory
    waiting = [*plan.waiting, *planner.quarantine.waiting()]
    waiting += [
        _refused(place, failed[place.request_id]) for place in plan.places if place.request_id in failed
    ]
    if memory.entries is None:
        memory.entries = entries_known()
    entries_write(
        waiting=waiting,
        known=memory.entries,
        owner=memory.uid,
        uids=memory.uids,
        names=memory.names,
        at=at,
        line_names={
            one.request_id: next(iter(memory.asked[one.request_id].item.flavours), "") for one in waiting
        },
        everybody=everybody,
        outlooks=_outlooks(planner, plan.waiting, to_ms(at)) if everybody else {},
    )


def _outlooks(planner: Planner, waiting: Iterable[Waiting], at_ms: int) -> dict[int, tuple[int, int]]:
    """Ranges from history for those who wait for others, by what stands before each in its department's line."""
    ahead: dict[tuple[int, str], int] = {}
    found: dict[int, tuple[int, int]] = {}
    for one in waiting:
        item = planner.memory.asked[one.request_id].item
        line = (item.department_id, next(iter(item.flavours), ""))
        milli = item.nodes * item.per_node * (item.milli or 1000)
        ahead[line] = ahead.get(line, 0) + milli
        if one.estimate is None and one.code in WAITS_FOR_OTHERS:
            span = planner.outlook.span(line, milli, ahead[line], at_ms)
            if span is not None:
                found[one.request_id] = span
    return found


def _refused(place: Place, refusal: str) -> Waiting:
    return Waiting(
        request_id=place.request_id,
        code="refused_on_apply",
        figures={"refusal": refusal},
        flavour=place.flavour,
        position=0,
        of=0,
        ahead=(),
    )


def _next_moment(plan: Plan, snapshot: Snapshot, policy: Policy, at_ms: int) -> int | None:
    """The first moment that the plan waits for: a promise or a kept place falls due, borrowers have to leave for a
    reserved window, an owner's patience ends.
    """
    moments = [one.start_at for one in plan.reserves] + [one.until for one in plan.keeps]
    for one in snapshot.pending:
        if one.start_at is not None and one.start_at > at_ms:
            moments.append(one.start_at - policy.window_lead_ms)
        elif policy.reclaim_patience_ms:
            moments.append(one.queued_at + policy.reclaim_patience_ms)
    return min((one for one in moments if one > at_ms), default=None)


def _clean(planner: Planner) -> None:
    look = planner.memory.look
    if time.monotonic() - planner.cleaned > CLEAN_S and look is not None:
        below, planner.clean_below, planner.cleaned = planner.clean_below, look, time.monotonic()
        if below is not None and below.identity == look.identity:
            feed_clean(below)


def _ms_since(moment: float) -> int:
    return round((time.monotonic() - moment) * 1000)
