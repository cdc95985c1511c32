"""Row locks of this room, always in this order: usage rows (quotas), request (quotas), allocation, GPUs by
id.

Who holds an allocation's row never asks for a usage row or a request: what must follow there is done after
commit, in a transaction that begins with them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from django.db import connection, transaction
from django.utils.translation import gettext_lazy as _

from pool.models import Allocation, Cluster, Gpu, Node
from portal.kernel.errors import NotFound
from quotas.models import GpuFlavour

WAIT_MS = 5000
JUDGED = (
    "uid", "uuid", "node", "flavour", "index", "memory_mib", "mig_enabled", "condition", "condition_reason", "cordoned",
    "foreign_use",
)  # fmt: skip
"""What decides about a card, and names it."""


def _in_transaction() -> None:
    if not transaction.get_connection().in_atomic_block:
        raise RuntimeError("row locks need a transaction")


def lock_wait_limit(milliseconds: int = WAIT_MS) -> None:
    """Wait at most so long for each further lock of this transaction."""
    _in_transaction()
    with connection.cursor() as cursor:
        cursor.execute("SELECT set_config('lock_timeout', %s, true)", [f"{milliseconds}ms"])


def allocation_lock(allocation_id: int) -> Allocation:
    """Lock one allocation."""
    row = allocations_lock([allocation_id]).get(allocation_id)
    if row is None:
        raise allocation_unknown()
    return row


def allocation_unknown() -> NotFound:
    """The error of an allocation that is not there."""
    return NotFound(code="allocation_unknown", detail=_("There is no such allocation."))


def allocations_lock(allocation_ids: Iterable[int]) -> dict[int, Allocation]:
    """Lock allocations by id; returns those that exist."""
    _in_transaction()
    rows = (
        Allocation.objects.select_for_update(of=("self",), no_key=True)
        .select_related("holder", "department", "flavour", "request")
        .filter(pk__in=sorted(set(allocation_ids)))
        .order_by("pk")
    )
    return {row.pk: row for row in rows}


def gpus_lock(gpu_ids: Iterable[int]) -> dict[int, Gpu]:
    """Lock cards by id; returns those that exist, as far as `JUDGED` goes (the rest is read when asked for), with
    their nodes.
    """
    _in_transaction()
    cards = list(
        Gpu.objects.select_for_update(of=("self",), no_key=True)
        .filter(pk__in=sorted(set(gpu_ids)))
        .only(*JUDGED)
        .order_by("pk")
    )
    # Many cards share few nodes: each is read, and made an object, once.
    nodes = nodes_judged({card.node_id for card in cards})
    flavours = GpuFlavour.objects.in_bulk({card.flavour_id for card in cards if card.flavour_id is not None})
    for card in cards:
        card.node = nodes[card.node_id]
        if card.flavour_id is not None:
            card.flavour = flavours[card.flavour_id]
    return {card.pk: card for card in cards}


def nodes_judged(node_ids: Collection[int]) -> dict[int, Node]:
    """Nodes by id, as far as it decides about them and names them, with their cluster and site."""
    nodes = Node.objects.only("name", "cluster", "schedulable", "health").in_bulk(node_ids)
    clusters = Cluster.objects.select_related("site").in_bulk({node.cluster_id for node in nodes.values()})
    for node in nodes.values():
        node.cluster = clusters[node.cluster_id]
    return nodes
