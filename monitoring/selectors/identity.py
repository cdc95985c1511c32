"""Which card or slice a UUID of a node's message means. One cache of the whole pool per process, read again every
30 s; a node with a UUID that is not known is read at once (but at most every 2 s)."""

from __future__ import annotations

import time
from collections.abc import Set
from dataclasses import dataclass, field
from threading import Lock

from pool.models import Gpu, MigSlice, Node

TTL_S = 30.0
MISS_PAUSE_S = 2.0


@dataclass
class NodeIdentity:
    """UUIDs of one node. `slots`: MIG UUID → (card id, slot); slot = GPU instance + 1, as instance 0 exists.

    `skew_ms`: how far the node's clock is ahead, as its agent's last greeting showed; 0 where that is not known.
    """

    gpus: dict[str, int] = field(default_factory=dict)
    slots: dict[str, tuple[int, int]] = field(default_factory=dict)
    skew_ms: int = 0


@dataclass
class _Pool:
    loaded_at: float
    nodes: dict[int, NodeIdentity] = field(default_factory=dict)
    missed_at: dict[int, float] = field(default_factory=dict)


_NOBODY = NodeIdentity()
_pool: _Pool | None = None
_lock = Lock()


def node_identity(node_id: int, *, need: Set[str] = frozenset()) -> NodeIdentity:
    """The identity of a node's cards, read again when one of `need` is not known."""
    with _lock:
        moment = time.monotonic()
        pool = _pool
        if pool is None or moment - pool.loaded_at >= TTL_S:
            pool = _load()
        found = pool.nodes.get(node_id, _NOBODY)
        unknown = not need <= found.gpus.keys() | found.slots.keys() if need else False
        if unknown and moment - pool.missed_at.get(node_id, -MISS_PAUSE_S) >= MISS_PAUSE_S:
            # Just enrolled, or a card or layout that is new: what it reports now must not be lost.
            pool.missed_at[node_id] = moment
            found = pool.nodes[node_id] = _read(node_id).get(node_id, NodeIdentity())
        return found


def _load() -> _Pool:
    """The whole pool anew."""
    global _pool
    _pool = _Pool(loaded_at=time.monotonic(), nodes=_read(None))
    return _pool


def _read(node_id: int | None) -> dict[int, NodeIdentity]:
    """Three queries, for one node or for all."""
    nodes: dict[int, NodeIdentity] = {}
    gpus, slices = Gpu.objects.all(), MigSlice.objects.filter(gone_at=None)
    if node_id is not None:
        gpus, slices = gpus.filter(node_id=node_id), slices.filter(gpu__node_id=node_id)
    for uuid, gpu_id, where in gpus.values_list("uuid", "id", "node_id"):
        nodes.setdefault(where, NodeIdentity()).gpus[uuid] = gpu_id
    for uuid, gpu_id, instance, where in slices.values_list("uuid", "gpu_id", "gpu_instance", "gpu__node_id"):
        nodes.setdefault(where, NodeIdentity()).slots[uuid] = (gpu_id, instance + 1)
    skewed = Node.objects.filter(pk__in=[node_id]) if node_id is not None else Node.objects.all()
    for where, skew in skewed.values_list("id", "clock_skew_ms"):
        if skew is not None and where in nodes:
            nodes[where].skew_ms = skew
    return nodes


def identity_forget() -> None:
    """Forget what is cached (tests)."""
    global _pool
    with _lock:
        _pool = None
