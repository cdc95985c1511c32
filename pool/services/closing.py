"""Closing an allocation whose cards were all seen free, or whose lost nodes were fenced.

Its own transaction, in the order of locks: usage rows (quota released), request (ended or back in line),
allocation, leases. Cards of a fenced node stay held (lease and spans open, so nothing can be placed there)
until they are seen free; what they cost stops at the node's last sign of life.
"""

from __future__ import annotations

from datetime import datetime

from django.db import transaction

from pool.locks import allocation_lock, lock_wait_limit
from pool.models import Allocation, AllocationEvent, AllocationMember, Lease, ReclaimCase
from pool.services.leases import leases_close, usage_close
from pool.transitions import REQUEUE, climb, take
from portal.kernel.clock import now
from portal.ops.actor import system
from portal.ops.outbox import outbox_add
from portal.ops.services import audit_record, incident_resolve
from quotas.models import CapacityRequest
from quotas.services.lifecycle import request_ended, request_requeued
from quotas.services.locks import request_lock
from quotas.services.usage import quota_release, usage_lock

SYSTEM = system("scheduler")
M = AllocationMember.State


def allocation_finish(*, allocation_id: int) -> bool:
    """Close it; False where that was done already or members are not through yet."""
    seen = Allocation.objects.filter(pk=allocation_id).first()
    if seen is None or seen.state == Allocation.State.ENDED:
        return False
    with transaction.atomic():
        lock_wait_limit()
        if seen.flavour_id is not None:
            usage_lock(department_id=seen.department_id, flavour_id=seen.flavour_id)
        request = request_lock(seen.request_id)
        allocation = allocation_lock(allocation_id)
        members = list(allocation.members.select_related("node").order_by("number"))
        if allocation.state != Allocation.State.STOPPING or not all(map(_through, members)):
            return False
        at = now()
        _close_leases(allocation, members, at)
        if allocation.quota_debited and allocation.quota_released_at is None and allocation.flavour_id:
            quota_release(
                department_id=allocation.department_id,
                flavour_id=allocation.flavour_id,
                charge_milli=allocation.charge_milli,
                interruptible=allocation.interruptible,
            )
        take(allocation, "end", ended_at=at, quota_released_at=at)
        _close_case(allocation, members, at)
        for member in members:
            key = f"not_free:{allocation.uid}:{member.number}"
            if member.state == M.FREE:
                incident_resolve(dedupe_key=key, note="seen free")
        facts = {"reason": allocation.end_reason, "exit_code": allocation.exit_code}
        AllocationEvent.objects.create(
            allocation=allocation, at=at, kind="ended", actor_name=SYSTEM.name, facts=facts
        )
        audit_record(
            acting_user=SYSTEM,
            action="allocation.ended",
            subject=allocation,
            after={"state": "ended", **facts},
        )
        again = (
            allocation.end_rule == REQUEUE
            and request.state == CapacityRequest.State.ALLOCATED
            and request.run_kind != CapacityRequest.RunKind.ADOPTED  # nobody here could begin it again
            and request.let_go_at is None  # given up by its series, which asked for another where it goes on
        )
        if again:
            request_requeued(request_id=request.pk, reason=allocation.end_reason, facts=_error(allocation))
        else:
            request_ended(
                request_id=request.pk, reason=allocation.end_reason, facts={**facts, **_error(allocation)}
            )
        outbox_add(
            "pool.allocation_ended",
            {
                "allocation": str(allocation.uid),
                "request": str(request.uid),
                "holder_id": allocation.holder_id,
                "requeued": again,
                **facts,
            },
            key=allocation.ref,
        )
    return True


def _through(member: AllocationMember) -> bool:
    return member.state == M.FREE or member.fenced_at is not None


def _error(allocation: Allocation) -> dict[str, str]:
    return (
        {"error": allocation.error_code, "detail": allocation.error_detail} if allocation.error_code else {}
    )


def _close_leases(allocation: Allocation, members: list[AllocationMember], at: datetime) -> None:
    by_number = {member.number: member for member in members}
    for lease in Lease.objects.filter(allocation=allocation, ended_at=None).select_related("allocation"):
        member = by_number.get(lease.member)
        if member is None or member.state == M.FREE:
            leases_close(leases=[lease], at=(member.seen_free_at if member else None) or at)
        else:
            # A lost node's work is charged up to its last sign of life, an ended one's up to its end.
            known = member.node.last_heartbeat_at if member.state == M.LOST else member.ended_at
            usage_close(lease=lease, at=known or at)


def _close_case(allocation: Allocation, members: list[AllocationMember], at: datetime) -> None:
    case = ReclaimCase.objects.filter(allocation=allocation, closed_at=None).first()
    if case is None:
        return
    stopped = max((member.ended_at for member in members if member.ended_at), default=at)
    free = all(member.state == M.FREE for member in members)
    climb(
        case,
        "free" if free else "fence",
        closed_at=at,
        stopped_at=case.stopped_at or stopped,
        seen_free_at=at if free else None,
    )
