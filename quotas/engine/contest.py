"""Who gives way when an ask lacks quota: victim search on quotas alone, without machines.

Two published families of rules, each over any number of (flavour, resource) trees:

classical   Candidates: the own queue's work, and work of queues above their nominal quota. A subtree that
            the ask fits into has a claim on everything outside it that is borrowed (priority ignored);
            elsewhere only ``borrow_within_cohort`` lets a borrower displace, and only below a priority.
fair        At each step the queue that reaches farthest into what others own, found from the root down,
            gives its next job, if the strategy holds for the two branches just below their common ancestor:
                FinalShare    share of the asking side with the job ≤ share of the giving side after it
                InitialShare  share of the asking side with the job < share of the giving side before it
            An ask within its own nominal quota needs no strategy: it takes back what is lent.

Order of candidates: already ending, other queues before the own, lower priority, newest admission, id.
The set is minimal by put-back: backwards, every job without which the ask still fits is returned.
``final_check`` (the product's own rule) refuses a fair set after which the asking side would stand above a
side that gave: such evictions can be turned round and never settle.

Sources: cases_preemption.json, kinds queue_level and loop_guard (facts of Kueue's preemption tests);
Kueue's documents on preemption and fair sharing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal

from quotas.engine.available import available_raw
from quotas.engine.fairshare import Number, reach
from quotas.engine.ids import NodeId, id_key
from quotas.engine.tree import QuotaTree

Pair = tuple[str, str]
Share = tuple[int, Fraction]
"""(1, unweighted) for weight 0 while borrowing, else (0, weighted): larger reaches farther."""
Who = Literal["Never", "LowerPriority", "LowerOrNewerEqualPriority", "Any"]
Why = Literal["within_queue", "reclaim", "reclaim_while_borrowing", "fair_share"]
Strategy = Literal["FinalShare", "InitialShare"]
BOTH: tuple[Strategy, ...] = ("FinalShare", "InitialShare")


@dataclass(frozen=True, slots=True)
class Rules:
    """Whom a queue's asks may displace. ``borrow_within_cohort`` None = never while borrowing itself."""

    within_queue: Who = "Never"
    reclaim_within_cohort: Who = "Never"
    borrow_within_cohort: Who = "Never"
    borrow_max_priority: int | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """Work that runs, or (``incoming``) asks. Times in any one unit; ``usage`` by (flavour, resource)."""

    id: NodeId
    queue: NodeId
    usage: Mapping[Pair, int]
    priority: int = 0
    admitted_at: int = 0
    created_at: int = 0
    ending: bool = False


@dataclass(frozen=True, slots=True)
class Victim:
    job: Job
    why: Why


@dataclass(slots=True)
class Field:
    """The trees with all that runs booked, the rules of each queue, the weights of all nodes."""

    trees: Mapping[Pair, QuotaTree]
    rules: Mapping[NodeId, Rules]
    weights: Mapping[NodeId, Number]
    running: dict[NodeId, Job] = field(default_factory=dict)

    @property
    def shape(self) -> QuotaTree:
        return next(iter(self.trees.values()))

    def admit(self, job: Job) -> None:
        self.running[job.id] = job
        self._book(job)

    def remove(self, job: Job) -> None:
        del self.running[job.id]
        self._unbook(job)

    def _book(self, job: Job) -> None:
        for pair, amount in job.usage.items():
            self.trees[pair].add(job.queue, amount)

    def _unbook(self, job: Job) -> None:
        for pair, amount in job.usage.items():
            self.trees[pair].remove(job.queue, amount)

    @contextmanager
    def without(self, job: Job) -> Iterator[None]:
        """The field as it would be without a booked job."""
        self._unbook(job)
        try:
            yield
        finally:
            self._book(job)

    def fits(self, job: Job, *, borrowing: bool = True) -> bool:
        """Whether a job that is not booked fits; without ``borrowing`` also within its own nominal quota."""
        for pair, amount in job.usage.items():
            tree = self.trees.get(pair)
            if tree is None or amount > available_raw(tree, job.queue):
                return False
            if not borrowing and tree.counters[job.queue].charged + amount > tree.own[job.queue]:
                return False
        return True

    def within(self, node: NodeId, pairs: Iterable[Pair]) -> bool:
        """Whether a node uses no more than its subtree's quota of every pair."""
        return all(
            self.trees[pair].counters[node].charged <= self.trees[pair].subtree[node]
            for pair in pairs
            if pair in self.trees
        )

    def share(self, node: NodeId) -> Share:
        """How far a node reaches into what others own, to be compared among siblings."""
        by_resource: dict[str, list[QuotaTree]] = {}
        for (_, resource), tree in self.trees.items():
            by_resource.setdefault(resource, []).append(tree)
        found = reach(by_resource, node)
        if found is None:
            return (0, Fraction(0))
        weight = Fraction(self.weights.get(node, 1))
        return (1, found[0]) if weight == 0 else (0, found[0] / weight)


