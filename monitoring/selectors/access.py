"""Who may see what of the pool's telemetry. One rule for pages, API and sockets.

The wall, and the measures of every card, are open to everybody who is signed in. Who holds a card, its processes
and the live page of an allocation follow the lease: its holder, and those who read its department.
"""

from __future__ import annotations

from uuid import UUID

from django.utils.translation import gettext_lazy as _

from pool.models import Allocation, Gpu, Lease, Node
from portal.accounts.policy import Policy
from portal.kernel.errors import NotFound

Key = tuple[int, int]


def may_see_holding(policy: Policy, *, holder_id: int, department_id: int | None) -> bool:
    """Whether the reader may know who holds a lease and what runs on it."""
    return holder_id == getattr(policy.user, "pk", None) or department_id in policy.reads


def allocation_for(policy: Policy, uid: UUID) -> Allocation:
    """The allocation, or `NotFound` for one that does not exist or is not the reader's to see."""
    found = Allocation.objects.select_related("holder", "department", "flavour").filter(uid=uid).first()
    if found is None or not may_see_holding(
        policy, holder_id=found.holder_id, department_id=found.department_id
    ):
        raise NotFound(code="not_found", detail=_("There is no such allocation here."))
    return found


def gpu_for(policy: Policy, uid: UUID) -> Gpu:
    """The card; any person who is signed in may see its measures."""
    policy.require(getattr(policy.user, "is_authenticated", False))
    found = Gpu.objects.select_related("node__cluster__site", "flavour").filter(uid=uid).first()
    if found is None:
        raise NotFound(code="not_found", detail=_("There is no such GPU here."))
    return found


def node_for(policy: Policy, uid: UUID) -> Node:
    """The node; any person who is signed in may see its measures."""
    policy.require(getattr(policy.user, "is_authenticated", False))
    found = Node.objects.select_related("cluster__site").filter(uid=uid).first()
    if found is None:
        raise NotFound(code="not_found", detail=_("There is no such node here."))
    return found


def lease_keys(allocation: Allocation) -> list[Key]:
    """(card id, slot) of an allocation's leases, in order of member and card index."""
    rows = (
        Lease.objects.filter(allocation=allocation)
        .order_by("member", "gpu__node__name", "gpu__index", "id")
        .values_list("gpu_id", "mig_slice__gpu_instance")
    )
    return list(dict.fromkeys((gpu, 0 if instance is None else instance + 1) for gpu, instance in rows))


def topic_keys(policy: Policy, kind: str, uid: UUID) -> list[Key]:
    """(card id, slot) that a live topic is about, in the order in which they are shown.

    Raises `NotFound` for what the reader may not follow. Kinds: gpu, node, allocation.
    """
    if kind == "allocation":
        return lease_keys(allocation_for(policy, uid))
    if kind == "gpu":
        return [(gpu_for(policy, uid).pk, 0)]
    return [(pk, 0) for pk in node_for(policy, uid).gpus.order_by("index", "id").values_list("pk", flat=True)]
