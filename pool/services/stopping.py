"""Ending an allocation: the stop and its case, and the orders to executors that follow after commit."""

from __future__ import annotations

from datetime import datetime, timedelta

import structlog
from django.db import transaction
from django.utils.translation import gettext_lazy as _

from pool.executors.base import POLLED, ExecutorFailure, executor_for
from pool.locks import allocation_lock
from pool.models import Allocation, AllocationEvent, AllocationMember, ReclaimCase
from pool.services.closing import allocation_finish
from pool.transitions import LIVE, REQUEUE, climb, take
from portal.kernel.clock import now
from portal.kernel.errors import Conflict
from portal.ops.actor import Actor
from portal.ops.outbox import outbox_add
from portal.ops.services import audit_record

log = structlog.get_logger(__name__)
GRACE_S = 30
GANG_GRACE_S = 10
MAX_GRACE_S = 3600
END_REASONS: dict[str, str] = {
    ReclaimCase.Cause.EXPIRED: Allocation.EndReason.EXPIRED,
    ReclaimCase.Cause.RELEASED: Allocation.EndReason.RELEASED,
    ReclaimCase.Cause.REVOKED: Allocation.EndReason.REVOKED,
    ReclaimCase.Cause.SUSPENDED: Allocation.EndReason.SUSPENDED,
    ReclaimCase.Cause.NODE_LOST: Allocation.EndReason.NODE_LOST,
    ReclaimCase.Cause.PREEMPTED: Allocation.EndReason.PREEMPTED,
    ReclaimCase.Cause.IDLE: Allocation.EndReason.IDLE,
    ReclaimCase.Cause.OVER_QUOTA: Allocation.EndReason.OVER_QUOTA,
    ReclaimCase.Cause.MAINTENANCE: Allocation.EndReason.MAINTENANCE,
}
BACK_IN_LINE = frozenset(
    {
        ReclaimCase.Cause.NODE_LOST,
        ReclaimCase.Cause.PREEMPTED,
        ReclaimCase.Cause.MAINTENANCE,
        ReclaimCase.Cause.OVER_QUOTA,
    }
)
"""Causes that are nobody's wish to end the work: its request goes back to its old place in line."""


def stop(
    *,
    acting_user: Actor,
    allocation_id: int,
    cause: str,
    rule: str = "",
    reason: str = "",
    grace_s: int | None = None,
) -> Allocation:
    """Order the end: state stopping, its case, and a stop to every member that still lives.

    The stop carries the checkpoint signal and its seconds, unless a hook was called before it. Conflict
    where it is ending already (with the same words for all who come second).
    """
    at = now()
    with transaction.atomic():
        allocation = allocation_lock(allocation_id)
        if allocation.state not in LIVE:
            raise Conflict(
                code="wrong_state",
                detail=_("It is ending already."),
                extra={"state": str(allocation.state)},
            )
        case = case_open(allocation)
        hook_called = hooked(case)
        grace = (GRACE_S if hook_called else grace_of(allocation)) if grace_s is None else grace_s
        # Reserved means that no worker has begun to order the start: that happens under this row's lock too.
        begun = allocation.state != Allocation.State.RESERVED
        take(
            allocation,
            "stop",
            end_reason=END_REASONS[cause],
            end_rule=REQUEUE if cause in BACK_IN_LINE else rule,
            stop_asked_at=at,
            grace_until=at + timedelta(seconds=grace),
        )
        if case is None:
            ReclaimCase.objects.create(
                allocation=allocation,
                cause=cause,
                rule=rule,
                text=reason,
                by_name=acting_user.name,
                requeue=cause in BACK_IN_LINE,
                step=ReclaimCase.Step.STOPPING,
                noticed_at=at,
                grace_until=at,
                stop_sent_at=at,
            )
        else:
            climb(case, "stop", stop_sent_at=at, members=[], requeue=cause in BACK_IN_LINE)
        facts = {"cause": cause, "rule": rule, "grace_s": grace}
        AllocationEvent.objects.create(
            allocation=allocation,
            at=at,
            kind="stopping",
            actor_name=acting_user.name,
            facts=facts,
            text=reason,
        )
        audit_record(
            acting_user=acting_user,
            action="allocation.stopped",
            subject=allocation,
            after={"state": "stopping", **facts},
            reason=reason,
        )
        outbox_add(
            "pool.allocation_stopping",
            {"allocation": str(allocation.uid), "holder_id": allocation.holder_id, "reason": reason, **facts},
            key=allocation.ref,
        )
        if begun:
            for member in allocation.members.select_related("node__cluster").order_by("number"):
                # A lost node gets the order when it is back: what still runs there must not go on.
                if member.state not in (AllocationMember.State.EXITED, AllocationMember.State.FREE):
                    order_stop_after_commit(
                        member, grace_s=grace, signal="SIGTERM" if hook_called else signal_of(allocation)
                    )
        else:
            never_begun(allocation, at)
    return allocation


def never_begun(allocation: Allocation, at: datetime) -> None:
    """No order ever left for a node: the cards are as free as they were when they were chosen."""
    allocation.members.filter(state=AllocationMember.State.RESERVED).update(
        state=AllocationMember.State.FREE, ended_at=at, seen_free_at=at
    )
    pk = allocation.pk
    transaction.on_commit(lambda: allocation_finish(allocation_id=pk), robust=True)


def grace_of(allocation: Allocation) -> int:
    """Seconds between the stop signal and the kill: what the checkpoint needs, else the default."""
    asked = (allocation.request.checkpoint or {}).get("seconds")
    return max(0, min(MAX_GRACE_S, int(asked))) if isinstance(asked, int | float) else GRACE_S


def signal_of(allocation: Allocation) -> str:
    """The signal that a stop begins with where no hook was called before."""
    return str((allocation.request.checkpoint or {}).get("signal") or "SIGTERM")


def hooked(case: ReclaimCase | None) -> bool:
    """Whether a checkpoint hook was called before the stop, which then need not carry the signal and its seconds."""
    return case is not None and case.checkpoint_at is not None and not case.checkpoint_result.get("with_stop")


def case_open(allocation: Allocation) -> ReclaimCase | None:
    """The case that takes this allocation back now, or None."""
    return ReclaimCase.objects.filter(allocation=allocation, closed_at=None).first()


def order_stop_after_commit(member: AllocationMember, *, grace_s: float, signal: str) -> None:
    """Order the stop of one member once the transaction stands."""
    transaction.on_commit(lambda: order_stop(member, grace_s=grace_s, signal=signal), robust=True)


def order_stop(member: AllocationMember, *, grace_s: float, signal: str = "SIGTERM") -> bool:
    """Order it now; False where the executor could not take it (the sweep tries again)."""
    try:
        executor = executor_for(member.node.cluster)
        executor.stop(member=member, grace_s=grace_s, signal=signal)
    except ExecutorFailure as error:
        log.warning("stop_not_ordered", member=member.pk, code=error.code)
        return False
    if POLLED in executor.can:  # the agent's order is a row of its own
        AllocationMember.objects.filter(pk=member.pk).update(stop_ordered_at=now())
    return True


def order_look(member: AllocationMember) -> bool:
    """Ask whether the member's cards are free; False where the executor could not take it."""
    try:
        executor_for(member.node.cluster).release(member=member)
    except ExecutorFailure as error:
        log.warning("look_not_ordered", member=member.pk, code=error.code)
        return False
    return True
