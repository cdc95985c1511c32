"""The work of the year for `_year`: requests, allocations, leases, ledger lines, audit."""

from __future__ import annotations

import heapq
import random
from datetime import UTC, datetime, timedelta
from typing import Any

from tests.perf._year import ALLOCATIONS, HOUR_MS, OPEN, WAITING, _bulk

EVER, NEVER = datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 1, 1, tzinfo=UTC)


def work(
    rng: random.Random,
    now: datetime,
    departments: list[Any],
    people: list[Any],
    flavours: list[Any],
    cards: list[Any],
) -> tuple[dict[str, int], dict[str, Any]]:
    """Insert it all; returns sizes and the rows that pages are asked for."""
    from quotas.models import ApprovalStep, CapacityRequest

    askers = people[50:]
    requests = []
    for i in range(ALLOCATIONS + WAITING):
        waiting = i >= ALLOCATIONS
        user = askers[i % len(askers)] if not waiting else askers[(i * 19) % len(askers)]
        at = (
            now - timedelta(hours=8760 * (1 - i / ALLOCATIONS))
            if not waiting
            else now - timedelta(minutes=i % 900)
        )
        ended = not waiting and i < ALLOCATIONS - OPEN
        requests.append(
            CapacityRequest(
                requester=user,
                last_editor=user,
                department=user.home_department,
                flavour=flavours[i % 6],
                state="in_approval" if waiting else "ended" if ended else "allocated",
                end_reason="finished" if ended else "",
                charge_milli=2000,
                gpus_per_node=2,
                duration_s=36_000,
                purpose=f"Training run {i}, with a purpose of usual length for approvers to read",
                command="python train.py",
                cost_code=f"CC-{i % 180:04d}",
                cost_at_most_micro=320_000_000,
                submitted_at=at,
                queued_at=None if waiting else at,
                created_at=at,
                updated_at=at,
                state_since=at,
            )
        )
    requests = _bulk(CapacityRequest, requests)
    steps = _steps(requests, now, departments)
    sizes, allocation = _allocations(rng, now, requests[:ALLOCATIONS], flavours, cards)
    _audit(now, requests, departments)
    step = ApprovalStep.objects.filter(
        state="open", department=departments[1], request__department__parent=departments[1]
    ).first()
    found = {
        "researcher": allocation.holder, "request": allocation.request, "allocation": allocation, "step": step,
    }  # fmt: skip
    return {"requests": len(requests), "steps": steps, **sizes}, found


def _steps(requests: list[Any], now: datetime, departments: list[Any]) -> int:
    """Each finished request had a lead's step; each waiting one has an open one, half of them of one lead."""
    from quotas.models import ApprovalStep

    rows = []
    for i, request in enumerate(requests):
        waiting = request.state == "in_approval"
        top = departments[1] if waiting and i % 2 else request.department.parent
        rows.append(
            ApprovalStep(
                request=request,
                requester_id=request.requester_id,
                position=1,
                role="lead",
                department=top,
                state="open" if waiting else "approved",
                opened_at=request.submitted_at,
                due_at=request.submitted_at + timedelta(days=1),
                decided_at=None if waiting else request.submitted_at,
                rule="within-guarantee",
            )
        )
    return len(_bulk(ApprovalStep, rows))


