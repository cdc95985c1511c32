"""Calling a checkpoint hook: a signal or a command on the nodes, or a signed post to an address.

Ordered after commit, by the case's uid: a hook that is called twice is called for the same checkpoint. What a
hook answers comes back through ``ladder.checkpoint_reported``.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import structlog
from django.db import transaction

from pool.executors.base import ExecutorFailure, TerminalFailure, executor_for
from pool.locks import allocation_lock
from pool.models import AgentCommand, Allocation, AllocationEvent, AllocationMember, ReclaimCase
from pool.services.commands import CHECKPOINT
from pool.services.hook_post import PostAnswer, hook_secret, post_hook
from portal.kernel.clock import now
from portal.kernel.models import advance
from portal.ops.outbox import outbox_add

log = structlog.get_logger(__name__)
M = AllocationMember.State
LOST_AFTER = timedelta(seconds=5)
POST_AGAIN = timedelta(seconds=90)
LONGEST_POST_S = 60.0
"""An address has so long to answer; one that needs longer answers 202 at once and its work is stopped at the
end of the grace."""


def members_of(allocation: Allocation, case: ReclaimCase) -> list[AllocationMember]:
    """The running members that a case is about, by rank."""
    rows = allocation.members.filter(state=M.RUNNING, given_up_at=None).select_related(
        "node__cluster", "allocation__request"
    )
    if case.members:
        rows = rows.filter(number__in=case.members)
    return list(rows.order_by("number"))


def members_due(allocation: Allocation, case: ReclaimCase) -> set[str]:
    """Ranks, as text, whose answer is waited for."""
    return {str(member.number) for member in members_of(allocation, case)}


def order_after_commit(*, allocation: Allocation, case: ReclaimCase, seconds: float) -> None:
    """Call the hook once the transaction stands."""
    if case.hook == ReclaimCase.Hook.URL:
        _post_soon(case)
        return
    members, order, pk = members_of(allocation, case), _order_of(allocation, case, seconds), case.pk
    transaction.on_commit(lambda: _order(pk, members, order), robust=True)


def _order_of(allocation: Allocation, case: ReclaimCase, seconds: float) -> dict[str, Any]:
    settings: dict[str, Any] = allocation.request.checkpoint or {}
    return {
        "case": str(case.uid),
        "kind": str(case.hook),
        "signal": str(settings.get("signal") or "SIGUSR1"),
        "run": str(settings.get("command") or "") if case.hook == ReclaimCase.Hook.COMMAND else "",
        "seconds": seconds,
    }


def _order(case_id: int, members: list[AllocationMember], order: dict[str, Any]) -> None:
    from pool.services.ladder import checkpoint_reported

    for member in members:
        try:
            executor_for(member.node.cluster).checkpoint(member=member, order=order)
        except TerminalFailure as error:
            if order["kind"] == ReclaimCase.Hook.SIGNAL:
                _signal_with_stop(case_id)
                return
            # Such a hook cannot be called there: said at once, in the work's history. It is stopped as if it had none.
            checkpoint_reported(case_id=case_id, member=member.number, ok=False, detail=error.detail)
        except ExecutorFailure as error:
            # The grace runs on; work that cannot be told is stopped at its end as if it had no hook.
            log.warning("checkpoint_not_ordered", member=member.pk, code=error.code)


def _signal_with_stop(case_id: int) -> None:
    """Where running work cannot be sent a signal (pods), the stop itself begins with it, with all its seconds: so the
    stop is due now, and counts as one that no hook went before (``stopping.hooked``)."""
    from pool.services.ladder import case_step

    with transaction.atomic():
        allocation_id = ReclaimCase.objects.values_list("allocation_id", flat=True).get(pk=case_id)
        allocation = allocation_lock(allocation_id)
        case = ReclaimCase.objects.get(pk=case_id)
        if case.step != ReclaimCase.Step.CHECKPOINT or case.checkpoint_done_at is not None:
            return
        at = now()
        advance(
            ReclaimCase.objects.filter(pk=case_id),
            checkpoint_result={**case.checkpoint_result, "with_stop": True},
            checkpoint_done_at=at,
        )
        AllocationEvent.objects.create(
            allocation=allocation,
            at=at,
            kind="checkpoint_with_stop",
            actor_name="rules",
            facts={"hook": case.hook},
        )
        transaction.on_commit(lambda: case_step(case_id=case_id), robust=True)


def _post_soon(case: ReclaimCase) -> None:
    """Have a worker of its own post it: an address may take its time."""
    with transaction.atomic():
        outbox_add("pool.checkpoint_due", {"case": str(case.uid)})


def hooks_repeat(at: datetime) -> int:
    """Call again what was lost between a step and its order (a worker that died); returns how many cases."""
    again = 0
    open_rows = ReclaimCase.objects.filter(
        closed_at=None,
        step=ReclaimCase.Step.CHECKPOINT,
        checkpoint_done_at=None,
        checkpoint_at__lt=at - LOST_AFTER,
        grace_until__gt=at,
    ).select_related("allocation__request")
    for case in open_rows.order_by("id")[:500]:
        if case.hook == ReclaimCase.Hook.URL:
            claimed = case.checkpoint_result.get("claimed_at")
            if claimed is None or datetime.fromisoformat(claimed) < at - POST_AGAIN:
                _post_soon(case)
                again += 1
            continue
        told = set(
            AgentCommand.objects.filter(
                allocation=case.allocation, kind=CHECKPOINT, payload__case=str(case.uid)
            ).values_list("member", flat=True)
        )
        told |= {int(name) for name in case.checkpoint_result if name.isdecimal()}
        lost = [member for member in members_of(case.allocation, case) if member.number not in told]
        if lost:
            left = (case.grace_until - at).total_seconds() if case.grace_until else 0.0
            _order(case.pk, lost, _order_of(case.allocation, case, left))
            again += 1
    return again


def post_checkpoint(*, case_id: int) -> PostAnswer | None:
    """Post a case's hook to its address now; None where there is nothing (more) to post.

    Claimed first, so that of two deliveries of the task one posts. The body names the work and how many seconds
    are left; the signature is made with the request's own secret.
    """
    at = now()
    with transaction.atomic():
        allocation_id = ReclaimCase.objects.values_list("allocation_id", flat=True).get(pk=case_id)
        allocation = allocation_lock(allocation_id)
        case = ReclaimCase.objects.get(pk=case_id)
        claimed = case.checkpoint_result.get("claimed_at")
        if case.step != ReclaimCase.Step.CHECKPOINT or case.hook != ReclaimCase.Hook.URL:
            return None
        if "all" in case.checkpoint_result or (
            claimed is not None and datetime.fromisoformat(claimed) > at - POST_AGAIN
        ):
            return None
        result = {**case.checkpoint_result, "claimed_at": at.isoformat()}
        advance(ReclaimCase.objects.filter(pk=case.pk), checkpoint_result=result)
    request = allocation.request
    left = max(1.0, (case.grace_until - at).total_seconds()) if case.grace_until else 1.0
    body = {
        "event": "checkpoint",
        "allocation": str(allocation.uid),
        "request": str(request.uid),
        "case": str(case.uid),
        "cause": str(case.cause),
        "seconds": int(left),
        "stop_at": case.grace_until.isoformat() if case.grace_until else None,
    }
    return post_hook(
        url=str((request.checkpoint or {}).get("url") or ""),
        secret=hook_secret(str(request.uid)),
        body=body,
        delivery=str(case.uid),
        timeout_s=min(left, LONGEST_POST_S),
    )
