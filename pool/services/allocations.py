"""The life of an allocation: running when all its members run, stopping when it must end, ended when seen
free.

What people and rules ask (release, extend, revoke, reclaim) begins here; what executors confirm comes in by
``allocation_follow_members``. Closing (``allocation_finish``) is its own transaction, since it begins with
the usage rows. Every function may be called twice.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from django.db import transaction
from django.utils.formats import date_format
from django.utils.timezone import localtime
from django.utils.translation import gettext_lazy as _

from pool.locks import allocation_lock
from pool.models import Allocation, AllocationEvent, AllocationMember, Lease, QueueEntry, ReclaimCase
from pool.selectors.reclaim import closed_windows
from pool.services import ladder, stopping
from pool.services.closing import allocation_finish
from pool.services.handover import NOT_FREE, handover_refused
from pool.services.leases import leases_close
from pool.services.shrinking import members_close
from pool.transitions import LIVE, MEMBER_GONE, REQUEUE, climb, may, take
from portal.accounts.policy import policy_of
from portal.kernel.clock import now
from portal.kernel.errors import Blocked, Conflict, Invalid, Refused
from portal.kernel.models import advance
from portal.kernel.units import from_ms
from portal.ops.actor import Actor, system
from portal.ops.outbox import outbox_add
from portal.ops.services import audit_record
from quotas.engine.available import borrowed
from quotas.selectors.trees import quota_trees
from quotas.selectors.user_limits import limits_of
from quotas.services.extensions import extension_check
from quotas.services.lifecycle import request_event, request_started

A = Allocation.State
M = AllocationMember.State
EXECUTOR = system("executor", via="agent")
RETRIES = 3
"""So often a request whose start failed retryably goes back to its place in line."""
LONGEST_EXTENSION_S = 90 * 86400


# -- asked by people and rules ---------------------------------------------------------------------------


def allocation_release(*, acting_user: Actor, allocation: Allocation, reason: str = "") -> Allocation:
    """Give it back before its end: its holder, or a pool administrator."""
    if not acting_user.is_system and acting_user.user_id != allocation.holder_id:
        _require_admin(acting_user)
    return ladder.take_back(
        acting_user=acting_user, allocation_id=allocation.pk, cause=ReclaimCase.Cause.RELEASED, reason=reason
    )


def allocation_revoke(*, acting_user: Actor, allocation: Allocation, reason: str) -> Allocation:
    """Take it back at once; pool administrators, with a reason that its holder reads."""
    _require_admin(acting_user)
    if not reason.strip():
        raise Invalid.field("reason", _("Say why: the holder will read it."), code="reason_missing")
    return ladder.take_back(
        acting_user=acting_user,
        allocation_id=allocation.pk,
        cause=ReclaimCase.Cause.REVOKED,
        rule="administrator",
        reason=reason.strip(),
    )


def allocation_reclaim(
    *,
    acting_user: Actor,
    allocation: Allocation,
    cause: str,
    rule: str,
    grace_until: datetime | None = None,
    reason: str = "",
) -> ReclaimCase:
    """Begin the ladder: notice now, stop at ``grace_until`` (by the sweep). A second call keeps the earlier
    end.
    """
    left = (grace_until - now()).total_seconds() if grace_until is not None else 0.0
    return ladder.case_begin(
        acting_user=acting_user,
        allocation_id=allocation.pk,
        cause=cause,
        rule=rule,
        grace_s=max(0, round(left)),
        reason=reason,
    )


def allocation_extend(*, acting_user: Actor, allocation: Allocation, extra_s: int) -> Allocation:
    """Move the end by ``extra_s`` > 0 seconds: its holder, within their longest lease, while nobody
    entitled waits.
    """
    if not acting_user.is_system and acting_user.user_id != allocation.holder_id:
        raise Refused(code="forbidden", detail=_("Only its holder may extend it."))
    if not 0 < extra_s <= LONGEST_EXTENSION_S:
        raise Invalid.field("extra_s", _("Extend by between 1 second and 90 days."))
    with transaction.atomic():
        locked = allocation_lock(allocation.pk)
        if locked.state not in LIVE:
            raise Conflict(code="wrong_state", detail=_("It is ending already: ask again for capacity."))
        if locked.expires_at is None:
            raise Conflict(code="no_end", detail=_("It has no end that could be moved."))
        if ReclaimCase.objects.filter(allocation=locked, closed_at=None).exists():
            raise Conflict(
                code="being_reclaimed", detail=_("It is being taken back, so it cannot be extended.")
            )
        before, after = locked.expires_at, locked.expires_at + timedelta(seconds=extra_s)
        _check_longest(locked, after)
        _check_windows(locked, after)
        _check_approval(locked, after)
        _check_line(locked)
        advance(
            Allocation.objects.filter(pk=locked.pk),
            expires_at=after,
            extensions=min(locked.extensions + 1, 30000),
        )
        facts = {"extra_s": extra_s, "expires_at": after.isoformat(), "was": before.isoformat()}
        _note(locked, "extended", acting_user, facts)
        audit_record(
            acting_user=acting_user,
            action="allocation.extended",
            subject=locked,
            before={"expires_at": before.isoformat()},
            after={"expires_at": after.isoformat()},
        )
        outbox_add("pool.allocation_extended", {"allocation": str(locked.uid), **facts}, key=locked.ref)
        request_event(request_id=locked.request_id, kind="extended", facts=facts, actor_name=acting_user.name)
        locked.refresh_from_db()
        return locked


def allocations_suspend(*, user_uid: str, reason: str = "") -> int:
    """Stop all that a suspended person holds, with the usual grace; returns how many were stopped."""
    stopped = 0
    live = Allocation.objects.filter(holder__uid=user_uid, state__in=LIVE).order_by("id")
    for pk in live.values_list("pk", flat=True):
        try:
            ladder.take_back(
                acting_user=system("rules"),
                allocation_id=pk,
                cause=ReclaimCase.Cause.SUSPENDED,
                rule="user_suspended",
                reason=reason,
            )
        except Conflict:
            continue
        stopped += 1
    return stopped


def _check_approval(allocation: Allocation, expires_at: datetime) -> None:
    """Time after the end that was approved passes by itself only as far as the rules let such an ask pass."""
    request = allocation.request
    if request.duration_s is None:
        return
    approved = (allocation.started_at or allocation.reserved_at) + timedelta(seconds=request.duration_s)
    extension_check(request=request, beyond_s=int((expires_at - approved).total_seconds()))


def _check_windows(allocation: Allocation, expires_at: datetime) -> None:
    """Not into a maintenance window of one of its nodes."""
    closed = closed_windows()
    for member in allocation.members.filter(given_up_at=None).select_related("node").order_by("number"):
        for begins, ends in closed.get(member.node_id, ()):
            if from_ms(ends) > now() and expires_at > from_ms(begins):
                raise Conflict(
                    code="maintenance_ahead",
                    detail=_("{node} is out of service from {start}: it can be extended until then.").format(
                        node=member.node.name,
                        start=date_format(localtime(from_ms(begins)), "Y-m-d H:i"),
                    ),
                    extra={"node": member.node.name, "starts_at": from_ms(begins).isoformat()},
                )


def _check_longest(allocation: Allocation, expires_at: datetime) -> None:
    longest = limits_of(allocation.holder_id)["longest_lease_s"]
    begun = allocation.started_at or allocation.reserved_at
    asked = int((expires_at - begun).total_seconds())
    if longest is not None and asked > longest:
        raise Blocked(
            code="longest_lease",
            detail=_("Your longest lease is {hours} h.").format(hours=round(longest / 3600, 1)),
            blocking={"level": "user", "limit": longest, "used": 0, "requested": asked},
        )


def _check_line(allocation: Allocation) -> None:
    """Borrowed GPUs are not kept longer while a department waits for them within its own guarantee."""
    if allocation.flavour_id is None or allocation.flavour is None:
        return
    tree = quota_trees([allocation.flavour_id])[allocation.flavour_id]
    if borrowed(tree, allocation.department_id) == 0:
        return
    entitled = [
        entry.request.ref
        for entry in QueueEntry.objects.filter(
            request__flavour_id=allocation.flavour_id, request__state="queued"
        )
        .exclude(request__department_id=allocation.department_id)
        .exclude(reason="not_before")
        .select_related("request")
        .order_by("position", "request_id")[:200]
        if borrowed(tree, entry.request.department_id, entry.request.charge_milli) == 0
    ]
    if entitled:
        raise Conflict(
            code="others_wait",
            detail=_("These GPUs are borrowed, and their owners wait for them ({n} requests).").format(
                n=len(entitled)
            ),
            extra={"waiting": len(entitled)},
        )


def _require_admin(actor: Actor) -> None:
    if actor.is_system:
        return
    if actor.user is None or not policy_of(actor.user).administers_pool:
        raise Refused(code="forbidden", detail=_("Only its holder or a pool administrator may do this."))


# -- confirmed by executors ------------------------------------------------------------------------------


def allocation_follow_members(
    *,
    allocation_id: int,
    error: dict[str, Any] | None = None,
    failed_start: bool = False,
    busy: dict[str, Any] | None = None,
) -> None:
    """Let an allocation follow what its members' rows say. Runs in the reporter's transaction, idempotent.

    All run → running. One ended → the gang stops. All gone and seen free → it is closed after commit.
    """
    with transaction.atomic():
        allocation = allocation_lock(allocation_id)
        everybody = list(allocation.members.select_related("node__cluster").order_by("number"))
        members = [member for member in everybody if member.given_up_at is None]
        if busy:
            _note(allocation, "not_free_yet", EXECUTOR, {"busy": busy})
        if may("run", allocation.state) and all(member.state == M.RUNNING for member in members):
            _running(allocation, members)
        elif allocation.state in LIVE and any(member.state in MEMBER_GONE for member in members):
            _ended_by_itself(allocation, members, error, failed_start)
        elif allocation.state == A.ENDED:
            _late_free(everybody)
        if error and allocation.state in (A.STOPPING,) and not allocation.error_code:
            advance(
                Allocation.objects.filter(pk=allocation.pk),
                error_code=str(error.get("code") or "")[:64],
                error_detail=str(error.get("detail") or "")[:2000],
            )
        if not busy:  # else the sweep looks again in some seconds
            for member in everybody:
                if member.state == M.EXITED:
                    _look_after_commit(member)
        if allocation.state in LIVE and any(m.given_up_at and m.state == M.FREE for m in everybody):
            transaction.on_commit(lambda: members_close(allocation_id=allocation_id), robust=True)
        if members and all(member.state == M.FREE or member.fenced_at is not None for member in everybody):
            transaction.on_commit(lambda: allocation_finish(allocation_id=allocation_id), robust=True)


def _running(allocation: Allocation, members: list[AllocationMember]) -> None:
    at = max((member.started_at for member in members if member.started_at), default=now())
    duration = allocation.request.duration_s
    expires_at = allocation.expires_at
    if duration is not None and not allocation.extensions:
        expires_at = at + timedelta(seconds=duration)
        if allocation.request.end_at is not None:  # a reserved window ends at its time, however late it began
            expires_at = min(expires_at, allocation.request.end_at)
    take(
        allocation, "run", started_at=at, expires_at=expires_at, error_code="", error_detail="", retry_at=None
    )
    facts = {"nodes": [member.node.name for member in members]}
    _note(allocation, "running", EXECUTOR, facts)
    outbox_add(
        "pool.allocation_started",
        {"allocation": str(allocation.uid), "request": str(allocation.request.uid), **facts},
        key=allocation.ref,
    )
    request_id = allocation.request_id
    transaction.on_commit(lambda: request_started(request_id=request_id, facts=facts), robust=True)


def _ended_by_itself(
    allocation: Allocation, members: list[AllocationMember], error: dict[str, Any] | None, failed_start: bool
) -> None:
    """A member ended without being asked: the rest of the gang is stopped, whole."""
    first = next(member for member in members if member.state in MEMBER_GONE)
    good = not error and not failed_start and first.exit_code == 0
    again = bool(error and error.get("retryable")) and _tries(allocation) < RETRIES
    if good:
        reason = Allocation.EndReason.FINISHED
    elif failed_start:
        reason = Allocation.EndReason.START_FAILED
    else:
        reason = Allocation.EndReason.FAILED
    case = stopping.case_open(allocation)
    if case is not None and _gave_way(case, first):
        reason, again = Allocation.EndReason(stopping.END_REASONS[case.cause]), case.requeue
    take(
        allocation,
        "stop",
        end_reason=reason,
        end_rule=REQUEUE if again else "",
        stop_asked_at=now(),
        grace_until=now(),
        exit_code=first.exit_code,
        error_code=str((error or {}).get("code") or "")[:64],
        error_detail=str((error or {}).get("detail") or "")[:2000],
    )
    _note(allocation, "stopping", EXECUTOR, {"reason": reason, "exit_code": first.exit_code, "error": error})
    if case is not None:
        climb(case, "stop", stopped_at=now(), members=[])
    if failed_start and (error or {}).get("code") == NOT_FREE and (error or {}).get("gpus"):
        found, refused = dict((error or {})["gpus"]), [m.pk for m in members if m.state == M.EXITED]
        transaction.on_commit(lambda: _refused(allocation.pk, refused, found), robust=True)
    for member in members:
        if member.state not in MEMBER_GONE:
            stopping.order_stop_after_commit(
                member, grace_s=stopping.GANG_GRACE_S, signal=stopping.signal_of(allocation)
            )


def _gave_way(case: ReclaimCase, member: AllocationMember) -> bool:
    """Whether the end of a member is its answer to being taken back, and not an end of its own: after the
    checkpoint signal whatever its exit code says, after a command or a post only where it did not finish."""
    if case.step != ReclaimCase.Step.CHECKPOINT:
        return False
    return case.hook == ReclaimCase.Hook.SIGNAL or member.exit_code != 0


def _refused(allocation_id: int, member_ids: list[int], found: dict[str, Any]) -> None:
    for member_id in member_ids:
        if handover_refused(member_id=member_id, gpus=found):
            allocation_follow_members(allocation_id=allocation_id)


def _tries(allocation: Allocation) -> int:
    return Allocation.objects.filter(request_id=allocation.request_id, end_rule=REQUEUE).count()


def _late_free(members: list[AllocationMember]) -> None:
    """Cards of a lost node that were kept back after its allocation was closed: seen free at last."""
    for member in members:
        if member.state == M.FREE:
            rows = Lease.objects.filter(
                allocation_id=member.allocation_id, member=member.number, ended_at=None
            ).select_related("allocation")
            leases_close(leases=rows, at=member.seen_free_at or now())


def _look_after_commit(member: AllocationMember) -> None:
    transaction.on_commit(lambda: stopping.order_look(member), robust=True)


def _note(allocation: Allocation, kind: str, actor: Actor, facts: dict[str, Any]) -> None:
    AllocationEvent.objects.create(
        allocation=allocation, at=now(), kind=kind, actor_name=actor.name, facts=facts
    )