def _allocations(
    rng: random.Random, now: datetime, requests: list[Any], flavours: list[Any], cards: list[Any]
) -> tuple[dict[str, int], Any]:
    from pool.models import Allocation, AllocationEvent, AllocationMember, Lease, LeaseSpan
    from quotas.models import RequestEvent, UsageSpan

    by_flavour = {f.pk: [c for c in cards if c.flavour_id == f.pk] for f in flavours}
    allocations, ends = [], []
    for request in requests:
        start = request.submitted_at + timedelta(minutes=20)
        open_now = request.state == "allocated"
        end = None if open_now else start + timedelta(hours=rng.uniform(1, 30))
        ends.append(end)
        allocations.append(
            Allocation(
                request=request,
                holder_id=request.requester_id,
                department_id=request.department_id,
                flavour_id=request.flavour_id,
                charge_milli=2000,
                state="running" if open_now else "ended",
                end_reason="" if open_now else "finished",
                reserved_at=start,
                started_at=start,
                expires_at=(end or now) + timedelta(hours=5),
                ended_at=end,
                state_since=start,
            )
        )
    allocations = _bulk(Allocation, allocations)
    members, leases, spans, events, story = [], [], [], [], []
    # Two cards of one node each, on the pair that has been free the longest: nothing overlaps, as in a real pool.
    pairs = {
        pk: [(EVER, number, pool[number : number + 2]) for number in range(0, len(pool) - 1, 2)]
        for pk, pool in by_flavour.items()
    }
    for allocation, end in zip(allocations, ends, strict=True):
        free_from, number, pair = heapq.heappop(pairs[allocation.flavour_id])
        assert free_from <= allocation.started_at, "the year needs more cards"
        heapq.heappush(pairs[allocation.flavour_id], (end or NEVER, number, pair))
        members.append(
            AllocationMember(
                allocation=allocation, number=0, node_id=pair[0].node_id, state="running" if end is None else "free",
                started_at=allocation.started_at, ended_at=end,
            )
        )  # fmt: skip
        for card in pair:
            lease = Lease(
                allocation=allocation, gpu=card, charge=1000, started_at=allocation.started_at, ended_at=end
            )
            leases.append(lease)
            spans.append(
                UsageSpan(
                    key=lease.uid, request_id=allocation.request_id, department_id=allocation.department_id,
                    user_id=allocation.holder_id, flavour_id=allocation.flavour_id, site_code="site0",
                    node_name=f"n{card.node_id}", gpu_label=f"n{card.node_id}/{card.index}", charge_milli=1000,
                    gpu_uid=card.uid,
                    started_at=allocation.started_at, ended_at=end, accrued_to=end or allocation.started_at,
                )
            )  # fmt: skip
        kinds = ("running",)
        events += [
            AllocationEvent(allocation=allocation, at=allocation.started_at, kind=k, actor_name="agent")
            for k in kinds
        ]
        story += [
            RequestEvent(
                request_id=allocation.request_id, at=allocation.started_at, kind=k, actor_name="scheduler"
            )
            for k in ("submitted", "allocated")
        ]
    _bulk(AllocationMember, members)
    leases = _bulk(Lease, leases)
    seen: set[int] = set()
    live = []
    for lease in leases:
        if lease.ended_at is None and lease.gpu_id not in seen:
            seen.add(lease.gpu_id)
            live.append(
                LeaseSpan(lease=lease, gpu_id=lease.gpu_id, span=(0, 1000), during=(lease.started_at, None))
            )
    _bulk(LeaseSpan, live)
    lines = _ledger(_bulk(UsageSpan, spans), flavours)
    _bulk(AllocationEvent, events)
    _bulk(RequestEvent, story)
    return {"allocations": len(allocations), "leases": len(leases), "ledger_lines": lines}, allocations[-1]


def _ledger(spans: list[Any], flavours: list[Any]) -> int:
    """The lines that the service would have written, by the same cuts."""
    from quotas.models import LedgerEntry
    from quotas.selectors.cutting import Cutter, line_of
    from quotas.selectors.prices import PriceBook

    closed = [s for s in spans if s.ended_at is not None]
    cutter = Cutter.load(closed[:1])
    cutter = Cutter(PriceBook.load(None), cutter.names)
    from portal.accounts.models import Department, User
    from quotas.models import CapacityRequest, GpuFlavour

    people, departments = User.objects.in_bulk(), Department.objects.without_tree_fields().in_bulk()
    kinds, asks = GpuFlavour.objects.in_bulk(), CapacityRequest.objects.only("id", "cost_code").in_bulk()
    names = type(cutter.names).load(departments)
    cutter = Cutter(cutter.book, names)
    lines: list[Any] = []
    count = 0
    for span in closed:
        span.user, span.department = people[span.user_id], departments[span.department_id]
        span.flavour, span.request = kinds[span.flavour_id], asks[span.request_id]
        for cut in cutter.cuts(span, until=span.ended_at, since=span.started_at):
            line = line_of(span, cut, cutter.names, booked_month=cut.day.replace(day=1))
            line.booked_at = span.ended_at
            lines.append(line)
        if len(lines) >= 5_000:
            count += len(_bulk(LedgerEntry, lines))
            lines = []
    return count + len(_bulk(LedgerEntry, lines))


def _audit(now: datetime, requests: list[Any], departments: list[Any]) -> None:
    from portal.ops.models import AuditEvent

    rows = [
        AuditEvent(
            at=request.submitted_at,
            action=action,
            actor_name="scheduler",
            via="task",
            object_type="quotas.capacityrequest",
            object_uid=request.uid,
            object_label=f"R-{request.pk}",
            department_id=request.department_id,
        )
        for request in requests
        for action in ("request.submitted", "request.allocated")
    ]
    _bulk(AuditEvent, rows)


__all__ = ["HOUR_MS", "work"]
