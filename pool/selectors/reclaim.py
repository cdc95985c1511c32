"""What the scheduler's snapshot and the pages read of taking back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db.models import Q

from pool.engine.model import Kept, MinimumRun
from pool.models import (
    Allocation,
    DepartmentMode,
    KeptPlace,
    MaintenanceWindow,
    Node,
    ReclaimCase,
    ReclaimConsent,
)
from pool.services.keeps import members_of
from pool.transitions import WINDOW_OPEN
from portal.accounts.policy import DepartmentTree
from portal.kernel.clock import now
from portal.kernel.units import MS_PER_SECOND, to_ms
from quotas.models import CapacityRequest

COUNTED_FOR = timedelta(days=1)
"""Displacements older than this no longer count against a request."""


# -- modes ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Modes:
    """The mode of every department, its own or inherited, and which requests take part in the roll-out."""

    own: Mapping[int | None, DepartmentMode]
    """Departments with a mode of their own (None: the installation)."""
    minimum: Mapping[int, DepartmentMode]
    """Departments with a minimum run time of their own."""
    parents: Mapping[int, int | None]
    consenting: frozenset[int]

    @classmethod
    def load(cls, tree: DepartmentTree | None = None) -> Modes:
        """Read them (three queries; two where the tree is known)."""
        tree = tree or DepartmentTree.load()
        rows = {row.department_id: row for row in DepartmentMode.objects.all()}
        return cls(
            {pk: row for pk, row in rows.items() if row.mode},
            {pk: row for pk, row in rows.items() if pk is not None and row.has_minimum},
            {pk: row.parent_id for pk, row in tree.rows.items()},
            frozenset(ReclaimConsent.objects.values_list("request_id", flat=True)),
        )

    def row_of(self, department_id: int | None) -> DepartmentMode | None:
        """The nearest setting from the department upwards; None: nobody ever set one."""
        current = department_id
        while current is not None:
            if current in self.own:
                return self.own[current]
            current = self.parents.get(current)
        return self.own.get(None)

    def mode_of(self, department_id: int) -> str:
        """Pilot, roll-out or enforce; enforce where nothing was set."""
        row = self.row_of(department_id)
        return str(row.mode) if row is not None else DepartmentMode.Mode.ENFORCE.value

    def spares(self, department_id: int, request_id: int) -> str | None:
        """The mode that keeps this work from being taken back, or None where it may be."""
        row = self.row_of(department_id)
        if row is None or row.mode == DepartmentMode.Mode.ENFORCE:
            return None
        if row.mode == DepartmentMode.Mode.ROLLOUT and (row.willing or request_id in self.consenting):
            return None
        return str(row.mode)


def minimum_runs(rows: Iterable[DepartmentMode] | None = None) -> dict[int, MinimumRun]:
    """For how long work is left alone after its start, by department that says so itself, for the engine; read where
    ``rows`` are not given.
    """
    found = DepartmentMode.objects.exclude(department=None) if rows is None else rows
    return {
        row.department_id: MinimumRun(
            _milliseconds(row.min_run_preempt_s), _milliseconds(row.min_run_reclaim_s)
        )
        for row in found
        if row.department_id is not None and row.has_minimum
    }


def _milliseconds(seconds: int | None) -> int | None:
    return None if seconds is None else seconds * MS_PER_SECOND


def spared_departments(modes: Modes | None = None) -> frozenset[int]:
    """Departments whose work is not taken back, unless its request takes part in a roll-out by itself."""
    modes = modes or Modes.load()
    return frozenset(pk for pk in modes.parents if modes.spares(pk, 0) is not None)


# -- for the snapshot ----------------------------------------------------------------------------------------


def kept_places(at: datetime | None = None) -> tuple[Kept, ...]:
    """Places kept now for requests that wait (or for work that is being moved), oldest first."""
    rows = (
        KeptPlace.objects.filter(ended_at=None, until__gt=at or now())
        .filter(
            Q(request__state=CapacityRequest.State.QUEUED)
            | ~Q(moving__state=Allocation.State.ENDED) & Q(moving__isnull=False)
        )
        .order_by("id")
    )
    return tuple(Kept(row.request_id, members_of(row.members), to_ms(row.until)) for row in rows)


def ending_allocations() -> dict[int, int | None]:
    """Allocations that are being taken back whole, and when each is stopped at the latest (milliseconds): their
    places come back without another eviction.
    """
    rows = ReclaimCase.objects.filter(closed_at=None, members=[])
    return {
        allocation_id: None if until is None else to_ms(until)
        for allocation_id, until in rows.values_list("allocation_id", "grace_until")
    }


def promised_allocations() -> dict[int, int]:
    """Allocation → the request that gets its places: one preemptor per victim."""
    rows = ReclaimCase.objects.filter(closed_at=None, for_request__isnull=False)
    return dict(rows.values_list("allocation_id", "for_request_id"))


@dataclass(frozen=True, slots=True)
class Displaced:
    """How often a request was displaced within a day, when last, and by which departments."""

    times: int
    last_at: datetime
    by: tuple[int, ...]


def evictions_by_request(request_ids: Iterable[int] | None = None) -> dict[int, Displaced]:
    """Displacements of requests that were carried out or are on their way (None: of all that had any)."""
    rows = ReclaimCase.objects.filter(
        cause=ReclaimCase.Cause.PREEMPTED, noticed_at__gt=now() - COUNTED_FOR
    ).exclude(step=ReclaimCase.Step.WITHDRAWN)
    if request_ids is not None:
        rows = rows.filter(allocation__request_id__in=list(request_ids))
    found: dict[int, Displaced] = {}
    for request_id, noticed_at, department_id in rows.order_by("noticed_at", "id").values_list(
        "allocation__request_id", "noticed_at", "for_request__department_id"
    ):
        assert noticed_at is not None  # filtered by it
        before = found.get(request_id)
        by = set(before.by if before else ()) | ({department_id} if department_id is not None else set())
        found[request_id] = Displaced((before.times if before else 0) + 1, noticed_at, tuple(sorted(by)))
    return found


# -- maintenance ---------------------------------------------------------------------------------------------


def closed_windows(at: datetime | None = None) -> dict[int, tuple[tuple[int, int], ...]]:
    """Node → spans in milliseconds when it is out of service by an open maintenance window, in order of time.

    Nothing that would still run when one begins is to be placed there.
    """
    moment = at or now()
    windows = MaintenanceWindow.objects.filter(state__in=WINDOW_OPEN, ends_at__gt=moment).prefetch_related(
        "node_rows"
    )
    spans: dict[int, set[tuple[int, int]]] = {}
    sites: dict[int, list[int]] = {}
    rows = list(windows)
    wanted = {row.site_id for row in rows if row.site_id is not None}
    for node_id, site_id in Node.objects.filter(cluster__site_id__in=wanted).values_list(
        "id", "cluster__site_id"
    ):
        sites.setdefault(site_id, []).append(node_id)
    for row in rows:
        span = (to_ms(row.starts_at), to_ms(row.ends_at))
        named = [one.node_id for one in row.node_rows.all()]
        for node_id in {*named, *sites.get(row.site_id or 0, [])}:
            spans.setdefault(node_id, set()).add(span)
    return {node_id: tuple(sorted(found)) for node_id, found in spans.items()}


def windows_of(node: Node) -> list[MaintenanceWindow]:
    """Open maintenance windows of one node, by its name or through its site, in order of time."""
    mine = Q(node_rows__node=node) | Q(site=node.cluster.site)
    found = MaintenanceWindow.objects.filter(mine, state__in=WINDOW_OPEN).distinct()
    return list(found.order_by("starts_at", "id")[:5])
