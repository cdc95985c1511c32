"""Who comes first: the order of departments, and of requests within one.

Departments   from the root down, at each level: an ask within the guarantee first; then the higher band; then
              the smaller use against the guarantee (with the ask, within it) or the fair share (as it is,
              above it); last the older request, then the smaller id.
Within one    priority, then weight of the class of work (option), then decayed use per person (option), then
              age, then id.
Tournament    (option) at each level the branch that does not borrow with the ask included, then the one that
              reaches less far into what others own by its weight.
Source: BEHAVIOUR 5 (Order of departments, Fair share); cases_fairshare.json, kind admission_order.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pool.engine.model import Request
from quotas.engine.available import max_possible
from quotas.engine.fairshare import Claim, divide
from quotas.engine.ids import NodeId
from quotas.engine.tree import QuotaTree

Key = tuple[Any, ...]
Shares = Mapping[str, Mapping[NodeId, float]]


Queues = Mapping[int, Sequence[Request]]


def queues_of(
    requests: Iterable[Request],
    user_use: Mapping[int, int] | None = None,
    class_weights: Mapping[str, int] | None = None,
) -> dict[int, list[Request]]:
    """The requests of each department, who comes first at the end."""
    use, weights = user_use or {}, class_weights or {}
    queues: dict[int, list[Request]] = {}
    for request in requests:
        queues.setdefault(request.department_id, []).append(request)
    for queue in queues.values():
        queue.sort(key=lambda request: within_department(request, use, weights), reverse=True)
    return queues


@dataclass(slots=True)
class _Standing:
    """Where asks of one amount by one department for one flavour stand. ``levels`` holds while the tree's ``moved``
    of the branch is ``version``."""

    tree: QuotaTree | None
    flavour: str
    amount: int
    steps: tuple[NodeId, ...]
    branch: NodeId
    levels: Key
    version: int = -1


Standings = dict[tuple[str, int, int], _Standing]
"""By flavour, department and amount."""


class Line:
    """The line of all requests. Iterating asks for the next one with the counters as they stand then.

    ``queues``: as ``queues_of`` gives them. ``trees`` are read live: booking a placed request moves its department,
    and its relatives, back. ``shares`` are fixed for the cycle; ``charge`` says what a request takes of its first
    flavour. Requests that are ``stuck`` when their turn in the department comes are left out. ``standings``: kept
    by who walks the same trees, with the same shares, more than once.
    """

    def __init__(
        self,
        queues: Queues,
        trees: Mapping[str, QuotaTree],
        shares: Shares,
        charge: Callable[[Request], int],
        *,
        stuck: Callable[[Request], bool] | None = None,
        order: Literal["guarantee", "tournament"] = "guarantee",
        standings: Standings | None = None,
    ) -> None:
        self.trees, self.shares, self.charge, self.stuck = trees, shares, charge, stuck
        self._level = _reach_key if order == "tournament" else self._guarantee_key
        self._standings: Standings = {} if standings is None else standings
        self.queues = {department: list(queue) for department, queue in queues.items()}

    def __iter__(self) -> Iterator[Request]:
        queues, stuck = self.queues, self.stuck
        heap: list[tuple[Key, int, int, list[Request], _Standing]] = []
        for queue in queues.values():
            head = queue[-1]
            standing = self._standing(head)
            heap.append((self._levels(standing), head.queued_at, head.id, queue, standing))
        heapq.heapify(heap)
        while heap:
            levels, _, _, queue, standing = heap[0]
            tree = standing.tree
            if tree is not None and tree.moved[standing.branch] != standing.version:
                # Use only grows while the line is walked: a key that is stale is too small, never too large.
                now = self._levels(standing)
                if now > levels:
                    head = queue[-1]
                    heapq.heapreplace(heap, (now, head.queued_at, head.id, queue, standing))
                    continue
            yield queue.pop()
            while stuck is not None and queue and stuck(queue[-1]):
                queue.pop()
            if queue:
                head = queue[-1]
                standing = self._standing(head)
                heapq.heapreplace(heap, (self._levels(standing), head.queued_at, head.id, queue, standing))
            else:
                heapq.heappop(heap)

    def _standing(self, request: Request) -> _Standing:
        flavours = request.flavours
        kind = (flavours[0] if flavours else "", request.department_id, self.charge(request))
        found = self._standings.get(kind)
        if found is None:
            found = self._standings[kind] = self._stand(*kind)
        return found

    def _stand(self, flavour: str, department: int, amount: int) -> _Standing:
        tree = self.trees.get(flavour)
        if tree is None or department not in tree.nodes:
            return _Standing(None, flavour, amount, (), department, (1, 0, 0.0))
        path = tree.path(department)
        # The one root is the same for all.
        steps = path[:-1] if len(tree.roots) == 1 and len(path) > 1 else path
        return _Standing(tree, flavour, amount, tuple(reversed(steps)), tree.branch(department), ())

    def _levels(self, standing: _Standing) -> Key:
        """What decides before age: for each level from the root down three numbers, smaller is earlier."""
        tree = standing.tree
        if tree is not None and tree.moved[standing.branch] != standing.version:
            levels: list[Any] = []
            for step in standing.steps:
                levels += self._level(tree, standing.flavour, step, standing.amount)
            standing.levels, standing.version = tuple(levels), tree.moved[standing.branch]
        return standing.levels

    def _guarantee_key(self, tree: QuotaTree, flavour: str, step: NodeId, amount: int) -> Key:
        used, guarantee = tree.counters[step].total + amount, tree.guarantee(step)
        band = -tree.nodes[step].priority
        if used <= guarantee:
            return (0, band, used / guarantee if guarantee else 0.0)
        share = self.shares.get(flavour, {}).get(step, 0.0)
        return (1, band, (used - amount) / share if share else float("inf"))


def _reach_key(tree: QuotaTree, _flavour: str, step: NodeId, amount: int) -> Key:
    node, parent = tree.nodes[step], tree.nodes[step].parent
    over = tree.counters[step].charged + amount - tree.subtree[step]
    if over <= 0 or parent is None:
        return (0, 0, 0.0)
    reach = over / max(1, max_possible(tree, parent))
    return (1, 0, reach / node.weight) if node.weight else (2, 0, reach)


def within_department(
    request: Request, use: Mapping[int, int] | None = None, weights: Mapping[str, int] | None = None
) -> tuple[int, ...]:
    """Order within a department: higher priority, higher weight of the class (1 where none is given), less decayed
    use of the person, older, smaller id."""
    used = (use or {}).get(request.user_id, 0) if request.user_id is not None else 0
    weight = (weights or {}).get(request.job_class, 1)
    return (-request.priority, -weight, used, request.queued_at, request.id)


Known = dict[str, tuple[Hashable, dict[NodeId, float]]]


def fair_shares(
    trees: Mapping[str, QuotaTree],
    requests: Sequence[Request],
    capacity: Mapping[str, int],
    charge: Callable[[Request], int],
    known: Known | None = None,
    behind: Mapping[str, Mapping[int, int]] | None = None,
) -> dict[str, dict[NodeId, float]]:
    """Fair share per flavour and department in milli-GPU: ask = min(limit, running + waiting), whole cards
    shared.

    A request that accepts several flavours counts towards its first. ``known``: what was worked out before for
    the same limits, used where nothing else changed and brought up to date. ``behind``: what others wait for beside
    the requests.
    """
    waiting: dict[str, dict[NodeId, int]] = {}
    for code, beyond in (behind or {}).items():
        waiting[code] = {department: amount for department, amount in beyond.items() if amount}
    for request in requests:
        if request.flavours:
            by_department = waiting.setdefault(request.flavours[0], {})
            department = request.department_id
            by_department[department] = by_department.get(department, 0) + charge(request)
    answer: dict[str, dict[NodeId, float]] = {}
    for flavour, asked in waiting.items():
        tree = trees.get(flavour)
        if tree is None:
            continue
        used = tuple([tree.counters[node_id].total for node_id in tree.post_order])
        basis = (used, frozenset(asked.items()), capacity.get(flavour, 0))
        before = None if known is None else known.get(flavour)
        if before is None or before[0] != basis:
            before = (basis, _shares(tree, asked, capacity.get(flavour, 0)))
            if known is not None:
                known[flavour] = before
        answer[flavour] = before[1]
    return answer


def _shares(tree: QuotaTree, asked: Mapping[NodeId, int], capacity: int) -> dict[NodeId, float]:
    demand = {node_id: asked.get(node_id, 0) for node_id in tree.nodes}
    for node_id in tree.post_order:
        parent = tree.nodes[node_id].parent
        if parent is not None:
            demand[parent] += demand[node_id]
    alone = tree.roots[0] if len(tree.roots) == 1 else None
    claims = [
        Claim(
            id=node_id,
            parent=tree.nodes[node_id].parent,
            request=demand[node_id] + tree.counters[node_id].total,
            # The one root stands for all there is: what is out of order is lost to all below it by their shares.
            deserved=min(tree.guarantee(node_id), capacity) if alone == node_id else tree.guarantee(node_id),
            limit=tree.nodes[node_id].hard_cap,
            weight=tree.nodes[node_id].weight,
            priority=tree.nodes[node_id].priority,
            created=rank,
        )
        for rank, node_id in enumerate(tree.post_order)
    ]
    division = divide(capacity, claims, unit=1000)
    return {node_id: float(share) for node_id, share in division.share.items()}
