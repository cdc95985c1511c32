"""The reclaim action: an owner takes back what others borrow of its guarantee.

Who asks      a blocked request whose branch stays within its guarantee with it. Branches are compared just
              below the common ancestor: what a department does not use of its own, any of its projects may
              claim from other departments. With ``Policy.rebalance`` also one that stays within its fair share
              at every level, against branches above theirs.
Who gives     interruptible work of other branches that are above their guarantee at every level below the
              common ancestor. Priority neither protects nor reaches across departments.
Order         the branch with the highest use against its fair share, from the top down, after each victim
              anew; within a department: not begun yet, lowest priority, newest start, smallest.
How much      as little as is enough (``victims``). A branch falls below its guarantee only where no set works
              that leaves all at theirs.
Source: BEHAVIOUR 5 (Reclaim); cases_preemption.json, kind cluster; the two claims are those of KAI-Scheduler
(guaranteed share, fair share), the comparison below the common ancestor is Kueue's.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pool.engine.fit import Need
from pool.engine.loop_guard import clear_of_turn, may_displace
from pool.engine.making_room import evictions, making_room, settle
from pool.engine.model import EvictCause, Request
from pool.engine.round import Blocked, Round
from pool.engine.victims import Bench, Candidate, Found, Search
from pool.engine.world import smallest
from quotas.engine.available import borrow_checks, cap_checks
from quotas.engine.ids import NodeId
from quotas.engine.tree import QuotaTree

Kind = tuple[int, int, tuple[int, ...]]
"""What decides whether room can be made: where and for whom (``Known.kind``), priority, by whom it was displaced. One
that failed fails for all of its kind."""
CARD = 1000
"""Milli-GPU of a whole card."""
EXPECTED = 1.0
"""Nobody waits where fewer ends than this are expected."""
YOUNG_MS = 60_000
"""Work that is younger is taken to be so old."""


def run(round_: Round, bench: Bench, *, withdraw: bool) -> None:
    """Make room for blocked requests that may claim it, in line order. ``withdraw`` False: placements of this
    plan stay."""
    if not round_.policy.reclaim and not round_.policy.rebalance:
        return
    patience, claims = Patience(round_), Claims(round_)

    def make_room(blocked: Blocked, request: Request, need: Need) -> bool:
        return claims.may(request, need) and reclaim(round_, bench, blocked, request, need, withdraw=withdraw)

    for_each_kind(round_, make_room, may=lambda request, need: not patience.lasts(request, need))


class Claims:
    """Whether there is any claim at all: the largest ask with which some branch of a department would stay within its
    guarantee, kept while the counters stand. Most who wait have none, and are done with."""

    def __init__(self, round_: Round) -> None:
        self.round = round_
        self._known: dict[tuple[str, int], tuple[int, int]] = {}

    def may(self, request: Request, need: Need) -> bool:
        """Never False where ``Claim.of`` finds a claim."""
        tree = self.round.world.trees.get(need.flavour or "")
        if self.round.policy.rebalance or tree is None or request.department_id not in tree.nodes:
            return True
        key = (need.flavour or "", request.department_id)
        version = tree.moved[tree.branch(request.department_id)]
        known = self._known.get(key)
        if known is None or known[0] != version:
            path = tree.path(request.department_id)
            sides = path if len(tree.roots) > 1 else path[:-1]
            most = max((tree.guarantee(side) - tree.counters[side].total for side in sides), default=-1)
            known = self._known[key] = (version, most)
        return need.charge_milli <= known[1]


class Patience:
    """Whether an owner's new ask waits for what ends by itself: where one card is enough, and one may be expected in
    time. Of work whose end is not known as much is to come as has been, so a piece that has run for a minute ends
    in the next minute about as likely as not, and one that has run for a day hardly."""

    def __init__(self, round_: Round) -> None:
        self.round, self.wait_ms = round_, round_.policy.reclaim_patience_ms
        self._expected: dict[str, float] = {}

    def lasts(self, request: Request, need: Need) -> bool:
        if need.charge_milli > CARD or self.round.now - request.queued_at >= self.wait_ms:
            return False
        return self.expected(need.flavour or "") >= EXPECTED

    def expected(self, flavour: str) -> float:
        """So many pieces of work of a flavour are expected to end within the patience."""
        if flavour not in self._expected:
            self._expected[flavour] = sum(
                self.wait_ms / max(YOUNG_MS, self.round.now - one.started_at)
                for one in self.round.world.running.values()
                if one.flavour == flavour
            )
        return self._expected[flavour]


def for_each_kind(
    round_: Round,
    make_room: Callable[[Blocked, Request, Need], bool],
    *,
    may: Callable[[Request, Need], bool] = lambda _request, _need: True,
) -> None:
    """Make room for blocked requests that ``may`` ask for it, in line order, until enough was done.

    ``make_room`` says whether it was possible, for the smallest size that the request takes; where it was
    not, it is not tried again for the same kind.
    """
    hopeless: set[Kind] = set()
    now, keeps, world, done = round_.now, round_.keeps, round_.world, exhausted(round_)
    for blocked in round_.blocked:
        need = blocked.lacks
        if need is None:
            continue
        request = blocked.request
        if not may_displace(request, now) or request.id in keeps:
            continue
        if done:
            return
        if not may(request, need):
            continue
        kind = (world.known(request).kind, request.priority, request.displaced_by)
        if kind in hopeless:
            continue
        if not make_room(blocked, *smallest(request, need, world)):
            hopeless.add(kind)
        done = exhausted(round_)


def exhausted(round_: Round) -> bool:
    """Whether enough was sought and done in this decision: the next one goes on."""
    policy = round_.policy
    return round_.preemptors >= policy.max_preemptors or round_.searches >= policy.max_searches


def kind_of(round_: Round, request: Request) -> Kind:
    """The kind of a request."""
    return (round_.world.known(request).kind, request.priority, request.displaced_by)


def reclaim(
    round_: Round, bench: Bench, blocked: Blocked, request: Request, need: Need, *, withdraw: bool
) -> bool:
    """Make room for one request; whether that was possible (or what is ending anyway is enough)."""
    claim = Claim.of(round_, request, need)
    if claim is None:
        return False
    search = Search(round_, request, need)
    found = _search(search, claim, bench, withdraw=withdraw, spared=False)
    cause, rule = claim.cause
    if claim.sees_spared:
        meant = _search(search, claim, bench, withdraw=withdraw, spared=True)
        victims = [one for one in meant.victims if one.running and one.running.spared] if meant else []
        round_.spared += evictions(round_, victims, blocked.request, cause, rule, claim.figures)
    if found is None:
        return False
    if not found.victims:
        round_.world.take(found.request, found.need, found.members)
        blocked.reason = making_room(round_, blocked.request, need, 0, round_.now)
        blocked.lacks = None
        return True
    settle(round_, bench, blocked, found, cause, rule, claim.figures)
    return True


def _search(search: Search, claim: Claim, bench: Bench, *, withdraw: bool, spared: bool) -> Found | None:
    for strict in (True, False):
        found = search.find(claim.line(bench, strict=strict, withdraw=withdraw, spared=spared))
        if found is not None and len(found.victims) <= search.round.policy.max_victims:
            return found
    return None


@dataclass(slots=True)
class Claim:
    """What a request may take back, and from whom. ``sides``: by common ancestor (None = above all roots) the
    asking branch, and whether it claims by its fair share only."""

    round: Round
    tree: QuotaTree
    request: Request
    need: Need
    sides: dict[NodeId | None, tuple[NodeId, bool]]
    mine: frozenset[NodeId]
    """The asking department and all above it."""
    sees_spared: bool = False

    @classmethod
    def of(cls, round_: Round, request: Request, need: Need) -> Claim | None:
        """None where the request has no claim against anybody."""
        flavour = need.flavour or ""
        tree = round_.world.trees.get(flavour)
        if tree is None or request.department_id not in tree.nodes or need.charge_milli <= 0:
            return None
        path = tree.path(request.department_id)
        sides: dict[NodeId | None, tuple[NodeId, bool]] = {}
        fair = round_.policy.rebalance
        for index, side in enumerate(path):
            common = path[index + 1] if index + 1 < len(path) else None
            if common is None and len(tree.roots) == 1:
                break
            used = tree.counters[side].total + need.charge_milli
            fair = fair and used <= round_.share(flavour, side)
            if round_.policy.reclaim and used <= tree.guarantee(side):
                sides[common] = (side, False)
            elif fair:
                sides[common] = (side, True)
        if not sides or _own_limits(tree, request, need, path, next(iter(sides))):
            return None
        return cls(round_, tree, request, need, sides, frozenset(path))

    @property
    def cause(self) -> tuple[EvictCause, str]:
        """Cause and rule of the evictions: by guarantee where any side claims so."""
        if any(not by_share for _, by_share in self.sides.values()):
            return "reclaim", "owner_within_guarantee"
        return "rebalance", "within_fair_share"

    def line(self, bench: Bench, *, strict: bool, withdraw: bool, spared: bool) -> Iterator[Candidate]:
        """Candidates in order. ``strict``: none that takes its branch below what is its own."""
        return _Walk(self, bench, strict, withdraw, spared).run()

    def common(self, department: NodeId) -> tuple[NodeId | None, list[NodeId]]:
        """The common ancestor with another department, and that one's branch below it, leaf first."""
        branch: list[NodeId] = []
        for step in self.tree.path(department):
            if step in self.mine:
                return step, branch
            branch.append(step)
        return None, branch

    def figures(self, one: Candidate) -> dict[str, Any]:
        """The sums that an eviction rests on, as they are before it."""
        common, branch = self.common(one.department)
        side, _ = self.sides[common]
        giving, tree, flavour = branch[-1], self.tree, self.need.flavour or ""
        return {
            "flavour": flavour,
            "requested": self.need.charge_milli,
            "freed": one.charge,
            "asking": side,
            "asking_used": tree.counters[side].total,
            "asking_guarantee": tree.guarantee(side),
            "asking_share": int(self.round.share(flavour, side)),
            "giving": giving,
            "giving_used": tree.counters[giving].total,
            "giving_guarantee": tree.guarantee(giving),
            "giving_share": int(self.round.share(flavour, giving)),
        }