def victims(
    field_: Field,
    incoming: Job,
    mode: Literal["classical", "fair"],
    *,
    contended: Sequence[Pair] = (),
    strategies: Sequence[Strategy] = BOTH,
    final_check: bool = False,
    barred: Callable[[Job], bool] = lambda job: False,
) -> list[Victim]:
    """The work that would have to go so that ``incoming`` fits; empty = it waits (or nothing would help).

    ``contended``: the pairs that lack quota (default: all it asks). ``barred`` jobs are left alone. The
    field is as before afterwards.
    """
    pairs = tuple(contended) or tuple(incoming.usage)
    if any(pair not in field_.trees for pair in incoming.usage):
        return []
    if mode == "classical":
        return _classical(field_, incoming, pairs, barred)
    return _fair(field_, incoming, pairs, strategies, final_check, barred)


def _order(own: NodeId) -> Callable[[Job], tuple[bool, bool, int, int, tuple[int, int, str]]]:
    return lambda job: (not job.ending, job.queue == own, job.priority, -job.admitted_at, id_key(job.id))


def _allows(who: Who, incoming: Job, job: Job) -> bool:
    if who == "Any" or job.priority < incoming.priority:
        return who != "Never"
    older = who == "LowerOrNewerEqualPriority" and incoming.created_at < job.created_at
    return older and job.priority == incoming.priority


def _touches(job: Job, pairs: Iterable[Pair]) -> bool:
    return any(job.usage.get(pair, 0) > 0 for pair in pairs)


def put_back(taken: Sequence[Victim], fits: Callable[[], bool], field_: Field) -> list[Victim]:
    """The victims that are needed indeed, judged backwards from the last but one; all are off the field
    before and after."""
    needed: list[Victim] = []
    for index in range(len(taken) - 1, -1, -1):
        victim = taken[index]
        field_._book(victim.job)
        if index < len(taken) - 1 and fits():
            continue
        field_._unbook(victim.job)
        needed.append(victim)
    # Whoever was put back stays booked; the caller restores the others.
    return needed[::-1]


# classical


@dataclass(frozen=True, slots=True)
class _Candidate:
    job: Job
    why: Why
    common: NodeId | None
    only_without_borrowing: bool = False


def _classical(
    field_: Field, incoming: Job, pairs: Sequence[Pair], barred: Callable[[Job], bool]
) -> list[Victim]:
    rules = field_.rules[incoming.queue]
    own = _own_candidates(field_, incoming, pairs, barred)
    claimed, elsewhere = _cohort_candidates(field_, incoming, pairs, barred)
    groups = [claimed, elsewhere, own]
    for group in groups:
        key = _order(incoming.queue)
        group.sort(key=lambda one: key(one.job))
    line = [one for group in groups for one in group if one.job.ending]
    line += [one for group in groups for one in group if not one.job.ending]
    never_borrowing = rules.borrow_within_cohort == "Never"
    under = all(
        field_.trees[pair].counters[incoming.queue].charged < field_.trees[pair].own[incoming.queue]
        for pair in pairs
    )
    if not claimed and not elsewhere or (never_borrowing and not under):
        attempts = [True]
    elif never_borrowing and not claimed:
        attempts = [False, True]
    else:
        attempts = [True, False]
    for borrowing in attempts:
        found = _attempt(field_, incoming, pairs, line, borrowing)
        if found:
            return found
    return []


