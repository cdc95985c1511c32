"""``decide(snapshot, policy, now) → Plan``: who starts where, who is promised what, who gives way, and why
everyone else waits.

Pure and deterministic: the order of the snapshot's tuples does not matter, ties go by id. The actions, from
the least disruptive to the most:

    allocate      what fits starts
    backfill      the first blocked ones are promised a place; others pass only if they delay none
    consolidate   movable work makes room by moving (opt-in)
    reclaim       owners take back what others borrow
    preempt       within a department the more important displaces the less important
    relayout      drained split cards are to be split anew for those whom nothing else helped

A later action may find that something this plan was about to start stands in its way. That work is withdrawn,
which costs nothing, and the round is played again with what was decided so far held fast.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from pool.engine import consolidate, preempt, reclaim, relayout
from pool.engine.allocate import MAINTENANCE, Allocate
from pool.engine.backfill import BASIS_LEASE_ENDS, BASIS_WINDOW, Occupied, estimate_from
from pool.engine.model import (
    WHOLE,
    Evict,
    Kept,
    Member,
    Move,
    Plan,
    Policy,
    Request,
    Snapshot,
    Take,
    Waiting,
)
from pool.engine.order import Line, Queues, Standings, fair_shares, queues_of
from pool.engine.reasons import Reason, with_deadline
from pool.engine.round import Round
from pool.engine.victims import Bench
from pool.engine.world import World

AHEAD_TOLD = 5
"""So many requests ahead are named to those who wait."""
ROUNDS = 2
"""So often at most a plan is played again because something gave way before it began."""


@dataclass(slots=True)
class _Settled:
    """What earlier rounds decided for good."""

    evicts: list[Evict] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    keeps: list[Kept] = field(default_factory=list)
    spared: list[Evict] = field(default_factory=list)
    leaving: dict[int, tuple[int, ...]] = field(default_factory=dict)
    made_room: dict[int, Reason] = field(default_factory=dict)


def decide(
    snapshot: Snapshot,
    policy: Policy,
    now: int,
    *,
    only: Collection[int] | None = None,
    explain: bool = True,
    world: World | None = None,
    behind: Mapping[str, Mapping[int, int]] | None = None,
) -> Plan:
    """The plan for one moment. Every pending request is in ``places`` or in ``waiting``, never in both.

    ``only``: judge just these requests; all other pending ones are known to be blocked, and hold the promises
    of the last whole plan (``Snapshot.promised``). The plan is about these alone then.
    ``explain`` False: no ``waiting`` (for replays and searches).
    ``world``: the world of this snapshot where the caller keeps one; it is left as it was.
    ``behind``: milli-GPU that others ask for, by flavour and department, who are left out because each stands
    behind a pending one of its kind that cannot start: they count towards the fair shares (for replays).
    """
    world = world if world is not None else World(snapshot)
    pending = sorted(snapshot.pending, key=attrgetter("id"))
    walked = (
        pending if only is None or policy.queueing == "strict" else [one for one in pending if one.id in only]
    )
    queues = queues_of(walked, snapshot.user_use if policy.user_decay else None, policy.class_weights)
    settled, standings = _Settled(), Standings()
    with world.what_if():
        shares = fair_shares(world.trees, pending, world.capacity, world.charge_first, world.shares, behind)
        for turn in range(ROUNDS):
            token = world.mark()
            round_ = Round(world, snapshot, policy, now, shares, explain=explain)
            _hold_fast(round_, settled, pending)
            _play(round_, pending, queues, standings, only, withdraw=turn < ROUNDS - 1)
            settled.evicts += round_.evicts
            settled.moves += round_.moves
            settled.spared = round_.spared
            settled.keeps += round_.new_keeps
            settled.leaving |= round_.leaving
            settled.made_room |= round_.made_room
            if not round_.withdrawn:
                break
            world.rollback(token)
    placed = {one.request.id for one in round_.placed}
    return Plan(
        places=tuple(one.place for one in round_.placed),
        reserves=(*round_.reserves, *round_.windows),
        waiting=tuple(_waiting(round_)) if explain else (),
        evicts=tuple(settled.evicts),
        keeps=tuple(kept for kept in settled.keeps if kept.request_id not in placed),
        moves=tuple(settled.moves),
        layouts=tuple(round_.layouts),
        spared=tuple(settled.spared),
    )


def _hold_fast(round_: Round, settled: _Settled, pending: Sequence[Request]) -> None:
    """Keep places of this and of earlier plans for those they were freed for."""
    world, now = round_.world, round_.now
    asked = {request.id: request for request in pending}
    moving = {one.request_id: one.asks for one in world.running.values() if one.asks is not None}
    round_.users = dict(round_.snapshot.users)
    round_.leaving = dict(settled.leaving)
    round_.made_room = dict(settled.made_room)
    for kept in (*sorted(round_.snapshot.kept, key=lambda one: one.request_id), *settled.keeps):
        request = asked.get(kept.request_id) or moving.get(kept.request_id)
        usable = all(
            take.gpu_id in world.state.gpus and world.state.gpus[take.gpu_id].gpu.blocked is None
            for member in kept.members
            for take in member.takes
        )
        if request is not None and kept.until > now and usable and request.id not in round_.keeps:
            round_.hold(request, kept)


def _play(
    round_: Round,
    pending: Sequence[Request],
    queues: Queues,
    standings: Standings,
    only: Collection[int] | None,
    *,
    withdraw: bool,
) -> None:
    world, policy = round_.world, round_.policy
    allocate = Allocate(round_)
    _close_for_maintenance(round_)
    if only is not None:
        _hold_promises(round_, {request.id: request for request in pending}, only)
    line = Line(
        queues,
        world.trees,
        round_.shares,
        world.charge_first,
        stuck=None if round_.explain else allocate.is_stuck,
        order=policy.order,
        standings=standings,
    )
    for request in line:
        if only is None or request.id in only:
            allocate.run(request)
        else:
            allocate.pass_over(request)
    if only is not None:
        round_.reserves = [one for one in round_.reserves if one.request_id in only]
        round_.windows = [one for one in round_.windows if one.request_id in only]
    if any(blocked.lacks is not None for blocked in round_.blocked):
        _release_what_ends(round_)
        consolidate.run(round_)
        bench = Bench(round_)
        reclaim.run(round_, bench, withdraw=withdraw)
        preempt.run(round_, bench, withdraw=withdraw)
        relayout.run(round_)


def _hold_promises(round_: Round, asked: Mapping[int, Request], only: Collection[int]) -> None:
    """What the last whole plan promised to requests that are not judged now."""
    for reserve in round_.snapshot.promised:
        request = asked.get(reserve.request_id)
        if request is not None and request.id not in only:
            round_.world.state.add_hold(request.id, reserve.start_at, reserve.members)
            begins = reserve.start_at if request.start_at is not None else None
            until = None if request.duration_ms is None else reserve.start_at + request.duration_ms
            round_.occupy(Occupied(reserve.members, until, begins, promise=True))
            (round_.reserves if request.start_at is None else round_.windows).append(reserve)


def _close_for_maintenance(round_: Round) -> None:
    """A node that is to be closed is held whole from then on: work must have ended, or keep off it."""
    for node in round_.world.nodes:
        for begins, ends in node.closed:
            if ends > round_.now:
                member = Member(
                    0,
                    node.id,
                    node.cpu_milli or 0,
                    node.memory_mib or 0,
                    tuple(
                        Take(gpu.id, (WHOLE,), 1000, gpu.memory_mib)
                        for gpu in sorted(node.gpus, key=lambda one: (one.index, one.id))
                    ),
                )
                round_.world.state.add_hold(MAINTENANCE, begins, [member])
                round_.occupy(Occupied((member,), ends, begins, promise=True))


def _release_what_ends(round_: Round) -> None:
    """From here on the pool is looked at as it will be: what is ending already is not counted twice."""
    world = round_.world
    for one in list(world.running.values()):
        if one.ending:
            world.release(one)
        elif one.allocation_id in round_.leaving:
            numbers = round_.leaving[one.allocation_id]
            gone = [member for member in one.members if member.number in numbers]
            world.release(one, gone if numbers else None)


def _waiting(round_: Round) -> list[Waiting]:
    policy, now = round_.policy, round_.now
    lines: dict[str | None, list[int]] = {}
    places: list[tuple[list[int], int]] = []
    for one in round_.blocked:
        line = lines.setdefault(line_of(one.request), [])
        places.append((line, len(line)))
        line.append(one.request.id)
    answer: list[Waiting] = []
    outlook = Outlook(round_)
    for one, (line, before) in zip(round_.blocked, places, strict=True):
        request, reason, reserve = one.request, one.reason, one.reserve
        estimate = None
        if reserve is not None:
            basis = BASIS_WINDOW if reason.code == "not_before" else BASIS_LEASE_ENDS
            estimate = estimate_from(reserve.start_at, now, policy, basis)
        if reason.code in Outlook.CODES:
            reason = outlook.add(reason, request)
        if request.deadline_at is not None:
            reason = with_deadline(reason, request, estimate, now)
        ahead = tuple(line[before - AHEAD_TOLD if before > AHEAD_TOLD else 0 : before])
        answer.append(Waiting(request.id, *reason, before + 1, len(line), ahead, estimate, reserve))
    return answer


class Outlook:
    """What a request that waits for a place is told beside the place: what its department may still use, and
    when the next of its flavour comes free."""

    CODES = frozenset({"no_node_fits", "no_card_fits", "no_slice_free", "waiting_for_release", "host_short"})

    def __init__(self, round_: Round) -> None:
        self.world, self.now = round_.world, round_.now
        self._releases: dict[str, int] = {}
        for one in self.world.running.values():
            if one.flavour is not None and one.ends_at is not None:
                at = max(one.ends_at, self.now)
                self._releases[one.flavour] = min(at, self._releases.get(one.flavour, at))
        self._known: dict[tuple[int, int, bool], Reason] = {}

    def add(self, reason: Reason, request: Request) -> Reason:
        if reason.flavour is None:
            return reason
        key = (id(reason), request.department_id, request.interruptible)
        if key not in self._known:
            room = self.world.room(request.department_id, reason.flavour, interruptible=request.interruptible)
            figures = dict(reason.figures)
            if room is not None:
                figures["may_use_milli"] = room
            if reason.flavour in self._releases:
                figures["next_release_at"] = self._releases[reason.flavour]
            self._known[key] = Reason(reason.code, figures, reason.flavour)
        return self._known[key]


def line_of(request: Request) -> str | None:
    """The line that a request stands in: that of the first flavour it accepts."""
    return request.flavours[0] if request.flavours else None
