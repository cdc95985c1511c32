"""What people decide about nodes: cordon, drain, maintenance, back to work. Each needs a reason and is audited."""

from __future__ import annotations

from datetime import datetime, timedelta

from django.db import transaction
from django.db.models import OuterRef, Subquery, Sum
from django.utils.translation import gettext_lazy as _

from pool.models import Allocation, AllocationMember, Node, ReclaimCase
from pool.services.capacity import capacity_refresh
from portal.accounts.policy import Policy, policy_of
from portal.kernel.clock import now
from portal.kernel.errors import Conflict, Invalid, Refused
from portal.kernel.models import advance
from portal.ops.actor import Actor
from portal.ops.outbox import outbox_add
from portal.ops.services import audit_record

DRAIN_RULE = "node_drain"


def require_pool_admin(actor: Actor, policy: Policy | None = None) -> None:
    """Refuse unless the installation itself or a pool administrator acts."""
    if actor.is_system:
        return
    if not (policy or policy_of(actor.user)).administers_pool:
        raise Refused(code="forbidden", detail=_("Only a pool administrator may do this."))


def _set(
    *, actor: Actor, node: Node, to: str, reason: str, action: str, until: datetime | None = None
) -> Node:
    require_pool_admin(actor)
    if not reason.strip():
        raise Invalid.field(
            "reason", _("Say why: people with work on this node will read it."), code="reason_missing"
        )
    with transaction.atomic():
        before = node.schedulable
        changed = advance(
            Node.objects.filter(pk=node.pk).exclude(schedulable__in=[to, Node.Schedulable.RETIRED]),
            schedulable=to,
            schedulable_reason=reason.strip(),
            schedulable_since=now(),
            schedulable_by_name=actor.name,
            maintenance_until=until,
        )
        if not changed:
            raise Conflict(code="node_state", detail=_("The node is in that state already, or is retired."))
        audit_record(
            acting_user=actor,
            action=action,
            subject=node,
            before={"schedulable": before},
            after={"schedulable": to, "until": until.isoformat() if until else None},
            reason=reason.strip(),
        )
        outbox_add("pool.node_state", {"node_uid": str(node.uid), "schedulable": to}, key=node.name)
        capacity_refresh()
    node.refresh_from_db()
    return node


def node_cordon(*, acting_user: Actor, node: Node, reason: str) -> Node:
    """Nothing new is placed here; what runs goes on."""
    return _set(
        actor=acting_user, node=node, to=Node.Schedulable.CORDONED, reason=reason, action="node.cordoned"
    )


def node_uncordon(*, acting_user: Actor, node: Node, reason: str) -> Node:
    """Back to work, also from draining or maintenance. Whoever was told to leave a drained node and is not stopped
    yet goes on."""
    from pool.services.ladder import case_withdraw

    with transaction.atomic():
        opened = _set(
            actor=acting_user, node=node, to=Node.Schedulable.OPEN, reason=reason, action="node.uncordoned"
        )
        elsewhere = AllocationMember.objects.filter(node__schedulable=Node.Schedulable.DRAINING)
        told = ReclaimCase.objects.filter(
            closed_at=None, rule=DRAIN_RULE, allocation__members__node=node
        ).exclude(allocation__in=elsewhere.values("allocation"))
        for case_id in told.order_by("allocation_id").values_list("pk", flat=True).distinct():
            case_withdraw(acting_user=acting_user, case_id=case_id, why="node_open_again")
    return opened


def node_maintenance(*, acting_user: Actor, node: Node, reason: str, until: datetime | None) -> Node:
    """Out of service until a time. Refused while work is on it: drain first."""
    if node_work(node):
        raise Conflict(
            code="node_has_work",
            detail=_("Work is still on this node. Drain it first, then start maintenance."),
        )
    if until is not None and until <= now():
        raise Invalid.field("until", _("The end lies in the past."))
    return _set(
        actor=acting_user,
        node=node,
        to=Node.Schedulable.MAINTENANCE,
        reason=reason,
        action="node.maintenance",
        until=until,
    )


def node_work(node: Node) -> list[Allocation]:
    """Open allocations with a part on this node, oldest first, each with the cores and the memory that it has here
    (``host_cpu_milli``, ``host_memory_mib``; 0 where none was asked for)."""
    here = AllocationMember.objects.filter(node=node)
    parts = here.filter(allocation=OuterRef("pk")).order_by().values("allocation")
    return list(
        Allocation.objects.filter(pk__in=here.values("allocation_id"))
        .annotate(
            host_cpu_milli=Subquery(parts.annotate(n=Sum("cpu_milli")).values("n")),
            host_memory_mib=Subquery(parts.annotate(n=Sum("memory_mib")).values("n")),
        )
        .exclude(state=Allocation.State.ENDED)
        .select_related("holder", "department", "flavour", "request")
        .order_by("id")
    )


def node_drain(*, acting_user: Actor, node: Node, reason: str, grace_s: int = 1800) -> list[Allocation]:
    """Take no new work and ask what runs here to end, with notice: each allocation is stopped after `grace_s`.

    Returns the allocations it touches. The stop itself goes the way of every reclaim
    (pool.services.allocations.allocation_reclaim).
    """
    from pool.services.allocations import allocation_reclaim

    if not 0 <= grace_s <= 7 * 86400:
        raise Invalid.field("grace_s", _("The grace lies between 0 s and 7 days."))
    with transaction.atomic():
        _set(actor=acting_user, node=node, to=Node.Schedulable.DRAINING, reason=reason, action="node.drained")
        touched = node_work(node)
        for allocation in touched:
            allocation_reclaim(
                acting_user=acting_user,
                allocation=allocation,
                cause="maintenance",
                rule=DRAIN_RULE,
                grace_until=now() + timedelta(seconds=grace_s),
                reason=reason,
            )
    return touched


def node_retire(*, acting_user: Actor, node: Node, reason: str) -> Node:
    """Out of the pool for good; its history stays. Refused while work is on it."""
    if node_work(node):
        raise Conflict(code="node_has_work", detail=_("Work is still on this node. Drain it first."))
    return _set(
        actor=acting_user, node=node, to=Node.Schedulable.RETIRED, reason=reason, action="node.retired"
    )
