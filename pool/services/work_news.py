"""What agents tell of running work between its start and its end: health of services, memory over a share. Kept in the
allocation's history; who holds it is told."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.db import transaction

from pool.models import Allocation, AllocationEvent, AllocationMember
from portal.kernel.clock import now
from portal.ops.outbox import outbox_add

KINDS = {"health", "over_share"}


def work_news(payload: dict[str, Any]) -> None:
    """Subscriber of `pool.agent_event`: about an allocation of that very node, or nothing."""
    kind, data = str(payload.get("kind") or ""), payload.get("data") or {}
    if kind not in KINDS:
        return
    try:
        uid, number = UUID(str(data.get("allocation"))), int(data.get("member") or 0)
    except (ValueError, TypeError):
        return
    member = (
        AllocationMember.objects.filter(allocation__uid=uid, number=number, node__uid=payload.get("node_uid"))
        .exclude(allocation__state=Allocation.State.ENDED)
        .select_related("allocation", "node")
        .first()
    )
    if member is None:
        return
    kept = {"member": number, "node": member.node.name}
    if kind == "health":
        event = "health_ok" if data.get("ok") is True else "health_failed"
        kept |= {"why": str(data.get("why") or "")[:300]}
    else:
        event = "over_share"
        told = data.get("used_mib")
        used = list(told.values()) if isinstance(told, dict) else []
        kept |= {
            "used_mib": max((n for n in used if isinstance(n, int)), default=0),
            "limit_mib": int(data.get("limit_mib") or 0),
            "policy": "stop" if data.get("policy") == "stop" else "notice",
        }
    moment = str(payload.get("at") or "")
    with transaction.atomic():
        again = AllocationEvent.objects.filter(
            allocation=member.allocation, kind=event, facts__told_at=moment, facts__member=number
        )
        if again.exists():
            return
        AllocationEvent.objects.create(
            allocation=member.allocation,
            at=now(),
            kind=event,
            actor_name="agent",
            facts=kept | {"told_at": moment},
        )
        if event == "over_share":
            outbox_add("pool.over_share", {"allocation": str(uid), **kept, "told_at": moment}, key=str(uid))


def replica_healthy(allocation: Allocation, member: int = 0) -> bool:
    """What was last told of a replica; one without a check, or not asked yet, counts as well."""
    last = (
        AllocationEvent.objects.filter(
            allocation=allocation, kind__in=("health_ok", "health_failed"), facts__member=member
        )
        .order_by("-id")
        .values_list("kind", flat=True)
        .first()
    )
    return last != "health_failed"
