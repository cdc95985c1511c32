"""What monitoring listens to in the outbox."""

from __future__ import annotations

from portal.ops.outbox import subscribe

subscribe("pool.agent_event", "monitoring.services.events.gpu_event_record")
for _topic in (
    "pool.allocation_reserved",
    "pool.allocation_started",
    "pool.allocation_stopping",
    "pool.allocation_ended",
    "pool.allocation_reclaim",
    "pool.allocation_extended",
):
    subscribe(_topic, "monitoring.services.pokes.allocation_changed")
subscribe("pool.node_state", "monitoring.services.pokes.node_changed")
subscribe("pool.gpu_condition", "monitoring.services.pokes.gpu_changed")
subscribe("pool.capacity_changed", "monitoring.services.pokes.capacity_changed")
