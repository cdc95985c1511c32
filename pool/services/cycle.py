"""One scheduling cycle: snapshot, decide, apply, and why everyone else waits. One planner at a time."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import structlog
from django.db import transaction

from pool.engine.decide import decide
from pool.engine.model import Member, Place, Plan, Waiting
from pool.models import QueueEntry, SchedulerCycle
from pool.services.plan_apply import Applied, place_apply
from pool.services.snapshot import Bundle, policy_active, snapshot_load
from portal.accounts.models import Department
from portal.kernel.clock import now
from portal.kernel.locks import try_advisory_lock
from portal.kernel.units import from_ms, to_ms
from quotas.models import CapacityRequest
from quotas.selectors.trees import INSTALLATION

log = structlog.get_logger(__name__)
PLANNER = "pool.planner"
ROUNDS = 3
"""A refused placement frees what the plan counted on: so many further looks at most in one cycle."""


_planning: ContextVar[bool] = ContextVar("pool_planning", default=False)


@dataclass(frozen=True, slots=True)
class CycleResult:
    """``ran`` False: another planner is at work. ``placed`` are the ids of new allocations."""

    ran: bool
    placed: tuple[int, ...] = ()
    refused: int = 0
    waiting: int = 0


def schedule_cycle(*, cause: str = "beat") -> CycleResult:
    """Decide once and carry it out. Must not run inside a transaction: each placement commits by itself."""
    if _planning.get():
        # The database lock is the session's: it would let the same session in again.
        return CycleResult(False)
    token = _planning.set(True)
    try:
        with try_advisory_lock(PLANNER) as got:
            return _run(cause) if got else CycleResult(False)
    finally:
        _planning.reset(token)


def _run(cause: str) -> CycleResult:
    if not CapacityRequest.objects.filter(state=CapacityRequest.State.QUEUED).exists():
        QueueEntry.objects.all().delete()
        return CycleResult(True)
    placed: list[int] = []
    refused = 0
    for _round in range(ROUNDS):
        began, at = time.monotonic(), now()
        policy_row, policy = policy_active()
        bundle = snapshot_load()
        plan = decide(bundle.snapshot, policy, to_ms(at))
        cycle = _cycle_row(plan, bundle, cause, policy_row, at) if plan.places else None
        applied = [_apply(place, bundle, cycle) for place in plan.places]
        failed = [one for one in applied if one.allocation is None]
        placed += [one.allocation.pk for one in applied if one.allocation is not None]
        refused += len(failed)
        if cycle is not None:
            _close_row(cycle, plan, applied, began)
        if not failed:
            break
    queue_write(plan=plan, failed={one.request_id: one.refusal for one in failed}, bundle=bundle, at=at)
    return CycleResult(True, tuple(placed), refused, len(plan.waiting) + len(failed))


def _apply(place: Place, bundle: Bundle, cycle: SchedulerCycle | None) -> Applied:
    request = bundle.requests[place.request_id]
    flavour_id = bundle.flavour_ids[place.flavour] if place.flavour is not None else None
    applied = place_apply(place=place, request=request, flavour_id=flavour_id, cycle=cycle)
    if applied.allocation is not None:
        _start(applied.allocation.pk)
    return applied


def _start(allocation_id: int) -> None:
    """Ask a worker to start it, after commit. A lost message costs seconds: the sweep finds reserved ones."""
    from pool.tasks import start_allocation

    transaction.on_commit(lambda: start_allocation.apply_async((allocation_id,), retry=False), robust=True)


def _cycle_row(plan: Plan, bundle: Bundle, cause: str, policy_row: Any, at: datetime) -> SchedulerCycle:
    return SchedulerCycle.objects.create(
        started_at=at,
        cause=cause[:48],
        snapshot_hash=hashlib.sha256(repr(bundle.snapshot).encode()).hexdigest(),
        policy=policy_row,
        considered=len(bundle.snapshot.pending),
        ops=[_op(place) for place in plan.places]
        + [
            {"op": "reserve", "request": one.request_id, "at": one.start_at, "members": _members(one.members)}
            for one in plan.reserves
        ],
    )


def _op(place: Place) -> dict[str, Any]:
    return {
        "op": "place",
        "request": place.request_id,
        "flavour": place.flavour,
        "charge_milli": place.charge_milli,
        "members": _members(place.members),
    }


def _members(members: Iterable[Member]) -> list[dict[str, Any]]:
    return [{"node": member.node_id, "gpus": [take.gpu_id for take in member.takes]} for member in members]


def _close_row(cycle: SchedulerCycle, plan: Plan, applied: list[Applied], began: float) -> None:
    SchedulerCycle.objects.filter(pk=cycle.pk).update(
        took_ms=round((time.monotonic() - began) * 1000),
        placed=sum(one.allocation is not None for one in applied),
        refused_on_apply=sum(one.allocation is None for one in applied),
    )
    log.info("cycle", cycle=cycle.pk, placed=len(plan.places), waiting=len(plan.waiting))


def queue_write(*, plan: Plan, failed: dict[int, str], bundle: Bundle, at: datetime) -> int:
    """Write why each request waits; entries of requests that left the queue go. Returns rows written."""
    uids = {pk: str(request.uid) for pk, request in bundle.requests.items()}
    names = dict(Department.objects.without_tree_fields().values_list("pk", "name"))
    entries = [_entry(one, uids, names, at) for one in plan.waiting]
    entries += [
        QueueEntry(
            request_id=request_id, position=1, ahead=[], reason="refused_on_apply",
            figures={"refusal": refusal}, planned_at=at,
        )
        for request_id, refusal in failed.items()
    ]  # fmt: skip
    with transaction.atomic():
        # A request may have left the queue since the snapshot (withdrawn): it gets no entry any more.
        still = set(
            CapacityRequest.objects.select_for_update(of=("self",), no_key=True)
            .filter(pk__in=[entry.request_id for entry in entries], state=CapacityRequest.State.QUEUED)
            .order_by("pk")
            .values_list("pk", flat=True)
        )
        entries = [entry for entry in entries if entry.request_id in still]
        QueueEntry.objects.exclude(pk__in=still).delete()
        QueueEntry.objects.bulk_create(
            entries,
            update_conflicts=True,
            unique_fields=["request"],
            update_fields=[
                "position",
                "ahead",
                "reason",
                "figures",
                "start_from",
                "start_to",
                "basis",
                "planned_at",
            ],
            batch_size=1000,
        )
    return len(entries)


def _entry(one: Waiting, uids: dict[int, str], names: dict[int, str], at: datetime) -> QueueEntry:
    estimate = one.estimate
    return QueueEntry(
        request_id=one.request_id,
        position=one.position,
        ahead=[uids[pk] for pk in reversed(one.ahead) if pk in uids],
        reason=one.code,
        figures=figures_for_people(dict(one.figures) | {"of": one.of}, uids, names),
        start_from=from_ms(estimate.earliest) if estimate else None,
        start_to=from_ms(estimate.latest) if estimate else None,
        basis=estimate.basis if estimate else "",
        planned_at=at,
    )


def figures_for_people(
    figures: dict[str, Any], uids: dict[int, str], names: dict[int, str]
) -> dict[str, Any]:
    """Engine ids as names and uids: what is kept and shown never depends on row numbers."""
    if "level" in figures:
        level = figures["level"]
        figures["level"] = "" if level == INSTALLATION else names.get(level, str(level))
        figures["level_is_installation"] = level == INSTALLATION
    if "requests" in figures:
        figures["requests"] = [uids[pk] for pk in figures["requests"] if pk in uids]
    for key in ("start_at", "reserved_from"):
        if isinstance(figures.get(key), int):
            figures[key] = from_ms(figures[key]).isoformat()
    return figures
