"""Orders to executors, and the sweep that repeats what was lost: starts, stops, looks, closings.

Everything here may run twice and at any time: orders are idempotent by the allocation's uid, and what is
believed is only what executors report.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, cast

import structlog
from django.db import transaction
from django.db.models import Exists, OuterRef, Q

from pool.executors.base import (
    POLLED,
    WHOLE,
    Executor,
    ExecutorFailure,
    PolledExecutor,
    RetryableFailure,
    executor_for,
)
from pool.locks import allocation_lock
from pool.models import Allocation, AllocationEvent, AllocationMember, Gpu, Lease, ReclaimCase
from pool.services import stopping
from pool.services.allocations import allocation_follow_members
from pool.services.closing import allocation_finish
from pool.services.fencing import member_fence
from pool.transitions import MEMBER_GONE, REQUEUE, climb, take
from portal.kernel.clock import now
from portal.kernel.models import advance
from portal.ops.actor import system
from portal.ops.services import incident_open
from quotas.models import RequestEvent
from quotas.services.lifecycle import request_started

log = structlog.get_logger(__name__)
SYSTEM = system("executor")
A = Allocation.State
M = AllocationMember.State

BACKOFF_S = (5, 10, 20, 40, 60)
START_PATIENCE = timedelta(minutes=5)
"""A start that no node confirmed for so long goes back in line."""
FORGOTTEN = timedelta(seconds=5)
ESCALATE_AFTER = timedelta(seconds=60)
LOOK_AGAIN = timedelta(seconds=10)
NOT_FREE_INCIDENT = timedelta(minutes=5)


def allocation_start(*, allocation_id: int) -> bool:
    """Order the start of all members; False where there is nothing (more) to start.

    A retryable failure waits for the sweep; a terminal one ends the allocation, and its request with it.
    """
    with transaction.atomic():
        allocation = allocation_lock(allocation_id)
        if allocation.state == A.RESERVED:
            take(allocation, "start", start_attempts=allocation.start_attempts + 1, retry_at=None)
        elif allocation.state == A.STARTING:
            advance(
                Allocation.objects.filter(pk=allocation_id),
                start_attempts=min(30000, allocation.start_attempts + 1),
                retry_at=None,
            )
        else:
            return False
    for executor, members in _orders(allocation_id):
        try:
            _order_start(executor, members)
        except RetryableFailure as error:
            _start_later(allocation_id, error)
            return False
        except ExecutorFailure as error:
            if allocation.start_attempts == 1:
                _never_told(executor, members)
            _start_never(allocation_id, {"code": error.code, "detail": error.detail, "retryable": False})
            return False
    _stop_if_stopped_meanwhile(allocation_id)
    return True


def _orders(allocation_id: int) -> list[tuple[Executor, list[AllocationMember]]]:
    """Who must be told of which members, in the order of their numbers: one entry a cluster."""
    rows = (
        AllocationMember.objects.filter(allocation_id=allocation_id)
        .select_related(
            "node__cluster", "allocation__request", "allocation__holder", "allocation__department"
        )
        .order_by("number")
    )
    by_cluster: dict[int, list[AllocationMember]] = {}
    for member in rows:
        by_cluster.setdefault(member.node.cluster_id, []).append(member)
    return [
        (executor_for(members[0].node.cluster), members)
        for members in by_cluster.values()
        if any(member.state == M.RESERVED for member in members)
    ]


def _order_start(executor: Executor, members: list[AllocationMember]) -> None:
    """Order the members of one cluster. What goes to an outside system is noted before it goes: from then on it may
    run there, whatever answer comes back."""
    fresh = [member for member in members if member.state == M.RESERVED]
    if POLLED in executor.can:
        AllocationMember.objects.filter(pk__in=[member.pk for member in fresh]).update(ordered_at=now())
    if WHOLE in executor.can:
        cast(PolledExecutor, executor).start_whole(members=members)
        return
    for member in fresh:
        executor.start(member=member)


def _never_told(executor: Executor, members: list[AllocationMember]) -> None:
    """The first order of all was refused, so nothing of it is there."""
    if WHOLE in executor.can or len(members) == 1:
        AllocationMember.objects.filter(pk__in=[member.pk for member in members], state=M.RESERVED).update(
            ordered_at=None
        )


def _stop_if_stopped_meanwhile(allocation_id: int) -> None:
    """A stop that came between our look and our orders must reach the node after them."""
    row = Allocation.objects.get(pk=allocation_id)
    if row.state in (A.STOPPING, A.ENDED):
        for member in row.members.select_related("node__cluster", "allocation__request"):
            stopping.order_stop(member, grace_s=0)


def _start_later(allocation_id: int, error: ExecutorFailure) -> None:
    with transaction.atomic():
        allocation = allocation_lock(allocation_id)
        if allocation.state != A.STARTING:
            return
        pause = BACKOFF_S[min(allocation.start_attempts, len(BACKOFF_S)) - 1]
        advance(
            Allocation.objects.filter(pk=allocation_id),
            retry_at=now() + timedelta(seconds=pause),
            error_code=error.code[:64],
            error_detail=error.detail[:2000],
        )


def _start_never(allocation_id: int, error: dict[str, Any]) -> None:
    """No member was told to begin, or it makes no sense to: end it; told ones are stopped and looked at."""
    with transaction.atomic():
        allocation = allocation_lock(allocation_id)
        if allocation.state not in (A.RESERVED, A.STARTING):
            return
        at = now()
        take(
            allocation,
            "stop",
            end_reason=Allocation.EndReason.START_FAILED,
            end_rule=REQUEUE if error.get("retryable") else "",
            stop_asked_at=at,
            grace_until=at,
            error_code=str(error["code"])[:64],
            error_detail=str(error["detail"])[:2000],
        )
        AllocationEvent.objects.create(
            allocation=allocation, at=at, kind="start_failed", actor_name=SYSTEM.name, facts={"error": error}
        )
        case = stopping.case_open(allocation)
        if case is not None:  # it was to be taken back before it ran
            climb(case, "stop", stop_sent_at=at, members=[])
        for member in allocation.members.select_related("node__cluster"):
            if member.state == M.RESERVED and not _told(member):
                # Nothing ever reached the node: its cards are as free as they were when they were chosen.
                AllocationMember.objects.filter(pk=member.pk).update(
                    state=M.FREE, ended_at=at, seen_free_at=at
                )
            elif member.state not in MEMBER_GONE:
                stopping.order_stop_after_commit(member, grace_s=0, signal="SIGTERM")
        allocation_follow_members(allocation_id=allocation_id)


def _told(member: AllocationMember) -> bool:
    return (
        bool(member.external_id)
        or member.ordered_at is not None
        or member.allocation.commands.filter(member=member.number, kind="start").exists()
    )


def execution_reconcile(*, listening: datetime | None = None) -> dict[str, int]:
    """Repeat what was lost: one pass over what is open. Returns how often each was done.

    ``listening``: since when nodes could be heard here (None: always). A start that could not have been confirmed
    meanwhile is not given up for it.
    """
    done = {"starts": 0, "given_up": 0, "stops": 0, "looks": 0, "closed": 0, "told": 0}
    at = now()
    waiting = Q(state=A.RESERVED, state_since__lt=at - FORGOTTEN) | Q(state=A.STARTING, retry_at__lte=at)
    for pk in Allocation.objects.filter(waiting).order_by("id").values_list("pk", flat=True)[:500]:
        done["starts"] += allocation_start(allocation_id=pk)
    late = Allocation.objects.filter(state__in=[A.RESERVED, A.STARTING], reserved_at__lt=at - START_PATIENCE)
    if listening is not None and listening > at - START_PATIENCE:
        late = late.none()
    for row in late.order_by("id")[:200]:
        error = {
            "code": row.error_code or "start_not_confirmed",
            "detail": row.error_detail or "The node did not confirm the start.",
            "retryable": _may_try_again(row),
        }
        _start_never(row.pk, error)
        done["given_up"] += 1
    for row in Allocation.objects.filter(state=A.STOPPING).order_by("id")[:500]:
        for name, count in _push(row, at).items():
            done[name] += count
    done["told"] = _tell_started(at)
    done["looks"] += _look_at_fenced(at)
    return done


def _may_try_again(row: Allocation) -> bool:
    return Allocation.objects.filter(request_id=row.request_id, end_rule=REQUEUE).count() < 3


def _push(allocation: Allocation, at: datetime) -> dict[str, int]:
    """One stopping allocation: repeat its stop (hard after its grace), look at its cards, close it."""
    counts = {"stops": 0, "looks": 0, "closed": 0}
    members = list(
        allocation.members.select_related("node__cluster", "allocation__request").order_by("number")
    )
    if all(member.state == M.FREE or member.fenced_at is not None for member in members):
        counts["closed"] += allocation_finish(allocation_id=allocation.pk)
        return counts
    deadline = (allocation.grace_until or allocation.state_since) + ESCALATE_AFTER
    for member in members:
        if member.fenced_at is not None or member.state in (M.FREE, M.LOST):
            continue
        if member.state == M.EXITED:
            if (member.ended_at or at) <= at - LOOK_AGAIN:
                counts["looks"] += stopping.order_look(member)
                counts["closed"] += _not_free(member, at)
        elif at >= deadline:
            counts["stops"] += stopping.order_stop(member, grace_s=0, signal="SIGKILL")
            _escalate(allocation, at)
        elif (
            member.stop_ordered_at is None
            and not allocation.commands.filter(member=member.number, kind="stop").exists()
        ):
            hook_called = stopping.hooked(stopping.case_open(allocation))
            signal = "SIGTERM" if hook_called else stopping.signal_of(allocation)
            left = max(0.0, ((allocation.grace_until or at) - at).total_seconds())
            counts["stops"] += stopping.order_stop(member, grace_s=left, signal=signal)
    return counts


def _escalate(allocation: Allocation, at: datetime) -> None:
    advance(
        ReclaimCase.objects.filter(allocation=allocation, closed_at=None, escalated_at=None), escalated_at=at
    )


def _not_free(member: AllocationMember, at: datetime) -> bool:
    """Cards that do not become free are an incident. Where all of them are gone from the node, nothing can
    ever be seen there: the rest goes on without them, and they stay held. True where that was decided now."""
    if member.ended_at is None or member.ended_at >= at - NOT_FREE_INCIDENT:
        return False
    incident_open(
        kind="gpu_not_free",
        dedupe_key=f"not_free:{member.allocation.uid}:{member.number}",
        subject=member.allocation,
        facts={"node": member.node.name, "ended_at": member.ended_at.isoformat()},
    )
    left = Lease.objects.filter(allocation_id=member.allocation_id, member=member.number, ended_at=None)
    if not left.filter(gpu__condition=Gpu.Condition.VANISHED).exists():
        return False
    if left.exclude(gpu__condition=Gpu.Condition.VANISHED).filter(_not_seen_free(member)).exists():
        return False
    return member_fence(member_id=member.pk, allocation_id=member.allocation_id)


def _not_seen_free(member: AllocationMember) -> Q:
    return Q(gpu__seen_free_at=None) | Q(gpu__seen_free_at__lt=member.ended_at)


def _tell_started(at: datetime) -> int:
    """Requests whose start was confirmed but not told, because the process died in between."""
    told = RequestEvent.objects.filter(
        request_id=OuterRef("request_id"), kind="started", at__gte=OuterRef("reserved_at")
    )
    rows = Allocation.objects.filter(
        ~Exists(told),
        state=A.RUNNING,
        state_since__lt=at - FORGOTTEN,
        state_since__gt=at - timedelta(minutes=10),
    )
    return sum(request_started(request_id=row.request_id, facts={}) for row in rows)


def _look_at_fenced(at: datetime) -> int:
    """Nodes that came back after their work was given away: look at the cards that were kept back."""
    looks = 0
    members = AllocationMember.objects.filter(
        fenced_at__isnull=False, seen_free_at=None, node__health="ok"
    ).select_related("node__cluster", "allocation__request")
    for member in members.order_by("id")[:200]:
        looks += stopping.order_look(member)
    return looks
