"""The end of leases: warnings once per threshold, expiry always, and the end of a reclaim's notice.

Safe to run at any time, twice, and after a missed night: what was said is a row, and of several thresholds
that passed unseen only the last is told.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from django.db import transaction
from django.db.models import Exists, OuterRef

from pool.locks import allocation_lock
from pool.models import Allocation, AllocationEvent, ReclaimCase
from pool.services.ladder import ladder_sweep, take_back
from pool.transitions import LIVE
from portal.kernel.clock import now
from portal.kernel.errors import Conflict
from portal.ops.actor import system
from portal.ops.outbox import outbox_add

SYSTEM = system("rules")
THRESHOLDS_S = (3 * 86400, 86400, 3600, 600)
WARNED = "expiry_warning"


def leases_sweep() -> dict[str, int]:
    """Stop what is over, warn what is near its end; returns how many of each."""
    at = now()
    done = {"expired": 0, "reclaimed": 0, "warned": 0}
    # Those whose hook was called for their end already are the ladder's.
    begun = ReclaimCase.objects.filter(
        allocation=OuterRef("pk"), closed_at=None, cause=ReclaimCase.Cause.EXPIRED
    )
    live = Allocation.objects.filter(~Exists(begun), state__in=LIVE)
    for pk in live.filter(expires_at__lte=at).order_by("expires_at", "id").values_list("pk", flat=True):
        done["expired"] += _expire(pk)
    done["reclaimed"] = ladder_sweep()["stopped"]
    for pk in warnings_due(at):
        done["warned"] += expiry_warn(allocation_id=pk, at=at)
    return done


def _expire(allocation_id: int) -> bool:
    """End what is over; False where it is ending already."""
    try:
        take_back(
            acting_user=SYSTEM, allocation_id=allocation_id, cause=ReclaimCase.Cause.EXPIRED, rule="lease_end"
        )
    except Conflict:
        return False
    return True


def warnings_due(at: datetime) -> list[int]:
    """Allocations that passed a threshold which was not told yet: two queries, however many leases are
    near.
    """
    near = Allocation.objects.filter(
        state__in=LIVE, expires_at__gt=at, expires_at__lte=at + timedelta(seconds=max(THRESHOLDS_S))
    ).order_by("expires_at", "id")
    passed: dict[int, tuple[str, int]] = {}
    for allocation in near:
        threshold = _passed(allocation, at)
        if threshold is not None and allocation.expires_at is not None:
            passed[allocation.pk] = (allocation.expires_at.isoformat(), threshold)
    told = AllocationEvent.objects.filter(allocation_id__in=passed, kind=WARNED)
    for allocation_id, facts in told.values_list("allocation_id", "facts"):
        due = passed.get(allocation_id)
        if due is not None and facts.get("expires_at") == due[0] and facts.get("threshold_s", 0) <= due[1]:
            del passed[allocation_id]
    return list(passed)


def _passed(allocation: Allocation, at: datetime) -> int | None:
    """The smallest threshold that the time left has passed, or None."""
    if allocation.expires_at is None:
        return None
    left = (allocation.expires_at - at).total_seconds()
    return min((seconds for seconds in thresholds_for(allocation) if left <= seconds), default=None)


def thresholds_for(allocation: Allocation) -> list[int]:
    """The thresholds that make sense for a lease: those below half of its whole time, largest first."""
    if allocation.expires_at is None:
        return []
    begun = allocation.started_at or allocation.reserved_at
    whole = (allocation.expires_at - begun).total_seconds()
    return [seconds for seconds in THRESHOLDS_S if seconds * 2 <= whole]


def expiry_warn(*, allocation_id: int, at: datetime) -> bool:
    """Say once, per threshold and end, that it will end; True where something new was said."""
    with transaction.atomic():
        allocation = allocation_lock(allocation_id)
        if allocation.state not in LIVE or allocation.expires_at is None or allocation.expires_at <= at:
            return False
        threshold = _passed(allocation, at)
        if threshold is None:
            return False
        end = allocation.expires_at.isoformat()
        told = AllocationEvent.objects.filter(
            allocation=allocation, kind=WARNED, facts__expires_at=end, facts__threshold_s__lte=threshold
        )
        if told.exists():
            return False
        facts = {"threshold_s": threshold, "expires_at": end}
        AllocationEvent.objects.create(
            allocation=allocation, at=at, kind=WARNED, actor_name=SYSTEM.name, facts=facts
        )
        outbox_add(
            "pool.lease_expiring",
            {
                "allocation": str(allocation.uid),
                "ref": allocation.ref,
                "request": str(allocation.request.uid),
                "holder_id": allocation.holder_id,
                **facts,
            },
            key=allocation.ref,
        )
    return True
