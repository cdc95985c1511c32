"""The quota tree of one flavour: what each department keeps, lends, borrows and has used.

All amounts are integers of one unit (milli-GPU in the product). Flavours are independent: one tree each.

Per node n with children c:
    own(n)  = guarantee(n) − Σ guarantee(c)               negative only after an override
    S(n)    = own(n) + Σ (S(c) − kept(c))                 subtree quota
    kept(n) = max(0, S(n) − lend_limit), or 0 without one what the node never lends
Counters per node:
    charged  U = direct use + Σ max(0, charged(c) − kept(c))   what reached this node
    total      = all use in the subtree
    total_noninterruptible = the part of it that may not be interrupted
Invariant: the identities above hold after every ``add`` and ``remove``. Source: BEHAVIOUR 4,
cases_quota.json.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from quotas.engine.ids import NodeId, id_key


class TreeError(ValueError):
    """The nodes given are no forest, or an amount is impossible."""


@dataclass(frozen=True, slots=True)
class QuotaNode:
    """Limits and counters of one department for one flavour. ``None`` = unlimited, 0 = none.

    ``guarantee`` contains the children's; give ``own`` instead where only the node's own part is known
    (case files).
    ``weight`` is the over-quota weight; a higher ``priority`` is a band that takes surplus first.
    """

    id: NodeId
    parent: NodeId | None = None
    guarantee: int | None = 0
    own: int | None = None
    borrow_limit: int | None = None
    lend_limit: int | None = None
    hard_cap: int | None = None
    weight: int = 1
    charged: int = 0
    total: int = 0
    total_noninterruptible: int = 0
    priority: int = 0


@dataclass(slots=True)
class Counters:
    """Use at one node: ``charged`` ≤ ``total``, all ≥ 0."""

    charged: int = 0
    total: int = 0
    total_noninterruptible: int = 0


class QuotaTree:
    """Limits (fixed) and counters (mutable) of one flavour's departments; several roots are allowed.

    Building is O(n). Raises TreeError for an unknown parent, a cycle, a double id, or a negative limit.
    """

    def __init__(self, nodes: Iterable[QuotaNode]) -> None:
        self.nodes: dict[NodeId, QuotaNode] = {}
        for node in nodes:
            if node.id in self.nodes:
                raise TreeError(f"node {node.id!r} given twice")
            _check_limits(node)
            self.nodes[node.id] = node
        self.children: dict[NodeId, list[NodeId]] = {node_id: [] for node_id in self.nodes}
        for node in self.nodes.values():
            if node.parent is not None:
                if node.parent not in self.nodes:
                    raise TreeError(f"parent {node.parent!r} of {node.id!r} is unknown")
                self.children[node.parent].append(node.id)
        for siblings in self.children.values():
            siblings.sort(key=id_key)
        self.roots = sorted((n.id for n in self.nodes.values() if n.parent is None), key=id_key)
        self.post_order: list[NodeId] = list(self._post_order())
        if len(self.post_order) != len(self.nodes):
            raise TreeError("the parents form a cycle")
        self.own: dict[NodeId, int] = {}
        self.subtree: dict[NodeId, int] = {}
        self.kept: dict[NodeId, int] = {}
        self._guarantees: dict[NodeId, int] = {}
        self._paths: dict[NodeId, list[NodeId]] = {}
        self._derive_limits()
        self.version = 0
        """Grows with every booking: what was worked out from the counters holds while it stands."""
        self.moved: dict[NodeId, int] = dict.fromkeys(
            [*self.roots, *(child for root in self.roots for child in self.children[root])], 0
        )
        """The version of the last booking by branch (see ``branch``)."""
        self.counters: dict[NodeId, Counters] = {
            n.id: Counters(n.charged, n.total, n.total_noninterruptible) for n in self.nodes.values()
        }

    def _post_order(self) -> Iterator[NodeId]:
        stack: list[tuple[NodeId, bool]] = [(root, False) for root in reversed(self.roots)]
        while stack:
            node_id, done = stack.pop()
            if done:
                yield node_id
                continue
            stack.append((node_id, True))
            stack.extend((child, False) for child in reversed(self.children[node_id]))

    def _derive_limits(self) -> None:
        for node_id in self.post_order:
            node = self.nodes[node_id]
            promised = lent = 0
            for child in self.children[node_id]:
                promised += self._guarantees[child]
                lent += self.subtree[child] - self.kept[child]
            self.own[node_id] = own = (node.guarantee or 0) - promised if node.own is None else node.own
            self._guarantees[node_id] = own + promised
            self.subtree[node_id] = own + lent
            lend = node.lend_limit
            self.kept[node_id] = 0 if lend is None else max(0, self.subtree[node_id] - lend)

    def guarantee(self, node_id: NodeId) -> int:
        """The node's guarantee, children included."""
        return self._guarantees[node_id]

    def path(self, node_id: NodeId) -> list[NodeId]:
        """The node and its ancestors, leaf first, root last; not to be changed. TreeError for an unknown
        node."""
        found = self._paths.get(node_id)
        if found is not None:
            return found
        if node_id not in self.nodes:
            raise TreeError(f"node {node_id!r} is unknown")
        found = []
        step: NodeId | None = node_id
        while step is not None:
            found.append(step)
            step = self.nodes[step].parent
        self._paths[node_id] = found
        return found

    def branch(self, node_id: NodeId) -> NodeId:
        """The branch that a node stands on: the child of the one root, where there is one, else its root. While
        ``moved`` of it stands, so do the counters of the node and of all above it but that one root's."""
        path = self.path(node_id)
        return path[-2] if len(self.roots) == 1 and len(path) > 1 else path[-1]

    def _move(self, path: list[NodeId]) -> None:
        self.version += 1
        self.moved[path[-1]] = self.version
        if len(path) > 1:
            self.moved[path[-2]] = self.version

    def add(self, node_id: NodeId, amount: int, *, interruptible: bool = True) -> None:
        """Book ``amount`` ≥ 0 of use at a node; what exceeds a node's kept part is charged to its parent
        too.
        """
        _check_amount(amount)
        path = self.path(node_id)
        self._move(path)
        rising = amount
        for step in path:
            counters = self.counters[step]
            counters.total += amount
            if not interruptible:
                counters.total_noninterruptible += amount
            local = max(0, self.kept[step] - counters.charged)
            counters.charged += rising
            rising = max(0, rising - local)

    def remove(self, node_id: NodeId, amount: int, *, interruptible: bool = True) -> None:
        """Take ``amount`` ≥ 0 of use away again, undoing ``add``. TreeError when a counter would fall below
        0.
        """
        _check_amount(amount)
        path = self.path(node_id)
        for step in path:
            counters = self.counters[step]
            if counters.total < amount or (not interruptible and counters.total_noninterruptible < amount):
                raise TreeError(f"node {step!r} has less use than {amount}")
        self._move(path)
        falling = amount
        for step in path:
            counters = self.counters[step]
            counters.total -= amount
            if not interruptible:
                counters.total_noninterruptible -= amount
            above_kept = max(0, counters.charged - self.kept[step])
            counters.charged -= falling
            falling = min(falling, above_kept)

    def recharge(self) -> None:
        """Recompute ``charged`` everywhere from the totals: needed after limits changed, a no-op
        otherwise.
        """
        self.version += 1
        self.moved = dict.fromkeys(self.moved, self.version)
        for node_id in self.post_order:
            counters = self.counters[node_id]
            charged = counters.total
            for child in self.children[node_id]:
                below = self.counters[child]
                charged += max(0, below.charged - self.kept[child]) - below.total
            counters.charged = charged

    def snapshot(self) -> tuple[QuotaNode, ...]:
        """The nodes with the counters as they stand, in the order given to the constructor."""
        return tuple(
            replace(
                node,
                charged=self.counters[node.id].charged,
                total=self.counters[node.id].total,
                total_noninterruptible=self.counters[node.id].total_noninterruptible,
            )
            for node in self.nodes.values()
        )

    def copy(self) -> QuotaTree:
        """An independent tree with the same limits and counters (limits are shared: they never change)."""
        twin = QuotaTree.__new__(QuotaTree)
        twin.nodes, twin.children, twin.roots = self.nodes, self.children, self.roots
        twin.post_order, twin.own, twin.subtree = self.post_order, self.own, self.subtree
        twin.version, twin.moved = self.version, dict(self.moved)
        twin.kept, twin._guarantees, twin._paths = self.kept, self._guarantees, self._paths
        twin.counters = {
            node_id: Counters(c.charged, c.total, c.total_noninterruptible)
            for node_id, c in self.counters.items()
        }
        return twin


def _check_amount(amount: int) -> None:
    if amount < 0:
        raise TreeError("an amount may not be negative")


def _check_limits(node: QuotaNode) -> None:
    limits = (node.guarantee, node.borrow_limit, node.lend_limit, node.hard_cap, node.weight)
    if any(limit is not None and limit < 0 for limit in limits):
        raise TreeError(f"node {node.id!r} has a negative limit")
