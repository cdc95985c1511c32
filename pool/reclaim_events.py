"""What the reclaim ladder listens to in the outbox. Handlers are idempotent: delivery is at least once."""

from __future__ import annotations

from typing import Any

from pool.services.keeps import keeps_settle
from pool.services.ladder import displacements_settle
from pool.services.surplus import surplus_settle
from portal.ops.outbox import subscribe
from quotas.models import CapacityRequest


def request_left(payload: dict[str, Any]) -> None:
    """Who waited left, or started: its victims that have not stopped go on, and nothing is kept for it."""
    found = CapacityRequest.objects.filter(uid=payload["request"]).values_list("pk", flat=True).first()
    if found is not None:
        displacements_settle(request_id=found)
        keeps_settle(request_id=found)


def limits_changed(payload: dict[str, Any]) -> None:
    """A quota was raised: what was to be taken back because of it may stay."""
    surplus_settle()


subscribe("quotas.request_withdrawn", "pool.reclaim_events.request_left")
subscribe("pool.allocation_reserved", "pool.reclaim_events.request_left")
subscribe("quotas.limits_changed", "pool.reclaim_events.limits_changed")