def _attempt(
    field_: Field, incoming: Job, pairs: Sequence[Pair], line: Sequence[_Candidate], borrowing: bool
) -> list[Victim]:
    taken: list[Victim] = []
    for one in line:
        if not _still_borrowed(field_, incoming, pairs, one, borrowing):
            continue
        field_._unbook(one.job)
        taken.append(Victim(one.job, one.why))
        if field_.fits(incoming, borrowing=borrowing):
            needed = put_back(taken, lambda: field_.fits(incoming, borrowing=borrowing), field_)
            for victim in needed:
                field_._book(victim.job)
            return needed
    for victim in taken:
        field_._book(victim.job)
    return []


def _still_borrowed(
    field_: Field, incoming: Job, pairs: Sequence[Pair], one: _Candidate, borrowing: bool
) -> bool:
    """Whether a candidate's queue, and every branch above it below the common ancestor, is above quota."""
    if one.job.queue == incoming.queue:
        return True
    if borrowing and one.only_without_borrowing:
        return False
    for step in field_.shape.path(one.job.queue):
        if step == one.common:
            return True
        if field_.within(step, pairs):
            return False
    return True


def _own_candidates(
    field_: Field, incoming: Job, pairs: Sequence[Pair], barred: Callable[[Job], bool]
) -> list[_Candidate]:
    who = field_.rules[incoming.queue].within_queue
    return [
        _Candidate(job, "within_queue", None)
        for job in field_.running.values()
        if job.queue == incoming.queue
        and _touches(job, pairs)
        and _allows(who, incoming, job)
        and not barred(job)
    ]


def _cohort_candidates(
    field_: Field, incoming: Job, pairs: Sequence[Pair], barred: Callable[[Job], bool]
) -> tuple[list[_Candidate], list[_Candidate]]:
    """Work of other queues: where a subtree that the ask fits into has a claim, and the rest."""
    rules = field_.rules[incoming.queue]
    claimed: list[_Candidate] = []
    elsewhere: list[_Candidate] = []
    if rules.reclaim_within_cohort == "Never":
        return claimed, elsewhere
    path = field_.shape.path(incoming.queue)
    claim, rest = _fits_quota(field_, path[0], {pair: incoming.usage[pair] for pair in incoming.usage})
    for below, common in zip(path, path[1:], strict=False):
        for job in _borrowed_below(field_, common, below, pairs):
            if not _touches(job, pairs) or barred(job):
                continue
            if not _allows(rules.reclaim_within_cohort, incoming, job):
                continue
            if claim:
                claimed.append(_Candidate(job, "reclaim", common))
                continue
            borrowing_too = _allows_while_borrowing(rules, incoming, job)
            why: Why = "reclaim_while_borrowing" if borrowing_too else "reclaim"
            elsewhere.append(_Candidate(job, why, common, only_without_borrowing=not borrowing_too))
        fits, rest = _fits_quota(field_, common, rest)
        claim = claim or fits
    return claimed, elsewhere


def _allows_while_borrowing(rules: Rules, incoming: Job, job: Job) -> bool:
    if rules.borrow_within_cohort == "Never" or job.priority >= incoming.priority:
        return False
    return rules.borrow_max_priority is None or job.priority <= rules.borrow_max_priority


def _fits_quota(field_: Field, node: NodeId, ask: Mapping[Pair, int]) -> tuple[bool, dict[Pair, int]]:
    """Whether an ask fits a subtree's quota, and what of it a node's kept part leaves over."""
    fits = True
    rest: dict[Pair, int] = {}
    for pair, amount in ask.items():
        tree = field_.trees[pair]
        used = tree.counters[node].charged
        fits = fits and used + amount <= tree.subtree[node]
        rest[pair] = max(0, amount - max(0, tree.kept[node] - used))
    return fits, rest


def _borrowed_below(field_: Field, top: NodeId, skip: NodeId, pairs: Sequence[Pair]) -> Iterator[Job]:
    """Jobs of queues below ``top`` (not below ``skip``) on branches above their quota at every level."""
    by_queue: dict[NodeId, list[Job]] = {}
    for job in field_.running.values():
        by_queue.setdefault(job.queue, []).append(job)
    stack = [child for child in field_.shape.children[top] if child != skip]
    while stack:
        node = stack.pop()
        if field_.within(node, pairs):
            continue
        yield from by_queue.get(node, ())
        stack.extend(field_.shape.children[node])


