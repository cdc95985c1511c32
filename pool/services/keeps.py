"""Places kept for a preemptor (or for moved work) until it starts, leaves, or the time runs out.

A row with its spans: the database refuses that any part of a card is kept for two. What is kept of a host (CPU,
memory) is the snapshot's to respect.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any

from django.db import transaction
from django.db.backends.postgresql.psycopg_any import NumericRange

from pool.engine.model import Kept, Member, Take
from pool.models import Allocation, KeptPlace, KeptSpan, ReclaimCase, SchedulerCycle
from portal.kernel.clock import now
from portal.kernel.models import advance
from portal.kernel.units import from_ms
from portal.ops.outbox import outbox_add
from quotas.models import CapacityRequest

End = KeptPlace.End


def keep_place(
    *,
    keep: Kept,
    cycle: SchedulerCycle | None = None,
    not_before: datetime | None = None,
    moving: Allocation | None = None,
) -> KeptPlace:
    """Keep places for a request, instead of what was kept for it before. Call it inside a transaction.

    ``not_before``: the keep lasts at least until then (the longest grace of the victims). IntegrityError
    (`kept_span_never_twice`) where a part is kept for another already; nothing is kept then.
    """
    until = max(from_ms(keep.until), not_before) if not_before is not None else from_ms(keep.until)
    members = [member_json(member) for member in keep.members]
    with transaction.atomic():
        keeps_settle(request_id=keep.request_id)
        before = (
            KeptPlace.objects.select_for_update().filter(request_id=keep.request_id, ended_at=None).first()
        )
        if before is not None and before.members == members:
            if before.until < until:
                advance(KeptPlace.objects.filter(pk=before.pk), until=until)
                before.refresh_from_db()
            return before
        if before is not None:
            _end(before, End.REPLACED)
        (made,) = _make([(keep, until)], cycle, moving)
    return made


def keep_places(
    *, keeps: Sequence[tuple[Kept, datetime]], cycle: SchedulerCycle | None = None
) -> list[KeptPlace]:
    """The same for many requests, each with the moment that it lasts to at least; mostly nothing is kept for them
    yet, which takes a few statements for all.
    """
    wanted = [keep.request_id for keep, _ in keeps]
    known = set(
        KeptPlace.objects.filter(request_id__in=wanted, ended_at=None).values_list("request_id", flat=True)
    )
    made = [
        keep_place(keep=keep, cycle=cycle, not_before=until)
        for keep, until in keeps
        if keep.request_id in known
    ]
    fresh = [(keep, max(from_ms(keep.until), until)) for keep, until in keeps if keep.request_id not in known]
    return made + _make(fresh, cycle)


def _make(
    keeps: Sequence[tuple[Kept, datetime]], cycle: SchedulerCycle | None, moving: Allocation | None = None
) -> list[KeptPlace]:
    made = KeptPlace.objects.bulk_create(
        KeptPlace(
            request_id=keep.request_id,
            moving=moving,
            cycle=cycle,
            members=[member_json(member) for member in keep.members],
            until=until,
        )
        for keep, until in keeps
    )
    KeptSpan.objects.bulk_create(
        KeptSpan(kept=row, gpu_id=take.gpu_id, span=NumericRange(low, high))
        for row, (keep, _) in zip(made, keeps, strict=True)
        for member in keep.members
        for take in member.takes
        for low, high in take.spans
    )
    return made


def keeps_settle(*, request_id: int | None = None) -> int:
    """End the keeps whose request started or left the queue, or whose time ran out. Returns how many."""
    at = now()
    rows = KeptPlace.objects.filter(ended_at=None).select_related("request", "moving")
    if request_id is not None:
        rows = rows.filter(request_id=request_id)
    return sum(_end(row, why) for row in rows.order_by("id") if (why := _over(row, at)) is not None)


def _over(row: KeptPlace, at: datetime) -> str | None:
    if row.until <= at:
        return End.TIMED_OUT
    state = row.request.state
    if state == CapacityRequest.State.QUEUED:
        return None
    if state == CapacityRequest.State.ALLOCATED:
        # Moved work holds its old place until it stopped; its new one waits for it, unless it stays.
        moving = (
            ReclaimCase.objects.filter(allocation=row.moving_id, closed_at=None) if row.moving_id else None
        )
        return None if moving is not None and moving.exists() else End.STARTED
    return End.LEFT


def _end(row: KeptPlace, why: str) -> bool:
    at = now()
    with transaction.atomic():
        if not advance(KeptPlace.objects.filter(pk=row.pk, ended_at=None), ended_at=at, end_reason=why):
            return False
        KeptSpan.objects.filter(kept=row, ended_at=None).update(ended_at=at)
        if why in (End.LEFT, End.TIMED_OUT):  # others may have it now
            outbox_add("pool.capacity_changed", {"cause": f"keep_{why}", "kept": str(row.uid)})
    return True


def keep_extend(*, request_id: int, until: datetime) -> bool:
    """Let a keep last at least until then (a hook that was called late needs its time)."""
    return bool(
        advance(KeptPlace.objects.filter(request_id=request_id, ended_at=None, until__lt=until), until=until)
    )


MARGIN = timedelta(minutes=5)
"""From a victim's stop until its card was seen free and the preemptor placed, at most."""


# -- as data -------------------------------------------------------------------------------------------------


def member_json(member: Member) -> dict[str, Any]:
    """A planned member as it is stored."""
    return {
        "number": member.number,
        "node": member.node_id,
        "cpu_milli": member.cpu_milli,
        "memory_mib": member.memory_mib,
        "takes": [
            {
                "gpu": take.gpu_id,
                "spans": [list(span) for span in take.spans],
                "charge_milli": take.charge_milli,
                "memory_mib": take.memory_mib,
                "slice": take.slice_id,
            }
            for take in member.takes
        ],
    }


def members_of(rows: Iterable[dict[str, Any]]) -> tuple[Member, ...]:
    """What ``member_json`` wrote, as the engine reads it."""
    return tuple(
        Member(
            number=row["number"],
            node_id=row["node"],
            cpu_milli=row["cpu_milli"],
            memory_mib=row["memory_mib"],
            takes=tuple(
                Take(
                    gpu_id=take["gpu"],
                    spans=tuple((low, high) for low, high in take["spans"]),
                    charge_milli=take["charge_milli"],
                    memory_mib=take["memory_mib"],
                    slice_id=take["slice"],
                )
                for take in row["takes"]
            ),
        )
        for row in rows
    )
