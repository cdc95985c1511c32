"""Carry out many placements in one transaction: the same locks in the same order as for one, the same judgement
again under them, and bulk writes.

Order: usage rows root to leaf, requests by id, cards by id. Each placement is judged in the order of the plan with
all before it counted; one that does not hold any more (quota, state of the request, the person's limit, a card that
turned bad or full) is left out and noted. Nothing is written before all are judged, so what is left out leaves
nothing behind. Should the database itself refuse the batch (a constraint, a lock that did not come in time),
nothing of it is written, and its placements are tried one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

import structlog
from django.db import DatabaseError, connection, transaction

from pool.engine.model import Place
from pool.locks import gpus_lock, lock_wait_limit, nodes_judged
from pool.models import (
    Allocation,
    AllocationEvent,
    AllocationMember,
    Gpu,
    Node,
    SchedulerCycle,
)
from pool.services.leases import (
    Charges,
    Ended,
    NewLease,
    NewSpan,
    ended_later,
    leases_build,
    leases_write,
)
from pool.services.plan_apply import (
    MEMBER,
    SCHEDULER,
    Applied,
    allocation_build,
    allocations_write,
    facts_of,
    judge_again,
    member_row,
    place_apply,
)
from portal.kernel.bulk import values_copy
from portal.kernel.clock import now
from portal.kernel.errors import DomainError
from portal.ops.actor import Actor
from portal.ops.outbox import outbox_add_many
from portal.ops.services.audit import audit_record_many, audit_row
from quotas.models import CapacityRequest
from quotas.services.lifecycle_batch import Rooms, requests_allocated, requests_lock
from quotas.services.usage_book import UsageBook

log = structlog.get_logger(__name__)
BATCH = 400
"""Placements a transaction: its locks are held for some tenths of a second."""


@dataclass(slots=True)
class _Batch:
    """What one transaction has locked and read, and what it is going to write."""

    at: datetime
    cycle: SchedulerCycle | None
    actor: Actor
    book: UsageBook
    requests: dict[int, CapacityRequest]
    rooms: Rooms
    gpus: dict[int, Gpu]
    nodes: dict[int, Node]
    charges: Charges
    ended: Ended
    taken: list[tuple[Place, Allocation]] = field(default_factory=list)
    leases: list[NewLease] = field(default_factory=list)
    spans: list[NewSpan] = field(default_factory=list)


def places_apply(
    *,
    places: Sequence[Place],
    departments: Mapping[int, int],
    flavour_ids: Mapping[str, int],
    cycle: SchedulerCycle | None = None,
    acting_user: Actor = SCHEDULER,
) -> list[Applied]:
    """Turn placements into allocations with leases, or say why not, one answer each in the same order.

    ``departments``: of each request as the plan saw it. Must not run inside a transaction of the caller's if each
    batch is to commit by itself.
    """
    done: list[Applied] = []
    for start in range(0, len(places), BATCH):
        chunk = places[start : start + BATCH]
        try:
            with transaction.atomic():
                done += _apply(chunk, departments, flavour_ids, cycle, acting_user)
        except DatabaseError as error:
            log.warning("batch_refused", error=type(error).__name__, placements=len(chunk))
            done += _singly(chunk, flavour_ids, cycle, acting_user)
    return done


def _singly(
    places: Sequence[Place], flavour_ids: Mapping[str, int], cycle: SchedulerCycle | None, actor: Actor
) -> Iterator[Applied]:
    requests = CapacityRequest.objects.in_bulk([place.request_id for place in places])
    for place in places:
        request = requests.get(place.request_id)
        if request is None:
            yield Applied(place.request_id, None, "request_unknown")
            continue
        yield place_apply(
            place=place,
            request=request,
            flavour_id=flavour_ids[place.flavour] if place.flavour is not None else None,
            cycle=cycle,
            acting_user=actor,
        )


def _apply(
    places: Sequence[Place],
    departments: Mapping[int, int],
    flavour_ids: Mapping[str, int],
    cycle: SchedulerCycle | None,
    actor: Actor,
) -> list[Applied]:
    lock_wait_limit()
    asked = [place.request_id for place in places]
    book = UsageBook(
        {flavour_ids[place.flavour] for place in places if place.flavour is not None},
        {departments[one] for one in asked},
    )
    requests = requests_lock(asked)
    cards = [take.gpu_id for place in places for member in place.members for take in member.takes]
    gpus = gpus_lock(cards)
    nodes = {card.node_id: card.node for card in gpus.values()}
    nodes |= nodes_judged({one.node_id for place in places for one in place.members} - nodes.keys())
    at = now()
    batch = _Batch(
        at=at,
        cycle=cycle,
        actor=actor,
        book=book,
        requests=requests,
        rooms=Rooms({one.requester_id for one in requests.values()}),
        gpus=gpus,
        nodes=nodes,
        charges=Charges(list(gpus)),
        ended=ended_later(gpus, at),
    )
    answers = [_judge(batch, place, departments[place.request_id], flavour_ids) for place in places]
    if batch.taken:
        _write(batch)
    for answer in answers:
        if answer.allocation is None:
            log.info("placement_refused", request=answer.request_id, refusal=answer.refusal)
    return answers


def _judge(batch: _Batch, place: Place, department_id: int, flavour_ids: Mapping[str, int]) -> Applied:
    flavour_id = flavour_ids[place.flavour] if place.flavour is not None else None
    refusal = _refusal(batch, place, department_id, flavour_id)
    if refusal:
        return Applied(place.request_id, None, refusal)
    request = batch.requests[place.request_id]
    allocation = allocation_build(place, request, flavour_id, batch.at, batch.cycle)
    leases, spans = leases_build(
        allocation=allocation, members=place.members, gpus=batch.gpus, at=batch.at, ended=batch.ended
    )
    # Counts what it lets pass, so it comes last: nothing refuses after it.
    if batch.charges.take(leases) is not None:
        return Applied(place.request_id, None, "gpu_overcharged")
    batch.rooms.take(request.requester_id, place.charge_milli)
    if flavour_id is not None and place.charge_milli:
        batch.book.debit(
            department_id=request.department_id,
            flavour_id=flavour_id,
            charge_milli=place.charge_milli,
            interruptible=request.interruptible,
        )
    batch.taken.append((place, allocation))
    batch.leases += leases
    batch.spans += spans
    return Applied(place.request_id, allocation)


def _refusal(batch: _Batch, place: Place, department_id: int, flavour_id: int | None) -> str:
    """The code why a placement does not hold any more, or ""; counts nothing."""
    request = batch.requests.get(place.request_id)
    if request is None:
        return "request_unknown"
    if request.state != CapacityRequest.State.QUEUED:
        return "already_allocated" if request.state == CapacityRequest.State.ALLOCATED else "wrong_state"
    if request.department_id != department_id or department_id not in batch.book.departments:
        return "department_moved"
    if flavour_id is not None and flavour_id not in batch.book.flavours:
        return "flavour_unknown"
    beyond = batch.rooms.refusal(request.requester_id, place.charge_milli)
    if beyond:
        return beyond
    if flavour_id is not None and place.charge_milli:
        answer = batch.book.admit(
            department_id=request.department_id,
            flavour_id=flavour_id,
            charge_milli=place.charge_milli,
            interruptible=request.interruptible,
        )
        if not answer.fits:
            return "quota_blocked"
    try:
        judge_again(place, batch.gpus, batch.nodes, flavour_id)
    except DomainError as error:
        return error.code
    return ""


def _write(batch: _Batch) -> None:
    batch.book.write()
    facts = {place.request_id: facts_of(place, batch.nodes, batch.gpus) for place, _ in batch.taken}
    requests_allocated(
        [batch.requests[place.request_id] for place, _ in batch.taken],
        {
            pk: {key: one[key] for key in ("nodes", "charge_milli", "borrowed_milli")}
            for pk, one in facts.items()
        },
    )
    allocations_write([allocation for _, allocation in batch.taken])
    values_copy(
        AllocationMember,
        MEMBER,
        (member_row(one, allocation.pk) for place, allocation in batch.taken for one in place.members),
    )
    leases_write(batch.leases, batch.spans)
    with connection.cursor() as cursor:
        cursor.execute("DELETE FROM pool_queueentry WHERE request_id = ANY(%s)", [list(facts)])
    values_copy(
        AllocationEvent,
        ("allocation_id", "at", "kind", "actor_name", "facts"),
        (
            (allocation.pk, batch.at, "reserved", batch.actor.name, facts[place.request_id])
            for place, allocation in batch.taken
        ),
    )
    audit_record_many(
        [
            audit_row(
                acting_user=batch.actor,
                action="allocation.reserved",
                subject=allocation,
                after={
                    "request": str(batch.requests[place.request_id].uid),
                    "state": "reserved",
                    **facts[place.request_id],
                },
            )
            for place, allocation in batch.taken
        ]
    )
    outbox_add_many(
        [
            (
                "pool.allocation_reserved",
                {
                    "allocation": str(allocation.uid),
                    "request": str(batch.requests[place.request_id].uid),
                    "nodes": facts[place.request_id]["nodes"],
                },
                allocation.ref,
            )
            for place, allocation in batch.taken
        ]
    )
