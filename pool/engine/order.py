"""Who comes first: departments below their guarantee, then by use against fair share, then age; priority
within one.

Source: BEHAVIOUR 5 (Order of departments, Fair share).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence

from pool.engine.model import Request
from quotas.engine.fairshare import Claim, divide
from quotas.engine.ids import NodeId
from quotas.engine.tree import QuotaTree

Key = tuple[int, float, int, int]


class Line:
    """The line of all requests. Iterating asks for the next one with the counters as they stand then.

    ``trees`` are read live: booking a placed request moves its department back. ``shares`` are fixed for
    the cycle.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        trees: Mapping[str, QuotaTree],
        shares: Mapping[str, Mapping[NodeId, float]],
    ) -> None:
        self.trees, self.shares = trees, shares
        queues: dict[int, list[Request]] = {}
        for request in requests:
            queues.setdefault(request.department_id, []).append(request)
        for queue in queues.values():
            queue.sort(key=within_department, reverse=True)
        self.queues = queues

    def __iter__(self) -> Iterator[Request]:
        heap = [(self._key(queue[-1]), department) for department, queue in self.queues.items()]
        heapq.heapify(heap)
        while heap:
            _, department = heapq.heappop(heap)
            queue = self.queues[department]
            yield queue.pop()
            # Only this department's counters moved meanwhile, so only its key can be stale.
            if queue:
                heapq.heappush(heap, (self._key(queue[-1]), department))

    def _key(self, request: Request) -> Key:
        flavour = request.flavours[0] if request.flavours else ""
        tree = self.trees.get(flavour)
        if tree is None or request.department_id not in tree.nodes:
            return (1, 0.0, request.queued_at, request.id)
        used = tree.counters[request.department_id].total
        guarantee = tree.guarantee(request.department_id)
        if used < guarantee:
            return (0, used / guarantee, request.queued_at, request.id)
        share = self.shares.get(flavour, {}).get(request.department_id, 0.0)
        ratio = used / share if share else (0.0 if used == 0 else float("inf"))
        return (1, ratio, request.queued_at, request.id)


def within_department(request: Request) -> tuple[int, int, int]:
    """Order within a department: higher priority, then older, then smaller id."""
    return (-request.priority, request.queued_at, request.id)


def fair_shares(
    trees: Mapping[str, QuotaTree],
    requests: Sequence[Request],
    capacity: Mapping[str, int],
    charge: Callable[[Request, str], int],
) -> dict[str, dict[NodeId, float]]:
    """Fair share per flavour and department in milli-GPU: ask = min(limit, running + waiting), whole cards
    shared.

    A request that accepts several flavours counts towards its first.
    """
    waiting: dict[str, dict[NodeId, int]] = {}
    for request in requests:
        if request.flavours:
            flavour = request.flavours[0]
            by_department = waiting.setdefault(flavour, {})
            amount = charge(request, flavour)
            by_department[request.department_id] = by_department.get(request.department_id, 0) + amount
    answer: dict[str, dict[NodeId, float]] = {}
    for flavour, asked in waiting.items():
        tree = trees.get(flavour)
        if tree is None:
            continue
        demand = {node_id: asked.get(node_id, 0) for node_id in tree.nodes}
        for node_id in tree.post_order:
            parent = tree.nodes[node_id].parent
            if parent is not None:
                demand[parent] += demand[node_id]
        claims = [
            Claim(
                id=node_id,
                parent=tree.nodes[node_id].parent,
                request=demand[node_id] + tree.counters[node_id].total,
                deserved=tree.guarantee(node_id),
                limit=tree.nodes[node_id].hard_cap,
                weight=tree.nodes[node_id].weight,
                created=rank,
            )
            for rank, node_id in enumerate(tree.post_order)
        ]
        division = divide(capacity.get(flavour, 0), claims, unit=1000)
        answer[flavour] = {node_id: float(share) for node_id, share in division.share.items()}
    return answer
