"""Nodes as the pool takes them: the report of each card as agents send it.

Where fewer cards can be given out than there are and nobody says which is ill, the highest ones that no lease holds
are left out, so that the numbers are right and no running work is called lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pool.executors.base import Found
from pool.executors.kubernetes.nodes import Card, SeenNode
from pool.models import Lease

MARK = "gpupool:"
"""Begins the reason of whatever this pool closed there, as the services expect it."""


def as_found(nodes: Sequence[SeenNode]) -> list[Found]:
    """All nodes, in their order."""
    ill = {node.name for node in nodes if node.missing and node.cards and not node.hami and not node.dra}
    held: set[str] = set()
    if ill:
        rows = Lease.objects.filter(gpu__node__name__in=ill, ended_at=None)
        held = set(rows.values_list("gpu__uuid", flat=True))
    return [_found(node, held if node.name in ill else set()) for node in nodes]


def _found(node: SeenNode, held: set[str]) -> Found:
    cards = None if node.cards is None else _offered(node, node.cards, held)
    closed = node.reason or (
        f"{MARK} {node.cordoned.removeprefix(MARK).strip()}" if node.cordoned is not None else ""
    )
    return Found(
        name=node.name,
        facts={
            "kubernetes": {
                "uid": node.uid,
                "sharing": node.sharing,
                "replicas": node.replicas,
                "hami": node.hami,
                "dra": node.dra,
                "mig_strategy": node.mig_strategy,
                "mig_config": node.mig_config,
                "mig_state": node.mig_state,
                "allocatable": node.allocatable,
                "notes": [list(note) for note in node.notes],
            },
            "driver": node.driver,
            "cuda": node.cuda,
        },
        up=node.ready,
        open=not closed,
        reason=closed,
        gpus=None if cards is None else tuple(_report(card) for card in cards),
        cpu_milli=node.cpu_milli,
        memory_mib=node.memory_mib,
        address=node.address,
        labels=node.labels,
    )


def _offered(node: SeenNode, cards: Sequence[Card], held: set[str]) -> list[Card]:
    out = list(cards)
    left = -(-node.missing // node.replicas) if node.sharing != "none" else node.missing
    if node.hami or node.dra:
        return out
    for card in sorted(cards, key=lambda one: -one.index):
        if left and not card.mig and card.uuid not in held:
            out.remove(card)
            left -= 1
    return out


def _report(card: Card) -> dict[str, Any]:
    return {
        "uuid": card.uuid,
        "index": card.index,
        "name": card.name,
        "memory_mib": card.memory_mib,
        "mig": {
            "enabled": card.mig,
            "slices": [
                {
                    "uuid": one.uuid,
                    "profile": one.profile,
                    "gi": position,
                    "ci": 0,
                    "start": one.start,
                    "size": one.size,
                    "memory_mib": one.memory_mib,
                }
                for position, one in enumerate(card.slices)
            ],
        },
    }
