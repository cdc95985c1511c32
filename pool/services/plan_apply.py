"""Carry out a plan: each placement in a transaction of its own, judged again under locks, all or nothing.

Lock order: usage rows root to leaf (inside ``quota_debit``), request, then the cards by id. A placement
that does not hold any more (quota, state of the request, a card that turned bad, an overlap) is left out
and noted; the next cycle decides about it again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from operator import attrgetter
from typing import Any
from uuid import UUID

import structlog
from django.db import DatabaseError, IntegrityError, transaction
from django.utils.translation import gettext_lazy as _

from pool.engine.model import Member, Place
from pool.locks import gpus_lock, lock_wait_limit, nodes_judged
from pool.models import Allocation, AllocationEvent, AllocationMember, Gpu, Node, QueueEntry, SchedulerCycle
from pool.selectors.planner_nodes import gpu_blocked, node_blocked
from pool.services.leases import leases_open
from portal.kernel.bulk import ids_take, values_copy
from portal.kernel.clock import now
from portal.kernel.errors import Conflict, DomainError
from portal.ops.actor import Actor, system
from portal.ops.outbox import outbox_add
from portal.ops.services import audit_record
from quotas.models import CapacityRequest
from quotas.services.lifecycle import request_allocated
from quotas.services.usage import quota_debit

log = structlog.get_logger(__name__)
SCHEDULER = system("scheduler")
BUILT = (
    "id", "uid", "request_id", "holder_id", "department_id", "flavour_id", "charge_milli", "quota_debited",
    "interruptible", "priority", "reserved_at", "state_since", "expires_at", "cycle_id",
)  # fmt: skip
"""What ``allocation_build`` says of an allocation; all else has its default."""


@dataclass(frozen=True, slots=True)
class Applied:
    """What became of one placement: the allocation, or the code why it was left out."""

    request_id: int
    allocation: Allocation | None
    refusal: str = ""


def place_apply(
    *,
    place: Place,
    request: CapacityRequest,
    flavour_id: int | None,
    cycle: SchedulerCycle | None = None,
    acting_user: Actor = SCHEDULER,
) -> Applied:
    """Turn one placement into an allocation with leases, or say why not. Nothing is half written."""
    try:
        with transaction.atomic():
            return Applied(request.pk, place_write(place, request, flavour_id, cycle, acting_user))
    except DomainError as error:
        refusal = error.code
    except IntegrityError as error:
        refusal = _constraint(error)
    except DatabaseError as error:
        # A lock that did not come in time, or a deadlock that chose us: the next cycle tries again.
        refusal = f"database_{type(error).__name__.lower()}"
    log.info("placement_refused", request=request.pk, refusal=refusal)
    return Applied(request.pk, None, refusal)


def place_write(
    place: Place,
    request: CapacityRequest,
    flavour_id: int | None,
    cycle: SchedulerCycle | None,
    actor: Actor,
    *,
    uid: UUID | None = None,
    unmark: Callable[[Mapping[int, Gpu]], None] | None = None,
) -> Allocation:
    """As ``place_apply``, in the caller's transaction, which a refusal must end. ``uid``: the allocation's, where it is
    known already; ``unmark`` is called with the locked cards before they are judged.
    """
    lock_wait_limit()
    if flavour_id is not None and place.charge_milli:
        quota_debit(
            department_id=request.department_id,
            flavour_id=flavour_id,
            charge_milli=place.charge_milli,
            interruptible=request.interruptible,
        )
    nodes = nodes_judged({member.node_id for member in place.members})
    names = [nodes[member.node_id].name for member in place.members if member.node_id in nodes]
    fresh = request_allocated(
        request_id=request.pk,
        charge_milli=place.charge_milli,
        facts={"nodes": names, "charge_milli": place.charge_milli, "borrowed_milli": place.borrowed_milli},
    )
    if not fresh:
        raise Conflict(
            code="already_allocated",
            detail=_("Somebody else placed it meanwhile."),
            extra={"request": str(request.uid)},
        )
    at = now()
    request.refresh_from_db()
    gpus = gpus_lock(take.gpu_id for member in place.members for take in member.takes)
    if unmark is not None:
        unmark(gpus)
    judge_again(place, gpus, nodes, flavour_id)
    allocation = allocation_build(place, request, flavour_id, at, cycle)
    allocation.uid = uid or allocation.uid
    allocations_write([allocation])
    values_copy(AllocationMember, MEMBER, [member_row(one, allocation.pk) for one in place.members])
    leases_open(allocation=allocation, members=place.members, gpus=gpus, at=at)
    QueueEntry.objects.filter(request=request).delete()
    facts = facts_of(place, nodes, gpus)
    AllocationEvent.objects.create(
        allocation=allocation, at=at, kind="reserved", actor_name=actor.name, facts=facts
    )
    audit_record(
        acting_user=actor,
        action="allocation.reserved",
        subject=allocation,
        after={"request": str(request.uid), "state": "reserved", **facts},
        department_id=request.department_id,
    )
    outbox_add(
        "pool.allocation_reserved",
        {"allocation": str(allocation.uid), "request": str(request.uid), "nodes": names},
        key=allocation.ref,
    )
    return allocation


def allocation_build(
    place: Place,
    request: CapacityRequest,
    flavour_id: int | None,
    at: datetime,
    cycle: SchedulerCycle | None,
) -> Allocation:
    """The allocation of a placement from ``at`` on, not written yet."""
    return Allocation(
        request=request,
        holder_id=request.requester_id,
        department_id=request.department_id,
        flavour_id=flavour_id,
        charge_milli=place.charge_milli,
        quota_debited=flavour_id is not None,
        interruptible=request.interruptible,
        priority=request.priority,
        reserved_at=at,
        state_since=at,
        expires_at=expires_at(request, at),
        cycle=cycle,
    )


def allocations_write(allocations: Sequence[Allocation]) -> None:
    """Write allocations from ``allocation_build``; they have their ids afterwards."""
    for pk, one in zip(ids_take(Allocation, len(allocations)), allocations, strict=True):
        one.pk = pk
        one._state.adding, one._state.db = False, "default"
    values_copy(Allocation, BUILT, map(attrgetter(*BUILT), allocations))


MEMBER = ("allocation_id", "number", "node_id", "cpu_milli", "memory_mib")


def member_row(member: Member, allocation_id: int) -> tuple[int, ...]:
    """The columns ``MEMBER`` of an allocation's part on a node."""
    return allocation_id, member.number, member.node_id, member.cpu_milli, member.memory_mib


