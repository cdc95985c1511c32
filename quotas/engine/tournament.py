"""Admission order by tournament: one pass over the heads of the queues, from the root down.

At each level the child wins that does not borrow on the requested flavours with the job included; then the
lower weighted share with the job included (of two infinite ones, the lower unweighted); then priority; then
age; then id.
The winner is admitted if it fits; the rest play again. Separate roots do not compete. Source:
cases_fairshare.json.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from quotas.engine.available import available
from quotas.engine.fairshare import Number, borrow_share
from quotas.engine.ids import NodeId, id_key
from quotas.engine.tree import QuotaTree

Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Head:
    """The first waiting job of a queue; ``usage`` by (flavour, resource)."""

    id: NodeId
    queue: NodeId
    usage: Mapping[Pair, int]
    priority: int = 0
    created_at: int = 0


@dataclass(frozen=True, slots=True)
class Pass:
    admitted: tuple[NodeId, ...]
    waiting: tuple[NodeId, ...]


def admission_pass(
    trees: Mapping[Pair, QuotaTree], weights: Mapping[NodeId, Number], heads: Sequence[Head]
) -> Pass:
    """Play all heads out; ``trees`` are booked with what is admitted."""
    admitted: list[NodeId] = []
    waiting: list[NodeId] = []
    left = sorted(heads, key=lambda head: id_key(head.id))
    shape = next(iter(trees.values()))
    for root in shape.roots:
        mine = [head for head in left if shape.path(head.queue)[-1] == root]
        while mine:
            winner = _play(trees, shape, weights, root, mine)
            assert winner is not None
            mine.remove(winner)
            if all(
                pair in trees and available(trees[pair], winner.queue) >= amount
                for pair, amount in winner.usage.items()
            ):
                for pair, amount in winner.usage.items():
                    trees[pair].add(winner.queue, amount)
                admitted.append(winner.id)
            else:
                waiting.append(winner.id)
    return Pass(tuple(admitted), tuple(waiting))


def _play(
    trees: Mapping[Pair, QuotaTree],
    shape: QuotaTree,
    weights: Mapping[NodeId, Number],
    node: NodeId,
    heads: Sequence[Head],
) -> Head | None:
    own = [head for head in heads if head.queue == node]
    players: list[tuple[NodeId, Head]] = [(node, head) for head in own]
    for child in shape.children[node]:
        head = _play(trees, shape, weights, child, heads)
        if head is not None:
            players.append((child, head))
    if not players:
        return None
    return min(players, key=lambda row: _key(trees, weights, *row))[1]


def _key(
    trees: Mapping[Pair, QuotaTree], weights: Mapping[NodeId, Number], node: NodeId, head: Head
) -> tuple[bool, bool, Fraction, int, int, tuple[int, int, str]]:
    by_resource: dict[str, list[QuotaTree]] = {}
    extra: dict[str, list[int]] = {}
    borrows = False
    for (flavour, resource), tree in trees.items():
        more = head.usage.get((flavour, resource), 0)
        by_resource.setdefault(resource, []).append(tree)
        extra.setdefault(resource, []).append(more)
        borrows = borrows or (more > 0 and tree.counters[node].charged + more > tree.subtree[node])
    plain = borrow_share(by_resource, node, extra=extra).value or 0
    weight = Fraction(weights.get(node, 1))
    infinite = weight == 0 and plain > 0
    share = Fraction(plain) if weight == 0 else Fraction(plain) / weight
    return borrows, infinite, share, -head.priority, head.created_at, id_key(head.id)
