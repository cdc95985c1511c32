"""The queue as the engine reads it: rows of columns, never instances."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime
from typing import Any, NamedTuple

from pool.engine import model
from portal.kernel.units import MS_PER_SECOND, to_ms
from quotas.models import CapacityRequest, UserLimit

COLUMNS = (
    "id", "uid", "state", "held", "requester_id", "department_id", "charge_milli", "flavour__code", "requirement",
    "options", "shape", "gpus_per_node", "nodes", "nodes_min", "fraction_milli", "fraction_mib", "mig_profile",
    "mig_count", "cpu_milli", "memory_mib", "start_at", "end_at", "deadline_at", "duration_s", "work_class",
    "priority", "interruptible", "site_code", "datasets", "stage_datasets", "cuda_min", "queued_at", "fabric",
    "fabric_gbit_s", "storage", "domain_required", "domain_preferred", "is_service", "head_id", "run_kind",
)  # fmt: skip
LEVELS = {"row": 1, "rack": 2, "switch": 3}
"""Depth of a level of places in ``Node.domain`` (row, rack, switch)."""


class Asked(NamedTuple):
    """A request in line: as the engine reads it, with what is written and told beside."""

    item: model.Request
    uid: str
    requester_id: int


class Holding(NamedTuple):
    """What a request that was allocated counts for its person's limit."""

    requester_id: int
    charge_milli: int


def requests_read(
    ids: Collection[int] | None = None,
) -> tuple[dict[int, Asked], dict[int, Holding]]:
    """(in line, holding GPUs) by request id: all, or those of ``ids``. Held back ones are in neither."""
    rows = CapacityRequest.objects.all()
    if ids is not None:
        rows = rows.filter(pk__in=ids)
    waiting = rows.filter(state=CapacityRequest.State.QUEUED, held="").order_by("id")
    asked = {
        row.id: Asked(item_of(row, row.flavour__code), str(row.uid), row.requester_id)
        for row in waiting.values_list(*COLUMNS, named=True)
    }
    holding = rows.filter(state=CapacityRequest.State.ALLOCATED)
    held = {
        pk: Holding(requester_id, charge)
        for pk, requester_id, charge in holding.values_list("id", "requester_id", "charge_milli")
    }
    return asked, held


def request_item(request: CapacityRequest) -> model.Request:
    """A capacity request as the engine reads it; works on unsaved ones too (``pk`` 0 then)."""
    return item_of(request, request.flavour.code if request.flavour is not None else None)


def item_of(row: Any, named: str | None) -> model.Request:
    """The engine's request from an instance or a row with its columns; ``named`` is its flavour's code."""
    shape = str(row.shape)
    requirement = row.requirement or {}
    fraction = shape == "fraction"
    return model.Request(
        id=row.id or 0,
        department_id=row.department_id,
        flavours=() if shape == "cpu" else ((named,) if named else tuple(row.options or ())),
        shape=shape,  # type: ignore[arg-type]
        per_node=0 if shape == "cpu" else row.mig_count if shape == "mig" else row.gpus_per_node,
        nodes=1 if shape == "mig" else row.nodes,
        milli=(row.fraction_milli or 0) if fraction else 0,
        share_mib=(row.fraction_mib or 0) if fraction else 0,
        profile=row.mig_profile,
        cpu_milli=row.cpu_milli,
        memory_mib=row.memory_mib,
        min_gpu_mib=int(requirement.get("memory_mib") or 0),
        nvlink=bool(requirement.get("nvlink")),
        fp8=bool(requirement.get("fp8")),
        min_driver=model.version_of(str(requirement.get("driver") or "")),
        min_cuda=model.version_of(row.cuda_min or ""),
        site=row.site_code,
        ranked=named is not None or bool(requirement.get("models")),
        job_class=str(row.work_class),
        priority=row.priority,
        interruptible=row.interruptible,
        duration_ms=_duration(row),
        queued_at=_ms(row.queued_at) or 0,
        start_at=_ms(row.start_at),
        user_id=row.requester_id,
        min_nodes=row.nodes_min if shape != "mig" else None,
        domain_required=LEVELS.get(row.domain_required),
        domain_preferred=LEVELS.get(row.domain_preferred),
        fabric=str(row.fabric),
        min_fabric_gbps=row.fabric_gbit_s,
        storage=row.storage,
        datasets=tuple(sorted(str(one) for one in row.datasets or ())),
        stage_datasets=row.stage_datasets,
        image=row.run_kind == CapacityRequest.RunKind.IMAGE,
        deadline_at=_ms(row.deadline_at),
        apart=row.head_id if row.is_service else None,
    )


def _duration(row: Any) -> int | None:
    """Milliseconds it holds its places: at most the length of its window where it has one."""
    limits = [] if row.duration_s is None else [row.duration_s * MS_PER_SECOND]
    if row.start_at is not None and row.end_at is not None:
        limits.append(to_ms(row.end_at) - to_ms(row.start_at))
    return min(limits, default=None)


class PersonLimits(NamedTuple):
    """GPUs (milli) and requests that a person may hold at once; None = any number."""

    milli: int | None
    runs: int | None


def user_limits_read() -> dict[int | None, PersonLimits]:
    """Limits by person; None stands for everybody else."""
    rows = UserLimit.objects.values_list("user_id", "gpus_at_once_milli", "running_at_once")
    return {user_id: PersonLimits(milli, runs) for user_id, milli, runs in rows}


def held_now(holding: Mapping[int, Holding], running: Iterable[model.Running]) -> dict[int, int]:
    """Milli-GPU that each person holds: of what runs as much as it holds, which is less than was asked where an elastic
    gang started smaller; ``holding`` by request.
    """
    newest: dict[int, model.Running] = {}
    for one in running:
        known = newest.get(one.request_id)
        if one.request_id in holding and (known is None or known.allocation_id < one.allocation_id):
            newest[one.request_id] = one
    held: dict[int, int] = {}
    for pk, request in holding.items():
        milli = newest[pk].charge_milli if pk in newest else request.charge_milli
        held[request.requester_id] = held.get(request.requester_id, 0) + milli
    return held


def user_rooms(
    limits: Mapping[int | None, PersonLimits],
    held: Mapping[int, int],
    people: Collection[int],
    holding: Iterable[Holding] = (),
) -> dict[int, model.UserRoom]:
    """The room of those people who have a limit; ``held`` is what each holds now, ``holding`` request by request."""
    if not limits:
        return {}
    counted = any(one.runs is not None for one in limits.values())
    runs = Counter(one.requester_id for one in holding) if counted else Counter()
    rooms: dict[int, model.UserRoom] = {}
    for user_id in people:
        limit = limits[user_id] if user_id in limits else limits.get(None)
        if limit is not None and limit != (None, None):
            rooms[user_id] = model.UserRoom(limit.milli, held.get(user_id, 0), limit.runs, runs[user_id])
    return rooms


def _ms(moment: datetime | None) -> int | None:
    return None if moment is None else to_ms(moment)
