"""What an executor confirmed of one member, written to its row. The allocation follows its members.

Each function locks nothing itself: the caller holds the allocation's and the member's rows. Each is
idempotent; a report that comes late (running after exited) changes nothing.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pool.models import AllocationEvent, AllocationMember, Gpu
from pool.services.allocations import allocation_follow_members
from pool.services.conditions import gpu_condition_set
from portal.kernel.clock import now
from portal.ops.actor import system

State = AllocationMember.State
AGENT = system("agent", via="agent")
NOT_FREE = "gpu_not_free"
FINDINGS = frozenset({"processes", "memory_in_use", "reset_required"})


def _follow(member: AllocationMember, **what: Any) -> None:
    """Let the allocation follow: running when all run, ending when one ended, ended when all were seen
    free."""
    allocation_follow_members(allocation_id=member.allocation_id, **what)


def _note(member: AllocationMember, kind: str, **facts: Any) -> None:
    AllocationEvent.objects.create(
        allocation_id=member.allocation_id,
        at=now(),
        kind=kind,
        actor_name="agent" if member.ordered_at is None else "executor",
        facts={"member": member.number, "node": member.node.name, **facts},
    )


def member_starting(*, member: AllocationMember) -> None:
    """The node has the order on its disk."""
    changed = AllocationMember.objects.filter(pk=member.pk, state=State.RESERVED).update(state=State.STARTING)
    if changed:
        _note(member, "member_starting")


def member_running(
    *, member: AllocationMember, at: datetime, pid: int | None, account: str, external_id: str = ""
) -> None:
    """The command runs; `external_id` is its name in an outside system."""
    changed = AllocationMember.objects.filter(
        pk=member.pk, state__in=[State.RESERVED, State.STARTING]
    ).update(
        state=State.RUNNING,
        started_at=at,
        pid=pid,
        account=account,
        external_id=external_id or str(pid or ""),
    )
    if changed:
        _note(member, "member_running", pid=pid, account=account)
        _follow(member)


def member_ended(
    *,
    member: AllocationMember,
    at: datetime,
    exit_code: int | None,
    signal: int | None,
    error: dict[str, Any] | None,
    failed_start: bool,
) -> None:
    """Nothing of the job is left on the node, or it never started. `error`: {code, detail, retryable} or
    None."""
    changed = (
        AllocationMember.objects.filter(pk=member.pk)
        .exclude(state__in=[State.EXITED, State.FREE])
        .update(
            state=State.EXITED,
            ended_at=at,
            exit_code=exit_code,
            exit_signal=signal if signal is not None and signal >= 0 else None,
        )
    )
    if changed:
        kind = "member_start_failed" if failed_start else "member_exited"
        _note(member, kind, exit_code=exit_code, signal=signal, error=error)
        if error and error.get("code") == NOT_FREE:
            _cards_not_free(member, error.get("gpus") or {})
        _follow(member, error=error, failed_start=failed_start)


def _cards_not_free(member: AllocationMember, found: dict[str, dict[str, Any]]) -> None:
    """Cards that the last look before the start found taken: nothing more is placed there until that is cleared."""
    for uuid, item in sorted(found.items()):
        gpu = Gpu.objects.filter(uuid=uuid, node=member.node, condition=Gpu.Condition.OK).first()
        if gpu is not None and item.get("reason") in FINDINGS:
            gpu_condition_set(
                acting_user=AGENT,
                gpu=gpu,
                condition=Gpu.Condition.SUSPECT,
                reason=f"{NOT_FREE}_{item.get('reason') or 'unknown'}"[:64],
                facts={"procs": item.get("procs") or []},
            )


def member_free(*, member: AllocationMember, at: datetime, found: dict[str, dict[str, Any]]) -> None:
    """The node looked at the member's cards: all free, or which are not and why ({uuid: {free, reason,
    procs}})."""
    busy = {uuid: item for uuid, item in found.items() if not item.get("free")}
    free = [uuid for uuid in found if uuid not in busy]
    Gpu.objects.filter(uuid__in=free, node=member.node).update(seen_free_at=at)
    if not busy:
        changed = AllocationMember.objects.filter(pk=member.pk, state__in=[State.EXITED, State.LOST]).update(
            state=State.FREE, seen_free_at=at
        )
        if changed:
            _note(member, "member_free")
    _follow(member, busy=busy)
