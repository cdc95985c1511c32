"""Leases: written when a request is placed, closed when its card was seen free (or its node was fenced).

Each lease has its spans (the database forbids an overlap), and a usage span in the books by the same uid.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple
from uuid import UUID

from django.db import connection
from django.db.models import F, Func, Sum, Value
from django.utils.translation import gettext_lazy as _

from pool.engine.model import Member
from pool.models import Allocation, Gpu, Lease, LeaseSpan
from portal.kernel.bulk import ids_take, values_copy
from portal.kernel.errors import Conflict
from portal.kernel.ids import uuid7
from portal.kernel.models import advance
from quotas.services.ledger import usage_span_close
from quotas.services.usage_spans import Use, usage_begin

CARD_MILLI = 1000
ENDED_LATER = """
SELECT gpu_id, lower(span), upper(span), max(upper(during)) FROM pool_leasespan
 WHERE gpu_id = ANY(%s) AND during && tstzrange(%s, NULL) AND NOT upper_inf(during) GROUP BY gpu_id, span
"""

Ended = Mapping[int, Sequence[tuple[int, int, datetime]]]
"""By card: the part [from, to) of it and when its last lease there ended."""


@dataclass(slots=True)
class NewLease:
    """A lease that is not written yet."""

    allocation: Allocation
    member: int
    gpu: Gpu
    mig_slice_id: int | None
    charge: int
    memory_mib: int
    started_at: datetime
    uid: UUID = field(default_factory=uuid7)


class NewSpan(NamedTuple):
    """A part of a card that a new lease holds; the ranges as PostgreSQL reads them."""

    lease: NewLease
    gpu_id: int
    span: str
    during: str


def leases_open(
    *, allocation: Allocation, members: Iterable[Member], gpus: dict[int, Gpu], at: datetime
) -> None:
    """Write the leases of a placement; the caller holds the cards' rows.

    Conflict `gpu_overcharged` where charges or memory on a card would pass the card. An overlap of spans is
    the database's to refuse (IntegrityError).
    """
    ended = ended_later(gpus, at)
    made, spans = leases_build(allocation=allocation, members=members, gpus=gpus, at=at, ended=ended)
    full = Charges({lease.gpu.pk for lease in made}).take(made)
    if full is not None:
        raise Conflict(
            code="gpu_overcharged",
            detail=_("The card is held by somebody else meanwhile."),
            extra={"gpu": str(full.gpu.uid)},
        )
    leases_write(made, spans)


def leases_build(
    *,
    allocation: Allocation,
    members: Iterable[Member],
    gpus: dict[int, Gpu],
    at: datetime,
    ended: Ended,
) -> tuple[list[NewLease], list[NewSpan]]:
    """The leases of a placement and their spans, not written yet. ``ended``: parts of cards whose last lease ended
    after ``at`` (the clock was put back since): a lease on the same part begins when that one ended. Other parts
    of the card (slices, fractions) have nothing to do with it.
    """
    made: list[NewLease] = []
    spans: list[NewSpan] = []
    for member in members:
        for take in member.takes:
            begins = max([at, *_ends_of_the_same_part(ended.get(take.gpu_id, ()), take.spans)])
            lease = NewLease(
                allocation=allocation,
                member=member.number,
                gpu=gpus[take.gpu_id],
                mig_slice_id=take.slice_id,
                charge=take.charge_milli,
                memory_mib=take.memory_mib,
                started_at=begins,
            )
            made.append(lease)
            during = f"[{begins.isoformat()},)"
            spans.extend(NewSpan(lease, take.gpu_id, f"[{low},{high})", during) for low, high in take.spans)
    return made, spans


def _ends_of_the_same_part(
    ended: Sequence[tuple[int, int, datetime]], spans: Sequence[tuple[int, int]]
) -> list[datetime]:
    return [at for low, high, at in ended if any(low < to and begin < high for begin, to in spans)]


def ended_later(gpu_ids: Collection[int], at: datetime) -> Ended:
    """Of some cards the parts with a lease that ended after ``at``, and when; none, unless the clock was put back."""
    found: dict[int, list[tuple[int, int, datetime]]] = {}
    with connection.cursor() as cursor:
        cursor.execute(ENDED_LATER, [list(gpu_ids), at])
        for gpu_id, low, high, ended_at in cursor.fetchall():
            found.setdefault(gpu_id, []).append((low, high, ended_at))
    return found


class Charges:
    """Charge and memory held on some cards by open leases; the caller holds the cards' rows."""

    def __init__(self, gpu_ids: Collection[int]) -> None:
        rows = (
            Lease.objects.filter(gpu_id__in=gpu_ids, ended_at=None)
            .values("gpu_id")
            .annotate(charge_sum=Sum("charge"), memory_sum=Sum("memory_mib"))
        )
        self._held: dict[int, tuple[int, int]] = {
            row["gpu_id"]: (row["charge_sum"] or 0, row["memory_sum"] or 0) for row in rows
        }

    def take(self, leases: Iterable[NewLease]) -> NewLease | None:
        """Count new leases; the first that a card has no room for (nothing is counted then), or None."""
        after = dict[int, tuple[int, int]]()
        for lease in leases:
            gpu = lease.gpu
            charge, memory = after.get(gpu.pk) or self._held.get(gpu.pk, (0, 0))
            charge, memory = charge + lease.charge, memory + lease.memory_mib
            limit = max(gpu.memory_mib, gpu.flavour.memory_mib if gpu.flavour else 0)
            if charge > CARD_MILLI or (memory > limit and limit):
                return lease
            after[gpu.pk] = (charge, memory)
        self._held |= after
        return None


