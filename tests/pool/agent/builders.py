"""Rows that a job needs before an agent can be told to run it."""

from __future__ import annotations

from typing import Any

from django.contrib.auth import get_user_model
from django.db import transaction

from pool.executors.base import executor_for
from pool.models import Allocation, AllocationLog, AllocationMember, Gpu, Lease, Node
from portal.accounts.models import Department
from portal.kernel.clock import now
from quotas.models import CapacityRequest


def allocation(
    node: Node, command: str = "true", gpus: list[Gpu] | None = None, account: str = "nobody", **request: Any
) -> AllocationMember:
    """A reserved allocation of one member with whole cards; its request runs `command`."""
    person, _ = get_user_model().objects.get_or_create(
        username="ming", defaults={"display_name": "Ming", "system_account": account}
    )
    department, _ = Department.objects.get_or_create(code="vision", defaults={"name": "Vision"})
    gpus = gpus or []
    values: dict[str, Any] = {
        "requester": person,
        "department": department,
        "shape": "whole" if gpus else "cpu",
        "gpus_per_node": len(gpus),
        "state": "allocated",
        "command": command,
    }
    asked = CapacityRequest.objects.create(**(values | request))
    made = Allocation.objects.create(
        request=asked, holder=person, department=department, charge_milli=1000 * len(gpus), state="starting"
    )
    member = AllocationMember.objects.create(allocation=made, number=0, node=node)
    for gpu in gpus:
        Lease.objects.create(allocation=made, gpu=gpu, charge=1000, started_at=now())
    return member


def start(member: AllocationMember) -> None:
    """Order the start as the allocation's services do."""
    with transaction.atomic():
        executor_for(member.node.cluster).start(member=member)


def stop(member: AllocationMember, grace_s: float = 10) -> None:
    with transaction.atomic():
        executor_for(member.node.cluster).stop(member=member, grace_s=grace_s)


def state(member: AllocationMember) -> str:
    member.refresh_from_db()
    return str(member.state)


def output(member: AllocationMember) -> str:
    """What arrived of the member's output, in order."""
    rows = AllocationLog.objects.filter(allocation=member.allocation, member=member.number).order_by("offset")
    return "".join(rows.values_list("data", flat=True))
