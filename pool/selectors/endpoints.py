"""Where a service answers now: its replicas that run, and what their health checks last said."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db.models import Q

from pool.models import Allocation, AllocationEvent, AllocationMember
from pool.selectors.pages import allocations_visible
from portal.accounts.policy import Policy
from quotas.models import CapacityRequest


@dataclass(frozen=True)
class Endpoint:
    """One replica. `healthy` is null where there is no check, or it was not asked yet."""

    replica: int
    allocation: str
    node: str
    address: str
    port: int | None
    healthy: bool | None
    since: datetime | None


def service_of(policy: Policy, uid: Any) -> CapacityRequest | None:
    """The request that serves (a service, or single work with a health check), where the person may see it."""
    seen = policy.reads.q("department_id") | Q(requester=policy.user)
    return CapacityRequest.objects.filter(seen, uid=uid).first()


def endpoints(policy: Policy, service: CapacityRequest) -> list[Endpoint]:
    """Its running replicas: healthy ones first, then by number. Two queries."""
    rows = list(
        allocations_visible(policy)
        .filter(Q(request=service) | Q(request__head=service), state=Allocation.State.RUNNING)
        .prefetch_related("members__node")
        .order_by("id")
    )
    last: dict[int, str] = {}
    events = AllocationEvent.objects.filter(allocation__in=rows, kind__in=("health_ok", "health_failed"))
    for allocation_id, kind in events.order_by("id").values_list("allocation_id", "kind"):
        last[allocation_id] = kind
    port = (service.health or {}).get("port")
    found = []
    for row in rows:
        member: AllocationMember | None = next(iter(row.members.all()), None)
        if member is None:
            continue
        told = last.get(row.pk)
        found.append(
            Endpoint(
                replica=row.request.member_index or 0,
                allocation=str(row.uid),
                node=member.node.name,
                address=member.node.address or member.node.hostname,
                port=port,
                healthy=None if told is None else told == "health_ok",
                since=row.started_at,
            )
        )
    return sorted(found, key=lambda one: ({True: 0, None: 1, False: 2}[one.healthy], one.replica))
