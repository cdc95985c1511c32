"""Taking single members of an elastic gang back: the rest goes on.

A member that is given up no longer decides about its allocation. When its cards were seen free, their part of
the quota, of the charge and the leases go, in one transaction and in the order of locks.
"""

from __future__ import annotations

from django.db import transaction
from django.db.models import Sum

from pool.locks import allocation_lock, lock_wait_limit
from pool.models import Allocation, AllocationEvent, AllocationMember, Lease, ReclaimCase
from pool.services import stopping
from pool.services.leases import leases_close
from pool.transitions import climb
from portal.kernel.clock import now
from portal.kernel.models import advance
from portal.ops.actor import Actor, system
from portal.ops.outbox import outbox_add
from portal.ops.services import audit_record
from quotas.services.usage import quota_release, usage_lock

SYSTEM = system("scheduler")
M = AllocationMember.State


def members_stop(*, acting_user: Actor, allocation: Allocation, case: ReclaimCase) -> bool:
    """Order the stop of a case's members alone. The caller holds the allocation's row."""
    at = now()
    if not climb(case, "stop", stop_sent_at=at):
        return False
    rows = allocation.members.filter(number__in=case.members, given_up_at=None)
    rows.update(given_up_at=at)
    members = list(allocation.members.filter(number__in=case.members).select_related("node__cluster"))
    facts = {"cause": case.cause, "rule": case.rule, "members": case.members}
    AllocationEvent.objects.create(
        allocation=allocation, at=at, kind="members_stopping", actor_name=acting_user.name, facts=facts
    )
    audit_record(
        acting_user=acting_user, action="allocation.members_stopped", subject=allocation, after=facts
    )
    outbox_add(
        "pool.reclaim_step",
        {"allocation": str(allocation.uid), "case": str(case.uid), "step": str(case.step), **facts},
        key=allocation.ref,
    )
    for member in members:
        if member.state not in (M.EXITED, M.FREE, M.LOST):
            stopping.order_stop_after_commit(member, grace_s=stopping.GRACE_S, signal="SIGTERM")
    return True


def members_close(*, allocation_id: int) -> int:
    """Close given-up members whose cards were seen free: leases, quota, charge. Returns how many; done twice,
    done once."""
    seen = Allocation.objects.filter(pk=allocation_id).first()
    if seen is None:
        return 0
    with transaction.atomic():
        lock_wait_limit()
        if seen.flavour_id is not None:
            usage_lock(department_id=seen.department_id, flavour_id=seen.flavour_id)
        allocation = allocation_lock(allocation_id)
        if allocation.state in (Allocation.State.STOPPING, Allocation.State.ENDED):
            return 0  # the whole is ending: it closes all that is left
        free = list(
            allocation.members.filter(given_up_at__isnull=False, state=M.FREE).values_list(
                "number", "seen_free_at"
            )
        )
        closed = 0
        for number, seen_free_at in free:
            rows = Lease.objects.filter(allocation=allocation, member=number, ended_at=None)
            charge = rows.aggregate(n=Sum("charge"))["n"] or 0
            if not leases_close(leases=rows.select_related("allocation"), at=seen_free_at or now()):
                continue
            closed += 1
            if allocation.quota_debited and allocation.flavour_id:
                quota_release(
                    department_id=allocation.department_id,
                    flavour_id=allocation.flavour_id,
                    charge_milli=charge,
                    interruptible=allocation.interruptible,
                )
            advance(
                Allocation.objects.filter(pk=allocation.pk), charge_milli=allocation.charge_milli - charge
            )
            allocation.refresh_from_db()
            AllocationEvent.objects.create(
                allocation=allocation,
                at=now(),
                kind="shrunk",
                actor_name=SYSTEM.name,
                facts={"member": number, "charge_milli": allocation.charge_milli},
            )
        if closed:
            _close_case(allocation)
            outbox_add(
                "pool.capacity_changed",
                {"allocation": str(allocation.uid), "closed": closed},
                key=allocation.ref,
            )
    return closed


def _close_case(allocation: Allocation) -> None:
    case = stopping.case_open(allocation)
    if case is None or not case.members:
        return
    left = allocation.members.filter(number__in=case.members).exclude(state=M.FREE)
    if not left.exists():
        at = now()
        climb(case, "free", closed_at=at, seen_free_at=at, stopped_at=case.stopped_at or at)
