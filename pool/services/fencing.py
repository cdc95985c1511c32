"""Fencing: going on without a part of an allocation whose cards cannot be looked at (node lost, card gone).

The request and the quota are set free; the cards stay held, so that nothing is placed there until they were
seen free.
"""

from __future__ import annotations

from django.db import transaction

from pool.locks import allocation_lock
from pool.models import AllocationEvent, AllocationMember
from pool.services.allocations import allocation_follow_members
from portal.kernel.clock import now
from portal.ops.actor import system

SYSTEM = system("node watch")
M = AllocationMember.State


def member_fence(*, member_id: int, allocation_id: int) -> bool:
    """Count a lost or ended member as through; False where that was done already or it is not in that
    state.
    """
    with transaction.atomic():
        allocation = allocation_lock(allocation_id)
        changed = AllocationMember.objects.filter(
            pk=member_id, state__in=[M.LOST, M.EXITED], fenced_at=None
        ).update(fenced_at=now())
        if not changed:
            return False
        AllocationEvent.objects.create(
            allocation=allocation, at=now(), kind="fenced", actor_name=SYSTEM.name, facts={}
        )
        allocation_follow_members(allocation_id=allocation_id)
    return True
