"""Requests that are several: their members, how far they are, what they wait for, how they ended."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from django.db.models import Count, Q, QuerySet

from quotas.models import CapacityRequest
from quotas.transitions import REQUEST_TERMINAL

S = CapacityRequest.State
WELL = frozenset({"finished", "completed"})
WELL_FOR_HOLD = WELL | {"released", "expired"}
"""Somebody who works on a GPU directly, and a reserved window, end by being given back or at their time."""


def ended_well(request: CapacityRequest) -> bool | None:
    """Whether it ended as it should; None while it has not ended."""
    if request.state not in REQUEST_TERMINAL:
        return None
    if request.state != S.ENDED:
        return False
    hold = request.run_kind == CapacityRequest.RunKind.HOLD and not request.series
    return request.end_reason in (WELL_FOR_HOLD if hold or request.end_at is not None else WELL)


def held_by(request: CapacityRequest) -> str:
    """Why an agreed request is not in line: its own mark, or that of all its waiting members."""
    if request.state != S.SERIES:
        return str(request.held)
    marks = set(members_of(request).filter(state=S.QUEUED).values_list("held", flat=True))
    return next((mark for mark in ("failed", "dependency") if mark in marks), "")


def members_of(head: CapacityRequest) -> QuerySet[CapacityRequest]:
    """The members of a series in order."""
    return CapacityRequest.objects.filter(head=head).order_by("member_index", "id")


@dataclass(frozen=True, slots=True)
class Progress:
    """How many members are where. ``held`` wait for their turn or for another request, ``waiting`` are in
    line, ``well`` and ``badly`` have ended so.
    """

    held: int = 0
    waiting: int = 0
    running: int = 0
    well: int = 0
    badly: int = 0
    withdrawn: int = 0

    @property
    def open(self) -> int:
        """Those that have not ended."""
        return self.held + self.waiting + self.running

    @property
    def all(self) -> int:
        """All of them."""
        return self.open + self.well + self.badly + self.withdrawn


def progress_of(head: CapacityRequest) -> Progress:
    """Counts of a series in one query."""
    return progress_of_all([head])[head.pk]


def progress_of_all(heads: Iterable[CapacityRequest]) -> dict[int, Progress]:
    """The same for several at once, still in one query."""
    ids = [head.pk for head in heads]
    if not ids:
        return {}
    hold = Q(run_kind=CapacityRequest.RunKind.HOLD) | Q(end_at__isnull=False)
    well = Q(state=S.ENDED) & (
        Q(end_reason__in=sorted(WELL)) | (hold & Q(end_reason__in=sorted(WELL_FOR_HOLD)))
    )
    rows = (
        CapacityRequest.objects.filter(head_id__in=ids)
        .values("head_id")
        .annotate(
            n_held=Count("id", filter=Q(state=S.QUEUED) & ~Q(held="")),
            n_waiting=Count("id", filter=Q(state=S.QUEUED, held="")),
            n_running=Count("id", filter=Q(state=S.ALLOCATED)),
            n_well=Count("id", filter=well),
            n_badly=Count("id", filter=Q(state=S.ENDED) & ~well),
            n_withdrawn=Count("id", filter=Q(state__in=[S.WITHDRAWN, S.REJECTED])),
        )
        .order_by("head_id")
    )
    found = {
        row["head_id"]: Progress(
            row["n_held"], row["n_waiting"], row["n_running"], row["n_well"], row["n_badly"],
            row["n_withdrawn"],
        )
        for row in rows
    }  # fmt: skip
    return {pk: found.get(pk, Progress()) for pk in ids}