def leases_write(leases: Sequence[NewLease | Lease], spans: Iterable[NewSpan | LeaseSpan]) -> None:
    """Write leases of saved allocations, their spans, and the beginning of their use in the books."""
    ids = ids_take(Lease, len(leases))
    values_copy(
        Lease,
        ("id", "uid", "allocation_id", "member", "gpu_id", "mig_slice_id", "charge", "memory_mib", "started_at"),
        (
            (
                pk, one.uid, one.allocation.pk, one.member, one.gpu.pk, one.mig_slice_id, one.charge,
                one.memory_mib, one.started_at,
            )
            for pk, one in zip(ids, leases, strict=True)
        ),
    )  # fmt: skip
    known = {id(one): pk for pk, one in zip(ids, leases, strict=True)}
    values_copy(
        LeaseSpan,
        ("lease_id", "gpu_id", "span", "during"),
        ((known[id(one.lease)], one.gpu_id, one.span, one.during) for one in spans),
    )
    usage_begin(_use(lease) for lease in leases if lease.allocation.flavour_id is not None)


def _use(lease: NewLease | Lease) -> Use:
    allocation, gpu = lease.allocation, lease.gpu
    assert allocation.flavour_id is not None
    return Use(
        key=lease.uid,
        request_id=allocation.request_id,
        department_id=allocation.department_id,
        user_id=allocation.holder_id,
        flavour_id=allocation.flavour_id,
        site_code=gpu.node.cluster.site.code,
        node_name=gpu.node.name,
        gpu_label=f"{gpu.node.name}/{gpu.index}",
        gpu_uid=gpu.uid,
        charge_milli=lease.charge,
        started_at=lease.started_at,
    )


def leases_close(*, leases: Iterable[Lease], at: datetime) -> int:
    """The cards were seen free at ``at``: end the leases, their spans and their usage. Done twice, done
    once.
    """
    closed = 0
    for lease in leases:
        ended_at = max(at, lease.started_at)
        if not advance(Lease.objects.filter(pk=lease.pk, ended_at=None), ended_at=ended_at):
            continue
        closed += 1
        LeaseSpan.objects.filter(lease_id=lease.pk).update(
            during=Func(
                Func(F("during"), function="lower"), Value(ended_at), Value("[)"), function="tstzrange"
            )
        )
        usage_close(lease=lease, at=ended_at)
    return closed


def usage_close(*, lease: Lease, at: datetime) -> None:
    """Stop the counting of one lease in the books (its card may still be kept back)."""
    if lease.allocation.flavour_id is not None:
        usage_span_close(key=lease.uid, ended_at=at)
