"""A placed allocation that nobody has ordered to start yet: queued, then planned by a real cycle."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from pool.models import Allocation, AllocationMember
from pool.services.cycle import schedule_cycle
from portal.accounts.models import Department, User
from quotas.models import GpuFlavour
from tests.pool import builders


def reserved(
    team: Department, flavour: GpuFlavour | None, gpus: int = 1, who: User | None = None, **values: Any
) -> Allocation:
    """The allocation of a new request, in state reserved."""
    request = builders.queued(team, flavour, gpus, who, **values)
    with patch("pool.tasks.start_allocation.apply_async"):
        schedule_cycle()
    return Allocation.objects.select_related("request").get(request=request)


def only_member(allocation: Allocation) -> AllocationMember:
    """Its one member with all that an executor reads."""
    return AllocationMember.objects.select_related(
        "node__cluster", "allocation__request", "allocation__holder", "allocation__department"
    ).get(allocation=allocation)
