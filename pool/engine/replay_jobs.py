"""Replay of a trace of gang jobs under department quotas: the scheduler's own decisions over a real week.

The pool is one room of equal cards. All work is interruptible and of one priority, resumes where it stopped,
and is stopped without grace; how long a job will run is unknown to the scheduler. A cycle runs at each event
and is repeated until it changes nothing. Times are milliseconds from the beginning of the trace.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from pool.engine.decide import decide
from pool.engine.model import (
    FlavourFacts,
    Gpu,
    Kept,
    Member,
    Mix,
    Node,
    Policy,
    Request,
    Running,
    Snapshot,
    TaskClass,
)
from pool.engine.world import World
from quotas.engine.tree import QuotaNode

FLAVOUR = "gpu"
POOL = 0
"""Id of the whole pool in the quota tree; departments count from 1."""
EventKind = Literal["start", "preempt", "finish"]


@dataclass(frozen=True, slots=True)
class Job:
    """A gang that needs ``gpus`` cards for ``duration`` in all."""

    id: str
    submitted: int
    duration: int
    gpus: int
    department: str


@dataclass(frozen=True, slots=True)
class Event:
    at: int
    job: str
    kind: EventKind


@dataclass(slots=True)
class Outcome:
    """What happened; ``lost_gpu_ms`` is the work since the last start at each preemption, in GPU-milliseconds."""

    events: list[Event] = field(default_factory=list)
    preemptions: int = 0
    lost_gpu_ms: int = 0
    cycles: int = 0


@dataclass(slots=True)
class _Run:
    number: int
    started: int
    allocation: Running


def replay(jobs: Iterable[Job], guarantees: Mapping[str, int], policy: Policy | None = None) -> Outcome:
    """Play a trace to its end. ``guarantees``: whole cards per department; their sum is the pool."""
    return _Replay(jobs, guarantees, policy or Policy()).play()


class _Replay:
    def __init__(self, jobs: Iterable[Job], guarantees: Mapping[str, int], policy: Policy) -> None:
        self.policy = policy
        self.jobs = sorted(jobs, key=lambda job: (job.submitted, job.id))
        departments = sorted(set(guarantees) | {job.department for job in self.jobs})
        self.department = {name: number for number, name in enumerate(departments, 1)}
        total = sum(guarantees.values())
        cards = tuple(Gpu(index, index, FLAVOUR, 1) for index in range(total))
        rows = [
            QuotaNode(self.department[name], POOL, guarantee=1000 * guarantees.get(name, 0))
            for name in departments
        ]
        self.snapshot = Snapshot(
            nodes=(Node(1, "pool", 1, "pool", cards),),
            flavours=(FlavourFacts(FLAVOUR, 1),),
            running=(),
            pending=(),
            quotas={FLAVOUR: (QuotaNode(POOL, guarantee=1000 * total), *rows)},
            mix=Mix(((TaskClass(0, 1, 1000), 1),)),
        )
        self.world = World(self.snapshot)
        self.left = [job.duration for job in self.jobs]
        self.waiting: dict[tuple[int, int], list[int]] = {}
        """Who waits by department and size, in line order: of one kind the first that is blocked blocks all."""
        self.requests = [self._request(number) for number in range(len(self.jobs))]
        self.asked: Counter[int] = Counter()
        """Milli-GPU that wait, by department."""
        self.free = total
        self.running: dict[int, _Run] = {}
        self.ends: list[tuple[int, int, int]] = []
        self.wakes: list[tuple[int, int]] = []
        """Moments at which the patience of a job ends."""
        self.kept: tuple[Kept, ...] = ()
        self.starts = 0
        self.outcome = Outcome()

    def play(self) -> Outcome:
        arriving = 0
        while arriving < len(self.jobs) or self.ends or (self.wakes and self.waiting):
            moments = [self.jobs[arriving].submitted] if arriving < len(self.jobs) else []
            moments += [self.ends[0][0]] if self.ends else []
            moments += [self.wakes[0][0]] if self.wakes else []
            now = min(moments)
            changed = self._finish_due(now)
            while self.wakes and self.wakes[0][0] <= now:
                changed = self._waits(heapq.heappop(self.wakes)[1]) or changed
            while arriving < len(self.jobs) and self.jobs[arriving].submitted <= now:
                self._wait(arriving)
                if self.policy.reclaim_patience_ms and self.jobs[arriving].gpus <= 1:
                    heapq.heappush(self.wakes, (now + self.policy.reclaim_patience_ms, arriving))
                arriving += 1
                changed = True
            while changed and self.waiting:
                changed = self._cycle(now)
        return self.outcome

    def _request(self, number: int) -> Request:
        job = self.jobs[number]
        return Request(
            id=number,
            department_id=self.department[job.department],
            flavours=(FLAVOUR,),
            per_node=job.gpus,
            queued_at=job.submitted,
        )

    def _wait(self, number: int) -> None:
        department, gpus = kind = self._kind(number)
        insort(self.waiting.setdefault(kind, []), number)
        self.asked[department] += 1000 * gpus

    def _kind(self, number: int) -> tuple[int, int]:
        job = self.jobs[number]
        return self.department[job.department], job.gpus

    def _waits(self, number: int) -> bool:
        return number in self.waiting.get(self._kind(number), ())

    def _heads(self) -> tuple[list[int], dict[int, int]]:
        """Of each kind as many as could start now and one more, and what those behind them ask for by department:
        they would be judged as the last of these.
        """
        heads: list[int] = []
        behind = dict(self.asked)
        kept = {one.request_id for one in self.kept}
        for (department, gpus), numbers in self.waiting.items():
            most = self.free // max(1, gpus) + 1
            looked = numbers[:most]
            looked += [number for number in numbers[most:] if number in kept] if kept else []
            behind[department] -= 1000 * gpus * len(looked)
            heads += looked
        return heads, behind

    def _finish_due(self, now: int) -> bool:
        """End what has run its time; whether anything did."""
        changed = False
        while self.ends and self.ends[0][0] <= now:
            at, number, allocation_id = heapq.heappop(self.ends)
            run = self.running.get(allocation_id)
            if run is None:
                continue
            self._stop(run, at, "finish")
            changed = True
        return changed

    def _cycle(self, now: int) -> bool:
        """Decide once and carry it out at once; whether to look again: a plan that evicts nobody is complete."""
        heads, behind = self._heads()
        snapshot = replace(
            self.snapshot, pending=tuple([self.requests[number] for number in heads]), kept=self.kept
        )
        plan = decide(snapshot, self.policy, now, explain=False, world=self.world, behind={FLAVOUR: behind})
        self.outcome.cycles += 1
        for evict in plan.evicts:
            run = self.running[evict.allocation_id]
            self._stop(run, now, "preempt")
            self._wait(run.number)
        for place in plan.places:
            self._start(place.request_id, now, place.members)
        self.kept = plan.keeps
        return bool(plan.evicts)

    def _start(self, number: int, now: int, members: tuple[Member, ...]) -> None:
        department, gpus = kind = self._kind(number)
        self.waiting[kind].remove(number)
        if not self.waiting[kind]:
            del self.waiting[kind]
        self.asked[department] -= 1000 * gpus
        self.free -= gpus
        self.starts += 1
        allocation = Running(
            allocation_id=self.starts,
            request_id=number,
            department_id=department,
            flavour=FLAVOUR,
            charge_milli=1000 * gpus,
            members=members,
            started_at=now,
        )
        self.world.start(allocation)
        self.running[self.starts] = _Run(number, now, allocation)
        heapq.heappush(self.ends, (now + self.left[number], number, self.starts))
        self.outcome.events.append(Event(now, self.jobs[number].id, "start"))

    def _stop(self, run: _Run, now: int, kind: EventKind) -> None:
        allocation = run.allocation
        self.world.end(allocation.allocation_id)
        del self.running[allocation.allocation_id]
        self.free += self.jobs[run.number].gpus
        self.left[run.number] -= now - run.started
        self.outcome.events.append(Event(now, self.jobs[run.number].id, kind))
        if kind == "preempt":
            self.outcome.preemptions += 1
            self.outcome.lost_gpu_ms += (now - run.started) * self.jobs[run.number].gpus
