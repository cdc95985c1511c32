"""What holds places, as the engine reads it: every lease that is still open (its card was not seen free yet),
whatever became of its allocation, and every member of an open allocation for its host's CPU and memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from django.db import connection
from django.db.models import Q

from pool.engine import model
from pool.models import Allocation, AllocationMember
from pool.selectors.reclaim import ending_allocations
from portal.kernel.units import to_ms

LEASES = """
SELECT l.allocation_id, l.member, l.gpu_id, l.charge, l.memory_mib, l.mig_slice_id,
       array_agg(lower(s.span) ORDER BY lower(s.span)) FILTER (WHERE s.id IS NOT NULL),
       array_agg(upper(s.span) ORDER BY lower(s.span)) FILTER (WHERE s.id IS NOT NULL)
  FROM pool_lease l LEFT JOIN pool_leasespan s ON s.lease_id = l.id AND upper_inf(s.during)
 WHERE l.ended_at IS NULL {some}
 GROUP BY l.id ORDER BY l.id
"""
ALLOCATION_COLUMNS = (
    "id", "request_id", "department_id", "flavour_id", "charge_milli", "interruptible", "priority", "started_at",
    "reserved_at", "expires_at", "stop_asked_at", "grace_until", "holder_id", "state", "request__nodes_min",
    "request__checkpoint", "request__is_service", "request__head_id",
)  # fmt: skip

Takes = dict[tuple[int, int], list[model.Take]]


def running_read(
    codes: Mapping[int, str], allocation_ids: Collection[int] | None = None
) -> dict[int, model.Running]:
    """What holds places by allocation id: all of it, or what of ``allocation_ids`` still does. Four queries, on
    the indexes of what is open: history is never scanned.
    """
    takes = _takes(allocation_ids)
    rows = Allocation.objects.exclude(state=Allocation.State.ENDED)
    holding = {allocation_id for allocation_id, _ in takes}
    if allocation_ids is not None:
        rows = Allocation.objects.filter(pk__in=allocation_ids).filter(
            ~Q(state=Allocation.State.ENDED) | Q(pk__in=holding)
        )
    found = {row.id: row for row in rows.values_list(*ALLOCATION_COLUMNS, named=True)}
    if allocation_ids is None:
        late = Allocation.objects.filter(pk__in=holding - set(found))
        found |= {row.id: row for row in late.values_list(*ALLOCATION_COLUMNS, named=True)}
    members = _members(found, takes)
    ending = ending_allocations()
    return {pk: _running(found[pk], members.get(pk, ()), codes, pk in ending) for pk in sorted(found)}


def _takes(allocation_ids: Collection[int] | None) -> Takes:
    some = "" if allocation_ids is None else "AND l.allocation_id = ANY(%s)"
    takes: Takes = {}
    with connection.cursor() as cursor:
        cursor.execute(LEASES.format(some=some), None if allocation_ids is None else [list(allocation_ids)])
        for allocation_id, member, gpu_id, charge, memory_mib, slice_id, lows, highs in cursor.fetchall():
            take = model.Take(
                gpu_id=gpu_id,
                spans=tuple(zip(lows or (), highs or (), strict=True)),
                charge_milli=charge,
                memory_mib=memory_mib,
                slice_id=slice_id,
            )
            takes.setdefault((allocation_id, member), []).append(take)
    return takes


def _members(rows: Mapping[int, Any], takes: Takes) -> dict[int, tuple[model.Member, ...]]:
    members: dict[int, list[model.Member]] = {}
    query = AllocationMember.objects.filter(allocation_id__in=list(rows)).order_by("allocation_id", "number")
    columns = ("allocation_id", "number", "node_id", "cpu_milli", "memory_mib", "given_up_at")
    for allocation_id, number, node_id, cpu, memory, given_up in query.values_list(*columns):
        held = takes.get((allocation_id, number), ())
        host = rows[allocation_id].state != Allocation.State.ENDED and given_up is None
        if given_up is not None and not held:
            continue
        members.setdefault(allocation_id, []).append(
            model.Member(
                number=number,
                node_id=node_id,
                cpu_milli=cpu if host else 0,
                memory_mib=memory if host else 0,
                takes=tuple(held),
            )
        )
    return {pk: tuple(rows) for pk, rows in members.items()}


def _running(
    row: Any, members: tuple[model.Member, ...], codes: Mapping[int, str], case: bool
) -> model.Running:
    ends_at = row.expires_at
    if row.state == Allocation.State.STOPPING:
        ends_at = row.grace_until or row.stop_asked_at
    elif row.state == Allocation.State.ENDED:
        # Its card was not seen free since its node was lost: nobody knows when it will be.
        ends_at = None
    return model.Running(
        allocation_id=row.id,
        request_id=row.request_id,
        department_id=row.department_id,
        flavour=codes.get(row.flavour_id or 0),
        charge_milli=row.charge_milli,
        members=members,
        interruptible=row.interruptible,
        priority=row.priority,
        started_at=to_ms(row.started_at or row.reserved_at),
        ends_at=None if ends_at is None else to_ms(ends_at),
        user_id=row.holder_id,
        ending=case or row.state in (Allocation.State.STOPPING, Allocation.State.ENDED),
        movable=row.interruptible and bool(row.request__checkpoint),
        min_nodes=row.request__nodes_min,
        apart=row.request__head_id if row.request__is_service else None,
    )