# fair


def _fair(
    field_: Field,
    incoming: Job,
    pairs: Sequence[Pair],
    strategies: Sequence[Strategy],
    final_check: bool,
    barred: Callable[[Job], bool],
) -> list[Victim]:
    line = _fair_candidates(field_, incoming, pairs, barred)
    if not line:
        return []
    field_._book(incoming)
    search = _FairSearch(field_, incoming, pairs)
    fits = search.first(line, strategies[0])
    if not fits and len(strategies) > 1:
        fits = search.second()
    needed: list[Victim] = []
    if fits:
        needed = put_back(search.taken, search.fits, field_)
        if final_check and not search.settled(needed):
            for victim in needed:
                field_._book(victim.job)
            needed, search.taken = [], []
    for victim in needed if fits else search.taken:
        field_._book(victim.job)
    field_._unbook(incoming)
    return needed


def _fair_candidates(
    field_: Field, incoming: Job, pairs: Sequence[Pair], barred: Callable[[Job], bool]
) -> list[Job]:
    rules = field_.rules[incoming.queue]
    root = field_.shape.path(incoming.queue)[-1]
    found: list[Job] = []
    for job in field_.running.values():
        own = job.queue == incoming.queue
        who = rules.within_queue if own else rules.reclaim_within_cohort
        if not _touches(job, pairs) or not _allows(who, incoming, job) or barred(job):
            continue
        if own or (not field_.within(job.queue, pairs) and field_.shape.path(job.queue)[-1] == root):
            found.append(job)
    return sorted(found, key=_order(incoming.queue))


class _FairSearch:
    """One search; ``incoming`` is booked while it lasts, what is taken is off the field."""

    def __init__(self, field_: Field, incoming: Job, pairs: Sequence[Pair]) -> None:
        self.field, self.incoming, self.pairs = field_, incoming, pairs
        self.path = field_.shape.path(incoming.queue)
        self.taken: list[Victim] = []
        self.again: list[Job] = []

    def fits(self) -> bool:
        with self.field.without(self.incoming):
            return self.field.fits(self.incoming)

    def _take(self, job: Job, why: Why) -> bool:
        self.field._unbook(job)
        self.taken.append(Victim(job, why))
        return self.fits()

    def sides(self, queue: NodeId) -> tuple[NodeId, NodeId]:
        """The two branches just below the common ancestor: the asking one and the giving one."""
        giving = self.field.shape.path(queue)
        above = set(self.path)
        index = next(i for i, step in enumerate(giving) if step in above)
        return self.path[self.path.index(giving[index]) - 1], giving[index - 1]

    def first(self, line: Sequence[Job], strategy: Strategy) -> bool:
        turns = _Turns(self.field, self.incoming.queue, line)
        for queue in turns:
            if queue == self.incoming.queue:
                if self._take(turns.pop(queue), "within_queue"):
                    return True
                continue
            asking, giving = self.sides(queue)
            share, before = self.field.share(asking), self.field.share(giving)
            owner = self.field.within(self.incoming.queue, self.pairs)
            while turns.has(queue):
                job = turns.pop(queue)
                if owner or self._holds(strategy, share, before, job, giving):
                    if self._take(job, "reclaim" if owner else "fair_share"):
                        return True
                    break
                self.again.append(job)
        return False

    def second(self) -> bool:
        turns = _Turns(self.field, self.incoming.queue, self.again)
        for queue in turns:
            asking, giving = self.sides(queue)
            if self.field.share(asking) < self.field.share(giving) and self._take(
                turns.pop(queue), "fair_share"
            ):
                return True
            turns.drop(queue)
        return False

    def _holds(self, strategy: Strategy, share: Share, before: Share, job: Job, giving: NodeId) -> bool:
        if strategy == "InitialShare":
            return share < before
        with self.field.without(job):
            return share <= self.field.share(giving)

    def settled(self, needed: Sequence[Victim]) -> bool:
        """Whether no giving side ends below the asking one: then nobody has cause to turn it round."""
        for victim in needed:
            if victim.why == "fair_share":
                asking, giving = self.sides(victim.job.queue)
                if self.field.share(asking) > self.field.share(giving):
                    return False
        return True


