"""Which card or slice a UUID of a node's message means. Cached per process, read again when one is not known."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from threading import Lock

from pool.models import Gpu, MigSlice

TTL_S = 30.0
MISS_PAUSE_S = 2.0


@dataclass
class NodeIdentity:
    """UUIDs of one node. `slots`: MIG UUID → (card id, slot); slot = GPU instance + 1, as instance 0 exists."""

    loaded_at: float
    gpus: dict[str, int] = field(default_factory=dict)
    slots: dict[str, tuple[int, int]] = field(default_factory=dict)


_cache: dict[int, NodeIdentity] = {}
_lock = Lock()


def node_identity(node_id: int, *, need: set[str] = frozenset()) -> NodeIdentity:  # type: ignore[assignment]
    """The identity of a node's cards. When one of `need` is not known it is read again, at most every 2 s."""
    found = _cache.get(node_id)
    age = time.monotonic() - found.loaded_at if found else TTL_S
    unknown = bool(found and not need <= found.gpus.keys() | found.slots.keys())
    if found is not None and age < (MISS_PAUSE_S if unknown else TTL_S):
        return found
    fresh = NodeIdentity(loaded_at=time.monotonic())
    fresh.gpus = dict(Gpu.objects.filter(node_id=node_id).values_list("uuid", "id"))
    fresh.slots = {
        uuid: (gpu_id, instance + 1)
        for uuid, gpu_id, instance in MigSlice.objects.filter(gpu__node_id=node_id, gone_at=None).values_list(
            "uuid", "gpu_id", "gpu_instance"
        )
    }
    with _lock:
        _cache[node_id] = fresh
    return fresh


def identity_forget(node_id: int | None = None) -> None:
    """Forget what is cached of a node, or of all."""
    with _lock:
        if node_id is None:
            _cache.clear()
        else:
            _cache.pop(node_id, None)