def _own_limits(
    tree: QuotaTree, request: Request, need: Need, path: Sequence[NodeId], common: NodeId | None
) -> bool:
    """Whether a limit below the nearest common ancestor with those who give refuses: whoever gives way, it stays."""
    own = set(path if common is None else path[: path.index(common)])
    amount, department = need.charge_milli, request.department_id
    checks = cap_checks(tree, department, amount, interruptible=request.interruptible)
    checks += borrow_checks(tree, department, amount)
    return any(not check.holds and check.level in own for check in checks)


class _Walk:
    """Candidates of a claim in order; ``left`` counts down what each branch would still use."""

    def __init__(self, claim: Claim, bench: Bench, strict: bool, withdraw: bool, spared: bool) -> None:
        self.claim, self.bench, self.tree = claim, bench, claim.tree
        self.round, self.flavour = claim.round, claim.need.flavour or ""
        self.strict, self.withdraw, self.spared = strict, withdraw, spared
        self.left: dict[NodeId, int] = {}
        self.branches: dict[int, tuple[list[NodeId], bool]] = {}
        self.queues: dict[int, Iterator[Candidate]] = {}

    def run(self) -> Iterator[Candidate]:
        self._gather()
        yield from self._unbegun()
        heap = [(self._key(department), department) for department in self.queues]
        heapq.heapify(heap)
        while heap:
            key, department = heapq.heappop(heap)
            now = self._key(department)
            if now != key:
                # Use only falls along the line: a stale key is too early.
                heapq.heappush(heap, (now, department))
                continue
            one = self._next(department)
            if one is not None:
                yield one
                heapq.heappush(heap, (self._key(department), department))

    def _gather(self) -> None:
        for department in self.bench.above(self.flavour):
            if department == self.claim.request.department_id:
                continue
            common, branch = self.claim.common(department)
            side = self.claim.sides.get(common)
            if side is None or not branch or any(not self._above(step, side[1], branch) for step in branch):
                continue
            self.branches[department] = (branch, side[1])
            self.queues[department] = iter(self.bench.of(self.flavour, department))

    def _own(self, step: NodeId, by_share: bool, branch: list[NodeId]) -> float:
        """What is a branch's own against this claim: its guarantee, between borrowers also its fair share."""
        own = float(self.tree.guarantee(step))
        if by_share and step == branch[-1]:
            own = max(own, self.round.share(self.flavour, step))
        return own

    def _use(self, step: NodeId) -> int:
        return self.left.get(step, self.tree.counters[step].total)

    def _above(self, step: NodeId, by_share: bool, branch: list[NodeId]) -> bool:
        return self._use(step) > self._own(step, by_share, branch)

    def _key(self, department: int) -> tuple[float, ...]:
        branch, _ = self.branches[department]
        ratios = []
        for step in reversed(branch):
            share = self.round.share(self.flavour, step)
            ratios.append(-(self._use(step) / share) if share else float("-inf"))
        return tuple(ratios)

    def _unbegun(self) -> Iterator[Candidate]:
        for department in sorted(self.queues):
            for one in self.bench.unbegun(self.flavour, department):
                if self.withdraw and self._eligible(one):
                    yield one

    def _next(self, department: int) -> Candidate | None:
        return next((one for one in self.queues[department] if self._eligible(one)), None)

    def _eligible(self, one: Candidate) -> bool:
        branch, by_share = self.branches[one.department]
        for step in branch:
            used, own = self._use(step), self._own(step, by_share, branch)
            if used <= own or (self.strict and used - one.charge < own):
                return False
        if not self._allowed(one, branch, by_share):
            return False
        for step in branch:
            self.left[step] = self._use(step) - one.charge
        return True

    def _allowed(self, one: Candidate, branch: list[NodeId], by_share: bool) -> bool:
        request, running = self.claim.request, one.running
        if running is None:
            return True
        if running.spared and not self.spared:
            self.claim.sees_spared = True
            return False
        if self.bench.minimum.protects(running, request.department_id, self.tree, reclaim=True):
            return False
        margin = self.round.policy.displace_margin_permille
        return all(
            clear_of_turn(
                request.displaced_by, step, self._use(step), self._own(step, by_share, branch), margin
            )
            for step in branch
        )
