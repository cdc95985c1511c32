"""Which card or slice a UUID of a node's message means. One cache of the whole pool per process, read again every
30 s, or at once (but at most every 2 s) when a UUID is not known."""

from __future__ import annotations

import time
from collections.abc import Set
from dataclasses import dataclass, field
from threading import Lock

from pool.models import Gpu, MigSlice

TTL_S = 30.0
MISS_PAUSE_S = 2.0


@dataclass
class NodeIdentity:
    """UUIDs of one node. `slots`: MIG UUID → (card id, slot); slot = GPU instance + 1, as instance 0 exists."""

    gpus: dict[str, int] = field(default_factory=dict)
    slots: dict[str, tuple[int, int]] = field(default_factory=dict)


@dataclass
class _Pool:
    loaded_at: float
    nodes: dict[int, NodeIdentity] = field(default_factory=dict)


_NOBODY = NodeIdentity()
_pool: _Pool | None = None
_lock = Lock()


def node_identity(node_id: int, *, need: Set[str] = frozenset()) -> NodeIdentity:
    """The identity of a node's cards, read again when one of `need` is not known."""
    with _lock:
        pool = _pool
        found = pool.nodes.get(node_id, _NOBODY) if pool else _NOBODY
        age = time.monotonic() - pool.loaded_at if pool else TTL_S
        unknown = not need <= found.gpus.keys() | found.slots.keys() if need else False
        if pool is not None and age < (MISS_PAUSE_S if unknown else TTL_S):
            return found
        return _load().nodes.get(node_id, _NOBODY)


def _load() -> _Pool:
    """Two queries for the whole pool, whatever the number of nodes."""
    global _pool
    fresh = _Pool(loaded_at=time.monotonic())
    for uuid, gpu_id, node_id in Gpu.objects.values_list("uuid", "id", "node_id"):
        fresh.nodes.setdefault(node_id, NodeIdentity()).gpus[uuid] = gpu_id
    slices = MigSlice.objects.filter(gone_at=None)
    for uuid, gpu_id, instance, node_id in slices.values_list(
        "uuid", "gpu_id", "gpu_instance", "gpu__node_id"
    ):
        fresh.nodes.setdefault(node_id, NodeIdentity()).slots[uuid] = (gpu_id, instance + 1)
    _pool = fresh
    return fresh


def identity_forget() -> None:
    """Forget what is cached (tests)."""
    global _pool
    with _lock:
        _pool = None
