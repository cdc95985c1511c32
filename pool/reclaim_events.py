"""What the reclaim ladder listens to in the outbox. Handlers are idempotent: delivery is at least once."""

from __future__ import annotations

from typing import Any

from django.db import transaction

from pool.models import ReclaimCase
from pool.services.keeps import keeps_settle
from pool.services.ladder import displacements_settle
from pool.services.surplus import surplus_settle
from pool.tasks import checkpoint_call
from portal.ops.outbox import subscribe
from quotas.models import CapacityRequest


def request_left(payload: dict[str, Any]) -> None:
    """Who waited left, or started: its victims that have not stopped go on, and nothing is kept for it."""
    found = CapacityRequest.objects.filter(uid=payload["request"]).values_list("pk", flat=True).first()
    if found is not None:
        displacements_settle(request_id=found)
        keeps_settle(request_id=found)


def checkpoint_due(payload: dict[str, Any]) -> None:
    """A checkpoint address is to be called: by a task, after this is committed."""
    found = ReclaimCase.objects.filter(uid=payload["case"]).values_list("pk", flat=True).first()
    if found is not None:
        transaction.on_commit(lambda: checkpoint_call.apply_async((found,), retry=False), robust=True)


def limits_changed(payload: dict[str, Any]) -> None:
    """A quota was raised: what was to be taken back because of it may stay."""
    surplus_settle()


subscribe("quotas.request_withdrawn", "pool.reclaim_events.request_left")
subscribe("pool.allocation_reserved", "pool.reclaim_events.request_left")
subscribe("pool.checkpoint_due", "pool.reclaim_events.checkpoint_due")
subscribe("quotas.limits_changed", "pool.reclaim_events.limits_changed")
