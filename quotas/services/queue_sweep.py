"""What time does to the queue: series move on, reviews come due, deadlines pass. Safe to run twice."""

from __future__ import annotations

from datetime import timedelta

from django.db import transaction

from portal.kernel.clock import now
from portal.ops.outbox import outbox_add
from quotas.models import CapacityRequest
from quotas.services.dependencies import dependencies_sweep
from quotas.services.history import note_event
from quotas.services.locks import request_lock
from quotas.services.scaling import reviews_sweep
from quotas.services.series import series_sweep

S = CapacityRequest.State
DEADLINE_LOST = "deadline_lost"
BATCH = 500


def queue_sweep() -> dict[str, int]:
    """One pass over all that waits; returns how many of each were done."""
    done = series_sweep()
    done |= {f"review_{name}": count for name, count in reviews_sweep().items()}
    done["settled"] = dependencies_sweep()
    done["deadlines_lost"] = deadlines_sweep()
    return done


def deadlines_sweep() -> int:
    """Say once that a deadline cannot be met any more, even if the work began now. It stays in line: its
    requester decides.
    """
    moment = now()
    rows = CapacityRequest.objects.filter(
        state=S.QUEUED, deadline_at__isnull=False, duration_s__isnull=False
    ).exclude(events__kind=DEADLINE_LOST)
    told = 0
    for row in rows.order_by("deadline_at", "pk")[:BATCH]:
        if row.deadline_at is None or row.duration_s is None:
            continue
        if moment + timedelta(seconds=row.duration_s) > row.deadline_at:
            told += _lost(row.pk)
    return told


def _lost(request_id: int) -> int:
    with transaction.atomic():
        held = request_lock(request_id)
        if held.state != S.QUEUED or held.deadline_at is None or held.duration_s is None:
            return 0
        deadline = held.deadline_at.isoformat()
        if held.events.filter(kind=DEADLINE_LOST, facts__deadline_at=deadline).exists():
            return 0
        end = now() + timedelta(seconds=held.duration_s)
        facts = {"deadline_at": deadline, "earliest_end": end.isoformat()}
        note_event(request_id=held.pk, kind=DEADLINE_LOST, actor_name="queue", facts=facts)
        outbox_add("quotas.deadline_lost", {"request": str(held.uid), **facts}, key=held.ref)
        return 1
