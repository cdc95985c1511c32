"""What happens to a request after its approval, told by the pool. All calls are idempotent: told twice, done
once.

Each returns whether anything changed. They run inside the caller's transaction where there is one, so that a
lease and its request's state stand or fall together. Lock order: usage rows, request.
"""

from __future__ import annotations

from typing import Any

from django.db import transaction

from portal.kernel.clock import now
from portal.kernel.models import advance
from portal.ops.actor import system
from portal.ops.outbox import outbox_add
from portal.ops.services.audit import audit_record
from quotas.models import CapacityRequest
from quotas.services.history import note_event
from quotas.services.locks import request_lock
from quotas.services.user_limits import gpus_at_once_check, running_room_check
from quotas.transitions import move

S = CapacityRequest.State
SCHEDULER = "scheduler"


def request_allocated(
    *, request_id: int, charge_milli: int | None = None, facts: dict[str, Any] | None = None
) -> bool:
    """The scheduler reserved GPUs for it: as many as asked, or ``charge_milli`` of an elastic one. Conflict unless it
    is queued; Blocked where the person's own limit on GPUs at once would be passed.
    """
    with transaction.atomic():
        request = request_lock(request_id)
        if request.state == S.ALLOCATED:
            return False
        gpus_at_once_check(
            user_id=request.requester_id,
            charge_milli=request.charge_milli if charge_milli is None else charge_milli,
            but_not=request.pk,
        )
        running_room_check(user_id=request.requester_id)
        move(request, "allocate")
        _tell(request, "allocated", facts)
        audit_record(
            acting_user=system(SCHEDULER),
            action="request.allocated",
            subject=request,
            before={"state": S.QUEUED},
            after={"state": S.ALLOCATED, **(facts or {})},
        )
        return True


def request_started(*, request_id: int, facts: dict[str, Any] | None = None) -> bool:
    """The node confirmed that the work runs."""
    with transaction.atomic():
        request = request_lock(request_id)
        last = request.events.order_by("-id").filter(kind__in=["started", "allocated"]).first()
        if request.state != S.ALLOCATED or (last is not None and last.kind == "started"):
            return False
        advance(CapacityRequest.objects.filter(pk=request.pk))
        _tell(request, "started", facts)
        return True


def request_ended(*, request_id: int, reason: str, facts: dict[str, Any] | None = None) -> bool:
    """Its leases are closed; ``reason`` is a stable code (expired, released, completed, failed, revoked,
    …).
    """
    with transaction.atomic():
        request = request_lock(request_id)
        if request.state == S.ENDED:
            return False
        move(request, "end", ended_at=now(), end_reason=reason[:32])
        _tell(request, "ended", {"reason": reason, **(facts or {})})
        audit_record(
            acting_user=system(SCHEDULER),
            action="request.ended",
            subject=request,
            before={"state": S.ALLOCATED},
            after={"state": S.ENDED, "reason": reason},
        )
        outbox_add("quotas.request_ended", {"request": str(request.uid), "reason": reason}, key=request.ref)
        return True


def request_requeued(*, request_id: int, reason: str, facts: dict[str, Any] | None = None) -> bool:
    """Back into the queue at its old place (node lost, preempted): ``queued_at`` stays."""
    with transaction.atomic():
        request = request_lock(request_id)
        if request.state == S.QUEUED:
            return False
        move(request, "requeue")
        _tell(request, "requeued", {"reason": reason, **(facts or {})})
        audit_record(
            acting_user=system(SCHEDULER),
            action="request.requeued",
            subject=request,
            before={"state": S.ALLOCATED},
            after={"state": S.QUEUED, "reason": reason},
        )
        outbox_add("quotas.request_queued", {"request": str(request.uid), "cause": reason}, key=request.ref)
        return True


def request_event(
    *, request_id: int, kind: str, facts: dict[str, Any] | None = None, actor_name: str = SCHEDULER
) -> None:
    """A line of its history that changes no state (extended, warned, moved up, checkpoint …)."""
    with transaction.atomic():
        note_event(request_id=request_id, kind=kind[:32], actor_name=actor_name, facts=facts)


def _tell(request: CapacityRequest, kind: str, facts: dict[str, Any] | None) -> None:
    note_event(request_id=request.pk, kind=kind, actor_name=SCHEDULER, facts=facts)
