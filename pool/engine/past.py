"""A past period played again: the asks of that time on a given fleet, under given quotas and a given policy.

The decisions are the scheduler's own (`decide`), taken at each event and repeated until they change nothing. How long
a piece of work held its GPUs is known from the record; the scheduler is told only what was asked for. What was taken
back resumes where it stopped, without grace. Split cards keep the layout that they have. Times are milliseconds.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from pool.engine.decide import decide
from pool.engine.model import (
    EvictCause,
    FlavourFacts,
    Kept,
    Mix,
    Node,
    Place,
    Policy,
    Request,
    Running,
    Snapshot,
)
from pool.engine.world import World
from quotas.engine.tree import QuotaNode

Ending = Literal["finish", "taken"]
ROUNDS = 20
"""So often at most a decision is repeated at one moment."""


@dataclass(frozen=True, slots=True)
class Piece:
    """An ask of the past: in line from ``arrives`` on, done after ``needs`` of holding its GPUs in all. Who never
    started leaves the line at ``leaves`` (None: stays)."""

    request: Request
    arrives: int
    needs: int
    leaves: int | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """Under what the past is played: the fleet, the quotas by flavour (counters at nothing), the policy."""

    nodes: tuple[Node, ...]
    flavours: tuple[FlavourFacts, ...]
    quotas: dict[str, tuple[QuotaNode, ...]]
    policy: Policy
    mix: Mix | None = None

    @property
    def cards(self) -> dict[str, int]:
        """How many cards there are of each flavour."""
        found: dict[str, int] = {}
        for node in self.nodes:
            for gpu in node.gpus:
                found[gpu.flavour] = found.get(gpu.flavour, 0) + 1
        return found


@dataclass(frozen=True, slots=True)
class Run:
    """One piece holding GPUs from ``start`` to ``end`` (where the play stopped, if it still ran: ``ending`` None)."""

    request_id: int
    flavour: str
    site: str
    charge_milli: int
    start: int
    end: int
    ending: Ending | None
    cause: EvictCause | None = None


@dataclass(slots=True)
class Played:
    """What happened, in the order in which the runs ended; ``waiting``: who was still in line at the end."""

    runs: list[Run] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    left: dict[int, int] = field(default_factory=dict)
    """When those left who never started."""
    decisions: int = 0


@dataclass(slots=True)
class _Live:
    piece: Piece
    allocation: Running
    site: str


def play(
    pieces: Iterable[Piece],
    setting: Setting,
    until: int | None = None,
    *,
    told: Callable[[int, int], None] = lambda _done, _all: None,
) -> Played:
    """Play all pieces from an empty pool up to ``until`` (None: until everything that can start is done).

    ``told(arrived, all)`` is called now and then. The same arguments give the same result.
    """
    return _Play(pieces, setting, until, told).play()


class _Play:
    def __init__(
        self,
        pieces: Iterable[Piece],
        setting: Setting,
        until: int | None,
        told: Callable[[int, int], None],
    ) -> None:
        self.pieces = sorted(pieces, key=lambda one: (one.arrives, one.request.id))
        self.policy, self.until, self.told = setting.policy, until, told
        self.snapshot = Snapshot(
            nodes=setting.nodes,
            flavours=setting.flavours,
            running=(),
            pending=(),
            quotas=setting.quotas,
            mix=setting.mix,
        )
        self.sites = {node.id: node.site for node in setting.nodes}
        self.world = World(self.snapshot)
        self.pending: dict[int, Request] = {}
        self.by_id = {one.request.id: one for one in self.pieces}
        self.left = {one.request.id: one.needs for one in self.pieces}
        self.started: set[int] = set()
        self.running: dict[int, _Live] = {}
        self.ends: list[tuple[int, int, int]] = []
        self.leaving: list[tuple[int, int]] = []
        self.kept: tuple[Kept, ...] = ()
        self.number = 0
        self.out = Played()

    def play(self) -> Played:
        arriving = 0
        while True:
            now = min(
                self.pieces[arriving].arrives if arriving < len(self.pieces) else _NEVER,
                self.ends[0][0] if self.ends else _NEVER,
                self.leaving[0][0] if self.leaving else _NEVER,
            )
            if now == _NEVER or (self.until is not None and now >= self.until):
                break
            changed = self._finish_due(now)
            changed |= self._leave_due(now)
            while arriving < len(self.pieces) and self.pieces[arriving].arrives <= now:
                piece = self.pieces[arriving]
                self.pending[piece.request.id] = piece.request
                if piece.leaves is not None:
                    heapq.heappush(self.leaving, (piece.leaves, piece.request.id))
                arriving += 1
                changed = True
                if arriving % _TELL == 0:
                    self.told(arriving, len(self.pieces))
            for _turn in range(ROUNDS):
                if not (changed and self.pending):
                    break
                changed = self._decide(now)
        self._stop_all()
        self.told(len(self.pieces), len(self.pieces))
        return self.out

    def _finish_due(self, now: int) -> bool:
        changed = False
        while self.ends and self.ends[0][0] <= now:
            at, _request, allocation = heapq.heappop(self.ends)
            if allocation in self.running:
                self._end(allocation, at, "finish")
                changed = True
        return changed

    def _leave_due(self, now: int) -> bool:
        changed = False
        while self.leaving and self.leaving[0][0] <= now:
            at, request = heapq.heappop(self.leaving)
            if request in self.pending and request not in self.started:
                del self.pending[request]
                self.out.left[request] = at
                changed = True
        return changed

    def _decide(self, now: int) -> bool:
        """One decision, carried out at once; whether to look again: one that takes nothing back is complete."""
        snapshot = replace(self.snapshot, pending=tuple(self.pending.values()), kept=self.kept)
        plan = decide(snapshot, self.policy, now, explain=False, world=self.world)
        self.out.decisions += 1
        for evict in plan.evicts:
            if evict.allocation_id in self.running:
                live = self._end(evict.allocation_id, now, "taken", evict.cause)
                self.pending[live.piece.request.id] = live.piece.request
        for move in plan.moves:
            if move.allocation_id in self.running:
                live = self._end(move.allocation_id, now, "taken", "consolidate")
                self.pending[live.piece.request.id] = live.piece.request
        for place in plan.places:
            self._start(place, now)
        self.kept = plan.keeps
        return bool(plan.evicts or plan.moves)

    def _start(self, place: Place, now: int) -> None:
        request = self.pending.pop(place.request_id)
        piece = self.by_id[request.id]
        self.number += 1
        self.started.add(request.id)
        allocation = Running(
            allocation_id=self.number,
            request_id=request.id,
            department_id=request.department_id,
            flavour=place.flavour,
            charge_milli=place.charge_milli,
            members=place.members,
            interruptible=request.interruptible,
            priority=request.priority,
            started_at=now,
            ends_at=place.ends_at,
            user_id=request.user_id,
            apart=request.apart,
        )
        self.world.start(allocation)
        site = self.sites.get(place.members[0].node_id, "") if place.members else ""
        self.running[self.number] = _Live(piece, allocation, site)
        heapq.heappush(self.ends, (now + self.left[request.id], request.id, self.number))

    def _end(self, number: int, now: int, ending: Ending | None, cause: EvictCause | None = None) -> _Live:
        live = self.running.pop(number)
        one = live.allocation
        self.world.end(number)
        self.left[one.request_id] -= now - one.started_at
        run = Run(
            one.request_id,
            one.flavour or "",
            live.site,
            one.charge_milli,
            one.started_at,
            now,
            ending,
            cause,
        )
        self.out.runs.append(run)
        return live

    def _stop_all(self) -> None:
        """Where the play stops, what runs is noted up to then."""
        last = self.until if self.until is not None else max((run.end for run in self.out.runs), default=0)
        for number in sorted(self.running):
            self._end(number, last, None)
        self.out.waiting = sorted(self.pending)


_NEVER = 1 << 62
_TELL = 200
