"""What is different in a what-if: other quotas, more or fewer nodes, no borrowing, another policy. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pool.engine.model import Node, Policy, Slice
from pool.engine.past import Setting
from quotas.engine.ids import NodeId
from quotas.engine.tree import QuotaNode

KEEP = -1
"""A limit that stays as it is."""


@dataclass(frozen=True, slots=True)
class Limits:
    """New limits of one department for one flavour in milli-GPU; None = unlimited, KEEP = as it is."""

    guarantee: int = KEEP
    borrow: int | None = KEEP
    cap: int | None = KEEP


@dataclass(frozen=True, slots=True)
class Changes:
    """``nodes``: by flavour, so many more (negative: fewer) nodes like those that there are most of.
    ``borrowing`` False: nobody may have more than the guarantee.
    """

    limits: Mapping[tuple[NodeId, str], Limits] = field(default_factory=dict)
    nodes: Mapping[str, int] = field(default_factory=dict)
    borrowing: bool = True
    policy: Policy | None = None


def changed(setting: Setting, changes: Changes) -> Setting:
    """The setting with the changes; the root of each flavour's tree follows what is installed."""
    nodes = setting.nodes
    for code, count in sorted(changes.nodes.items()):
        nodes = _more(nodes, code, count) if count > 0 else _fewer(nodes, code, -count)
    out = replace(setting, nodes=nodes, policy=changes.policy or setting.policy)
    cards, before = out.cards, setting.cards
    quotas = {
        code: tuple(
            _root(node, cards.get(code, 0) - before.get(code, 0))
            if node.parent is None
            else _limited(node, changes, code)
            for node in tree
        )
        for code, tree in setting.quotas.items()
    }
    return replace(out, quotas=quotas)


def _root(node: QuotaNode, more: int) -> QuotaNode:
    return (
        replace(node, guarantee=max(0, node.guarantee + 1000 * more)) if node.guarantee is not None else node
    )


def _limited(node: QuotaNode, changes: Changes, code: str) -> QuotaNode:
    new = changes.limits.get((node.id, code))
    if new is not None:
        if new.guarantee != KEEP:
            node = replace(node, guarantee=new.guarantee, own=None)
        if new.borrow != KEEP:
            node = replace(node, borrow_limit=new.borrow)
        if new.cap != KEEP:
            node = replace(node, hard_cap=new.cap)
    return node if changes.borrowing else replace(node, borrow_limit=0)


def _with(nodes: tuple[Node, ...], code: str) -> list[Node]:
    return [node for node in nodes if any(gpu.flavour == code for gpu in node.gpus)]


def _more(nodes: tuple[Node, ...], code: str, count: int) -> tuple[Node, ...]:
    """New nodes like the kind that there are most of; unchanged where no node has the flavour."""
    found = _with(nodes, code)
    if not found:
        return nodes
    size = Counter(len(node.gpus) for node in found).most_common(1)[0][0]
    like = next(node for node in found if len(node.gpus) == size)
    node_id = max(node.id for node in nodes)
    card_id = max((gpu.id for node in nodes for gpu in node.gpus), default=0)
    made = []
    for number in range(1, count + 1):
        cards = []
        for gpu in like.gpus:
            card_id += 1
            cards.append(replace(gpu, id=card_id, slices=() if not gpu.mig else _fresh(gpu.slices, card_id)))
        made.append(replace(like, id=node_id + number, name=f"{like.name}+{number}", gpus=tuple(cards)))
    return (*nodes, *made)


def _fresh(slices: tuple[Slice, ...], card_id: int) -> tuple[Slice, ...]:
    """Slices of a new card: numbers of their own, below those that the database gives."""
    return tuple(replace(one, id=-(card_id * 100 + n)) for n, one in enumerate(slices))


def _fewer(nodes: tuple[Node, ...], code: str, count: int) -> tuple[Node, ...]:
    """Without the newest nodes of the flavour."""
    gone = {node.id for node in sorted(_with(nodes, code), key=lambda node: -node.id)[:count]}
    return tuple(node for node in nodes if node.id not in gone)