def facts_of(place: Place, nodes: Mapping[int, Node], gpus: Mapping[int, Gpu]) -> dict[str, Any]:
    """What the history and the audit say of a placement."""
    takes = [take for member in place.members for take in member.takes]
    return {
        "nodes": [nodes[member.node_id].name for member in place.members],
        "gpus": [str(gpus[take.gpu_id].uid) for take in takes],
        "charge_milli": place.charge_milli,
        "borrowed_milli": place.borrowed_milli,
    }


def expires_at(request: CapacityRequest, at: datetime) -> datetime | None:
    """When the time of work that begins at ``at`` is up: after its duration, and never past its window."""
    ends = [] if request.duration_s is None else [at + timedelta(seconds=request.duration_s)]
    if request.end_at is not None:
        ends.append(request.end_at)
    return min(ends, default=None)


def judge_again(place: Place, gpus: dict[int, Gpu], nodes: dict[int, Node], flavour_id: int | None) -> None:
    """Conflict where the cards or nodes, as they are now under the cards' locks, do not take it any more."""
    for member in place.members:
        node = nodes.get(member.node_id)
        blocked = "node_gone" if node is None else node_blocked(node)
        for take in member.takes:
            gpu = gpus.get(take.gpu_id)
            blocked = blocked or ("gpu_gone" if gpu is None else gpu_blocked(gpu))
            if gpu is not None and (gpu.node_id != member.node_id or gpu.flavour_id != flavour_id):
                blocked = blocked or "gpu_moved"
            if gpu is not None and gpu.mig_enabled != (take.slice_id is not None):
                blocked = blocked or "gpu_layout_changed"
        if blocked is not None:
            raise Conflict(
                code=f"place_{blocked}"[:48],
                detail=_("The place that was chosen cannot be used any more."),
                extra={"node": member.node_id},
            )


def _constraint(error: IntegrityError) -> str:
    diag = getattr(error.__cause__, "diag", None)
    return str(getattr(diag, "constraint_name", "") or "constraint")