class _Turns:
    """Which queue gives next: from the root down always the child that reaches farthest; what does not
    borrow, or has no candidate left, drops out."""

    def __init__(self, field_: Field, own: NodeId, line: Sequence[Job]) -> None:
        self.field, self.own = field_, own
        self.path = field_.shape.path(own)
        self.left: dict[NodeId, list[Job]] = {}
        for job in reversed(line):
            self.left.setdefault(job.queue, []).append(job)
        self.out: set[NodeId] = set()

    def has(self, queue: NodeId) -> bool:
        return bool(self.left.get(queue))

    def pop(self, queue: NodeId) -> Job:
        return self.left[queue].pop()

    def drop(self, queue: NodeId) -> None:
        self.left.pop(queue, None)

    def __iter__(self) -> Iterator[NodeId]:
        root = self.path[-1]
        while root not in self.out:
            queue = self._next(root)
            if queue is not None:
                yield queue

    def _next(self, node: NodeId) -> NodeId | None:
        below = self.field.shape.children[node]
        if not below:
            if self.has(node):
                return node
            self.out.add(node)
            return None
        best: tuple[Share, bool, NodeId] | None = None
        for child in below:
            if child in self.out:
                continue
            inner = bool(self.field.shape.children[child])
            share = self.field.share(child)
            idle = share[1] == 0 and child not in self.path
            if idle or (not inner and not self.has(child)):
                self.out.add(child)
            elif best is None or (share, inner) >= best[:2]:
                best = (share, inner, child)
        if best is None:
            self.out.add(node)
            return None
        return self._next(best[2])


# minimum run time


def minimum_run(
    parents: Mapping[NodeId, NodeId | None],
    values: Mapping[NodeId, int | None],
    asking: NodeId,
    giving: NodeId,
    default: int,
    *,
    reclaim: bool,
) -> int:
    """How long work is left alone after its last start, by the nearest value set.

    Within a queue: from the victim's queue upwards. Across: from one step below the common ancestor on the
    victim's side, upwards (what a branch sets inside does not bind others). Source: KAI's document on
    minimum run time.
    """
    path = _upwards(parents, giving)
    start = 0
    if reclaim:
        above = set(_upwards(parents, asking))
        common = next((i for i, step in enumerate(path) if step in above), len(path))
        start = max(0, common - 1)
    return next((value for step in path[start:] if (value := values.get(step)) is not None), default)


def _upwards(parents: Mapping[NodeId, NodeId | None], node: NodeId) -> list[NodeId]:
    path: list[NodeId] = []
    step: NodeId | None = node
    while step is not None:
        path.append(step)
        step = parents.get(step)
    return path


# the loop guard, on quotas alone


def settle(
    field_: Field, incoming: Job, mode: Literal["classical", "fair"], *, most: int = 1000
) -> tuple[int, bool]:
    """Submit a job, submit again whatever is evicted, first come first served, until nothing changes.

    Who was displaced does not displace the queues that did it. Returns how many evictions that took, and
    whether it came to rest (within ``most``).
    """
    waiting = [incoming]
    displaced_by: dict[NodeId, set[NodeId]] = {}
    evictions, clock = 0, max((job.admitted_at for job in field_.running.values()), default=0)
    changed = True
    while changed and evictions <= most:
        changed = False
        for job in list(waiting):
            gone: list[Victim] = []
            if not field_.fits(job):
                guard = displaced_by.get(job.id, set())
                gone = victims(
                    field_,
                    job,
                    mode,
                    final_check=True,
                    barred=lambda one, guard=guard: one.queue in guard,  # type: ignore[misc]
                )
                if not gone:
                    continue
            for victim in gone:
                field_.remove(victim.job)
                waiting.append(victim.job)
                displaced_by.setdefault(victim.job.id, set()).add(job.queue)
            evictions += len(gone)
            clock += 1
            waiting.remove(job)
            field_.admit(Job(job.id, job.queue, job.usage, job.priority, clock, job.created_at, ending=False))
            changed = True
    return evictions, not changed
