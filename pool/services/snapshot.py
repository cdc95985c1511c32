"""The database as the scheduler's snapshot: eleven queries, whatever the size of the pool.

What holds a place is every lease that is still open (the card was not seen free yet), whatever became of its
allocation; and every member of an open allocation for its host's CPU and memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from django.db.models import Sum

from pool.engine import mig, model
from pool.models import Allocation, AllocationMember, Gpu, Lease, LeaseSpan, MigSlice, Node, SchedulingPolicy
from portal.kernel.units import MS_PER_SECOND, to_ms
from quotas.engine.charge import mig_charge
from quotas.engine.flavours import FlavourPolicy
from quotas.models import CapacityRequest, GpuFlavour, UserLimit
from quotas.selectors.queue import queued_requests
from quotas.selectors.trees import quota_trees

NOMINAL_TOLERANCE = 0.9
"""A card that reports at least this part of its flavour's memory counts as having all of it: drivers keep
some.
"""


@dataclass(frozen=True, slots=True)
class Bundle:
    """The snapshot with what is needed to write its plan down."""

    snapshot: model.Snapshot
    flavour_ids: dict[str, int]
    requests: dict[int, CapacityRequest]


def policy_active() -> tuple[SchedulingPolicy | None, model.Policy]:
    """The published policy and its engine form; unknown keys in old versions are left aside."""
    row = SchedulingPolicy.objects.filter(active=True).first()
    values = dict(row.values) if row is not None else {}
    flavour = FlavourPolicy(
        when_can_borrow=values.pop("when_can_borrow", "next"),
        when_can_preempt=values.pop("when_can_preempt", "next"),
        preference=values.pop("preference", "borrowing_over_preemption"),
    )
    known = set(model.Policy.__dataclass_fields__) - {"flavour"}
    return row, model.Policy(flavour=flavour, **{key: values[key] for key in known & set(values)})


def snapshot_load(*, requests: Iterable[CapacityRequest] | None = None) -> Bundle:
    """Everything one decision looks at. ``requests`` defaults to the queue."""
    waiting = list(queued_requests() if requests is None else requests)
    flavours = list(GpuFlavour.objects.all())
    codes = {flavour.pk: flavour.code for flavour in flavours}
    trees = quota_trees()
    snapshot = model.Snapshot(
        nodes=_nodes({flavour.pk: flavour for flavour in flavours}),
        flavours=tuple(_facts(flavour) for flavour in flavours),
        running=running_load(codes),
        pending=tuple(request_item(request) for request in waiting),
        quotas={codes[pk]: tree.snapshot() for pk, tree in trees.items() if pk in codes},
        users=_users({request.requester_id for request in waiting}),
    )
    return Bundle(
        snapshot, {code: pk for pk, code in codes.items()}, {request.pk: request for request in waiting}
    )


def request_item(request: CapacityRequest) -> model.Request:
    """A capacity request as the engine reads it; works on unsaved ones too (``pk`` 0 then)."""
    shape = str(request.shape)
    named = request.flavour.code if request.flavour is not None else None
    requirement = request.requirement or {}
    count = request.mig_count if shape == "mig" else request.gpus_per_node
    fraction = shape == "fraction"
    return model.Request(
        id=request.pk or 0,
        department_id=request.department_id,
        flavours=() if shape == "cpu" else ((named,) if named else tuple(request.options or ())),
        shape=shape,  # type: ignore[arg-type]
        per_node=0 if shape == "cpu" else count,
        nodes=1 if shape == "mig" else request.nodes,
        milli=(request.fraction_milli or 0) if fraction else 0,
        share_mib=(request.fraction_mib or 0) if fraction else 0,
        profile=request.mig_profile,
        cpu_milli=request.cpu_milli,
        memory_mib=request.memory_mib,
        min_gpu_mib=int(requirement.get("memory_mib") or 0),
        nvlink=bool(requirement.get("nvlink")),
        fp8=bool(requirement.get("fp8")),
        min_driver=model.version_of(str(requirement.get("driver") or "")),
        min_cuda=model.version_of(request.cuda_min or ""),
        site=request.site_code,
        ranked=named is not None or bool(requirement.get("models")),
        job_class=str(request.work_class),
        priority=request.priority,
        interruptible=request.interruptible,
        duration_ms=None if request.duration_s is None else request.duration_s * MS_PER_SECOND,
        queued_at=_ms(request.queued_at) or 0,
        start_at=_ms(request.start_at),
        user_id=request.requester_id,
    )


def running_load(codes: dict[int, str]) -> tuple[model.Running, ...]:
    """What holds places: open allocations, and ended ones with a card that was not seen free yet."""
    leases = Lease.objects.filter(ended_at=None).order_by("id")
    spans: dict[int, list[model.Span]] = {}
    for lease_id, span in LeaseSpan.objects.filter(lease__ended_at=None, during__endswith=None).values_list(
        "lease_id", "span"
    ):
        spans.setdefault(lease_id, []).append((span.lower, span.upper))
    takes: dict[tuple[int, int], list[model.Take]] = {}
    for lease in leases:
        takes.setdefault((lease.allocation_id, lease.member), []).append(
            model.Take(
                gpu_id=lease.gpu_id,
                spans=tuple(sorted(spans.get(lease.pk, ()))),
                charge_milli=lease.charge,
                memory_mib=lease.memory_mib,
                slice_id=lease.mig_slice_id,
            )
        )
    holding = {allocation_id for allocation_id, _ in takes}
    open_rows = Allocation.objects.exclude(state=Allocation.State.ENDED)
    rows = {row.pk: row for row in open_rows} | {
        row.pk: row for row in Allocation.objects.filter(pk__in=holding, state=Allocation.State.ENDED)
    }
    members: dict[int, list[model.Member]] = {}
    for member in AllocationMember.objects.filter(allocation_id__in=rows).order_by("allocation_id", "number"):
        host = rows[member.allocation_id].state != Allocation.State.ENDED
        members.setdefault(member.allocation_id, []).append(
            model.Member(
                number=member.number,
                node_id=member.node_id,
                cpu_milli=member.cpu_milli if host else 0,
                memory_mib=member.memory_mib if host else 0,
                takes=tuple(takes.get((member.allocation_id, member.number), ())),
            )
        )
    return tuple(_running(row, tuple(members.get(pk, ())), codes) for pk, row in sorted(rows.items()))


def _running(row: Allocation, members: tuple[model.Member, ...], codes: dict[int, str]) -> model.Running:
    ends_at = row.expires_at
    if row.state == Allocation.State.STOPPING:
        ends_at = row.grace_until or row.stop_asked_at
    elif row.state == Allocation.State.ENDED:
        # Its card was not seen free since its node was lost: nobody knows when it will be.
        ends_at = None
    return model.Running(
        allocation_id=row.pk,
        request_id=row.request_id,
        department_id=row.department_id,
        flavour=codes.get(row.flavour_id or 0),
        charge_milli=row.charge_milli,
        members=members,
        interruptible=row.interruptible,
        priority=row.priority,
        started_at=_ms(row.started_at or row.reserved_at) or 0,
        ends_at=_ms(ends_at),
        user_id=row.holder_id,
    )


def _facts(flavour: GpuFlavour) -> model.FlavourFacts:
    return model.FlavourFacts(
        code=flavour.code,
        memory_mib=flavour.memory_mib,
        nvlink=flavour.nvlink,
        fp8=flavour.fp8,
        geometry=mig.geometry(flavour.mig_table) if flavour.mig_table else None,
    )


def node_blocked(node: Node) -> str | None:
    """The code why nothing new is placed on a node, or None."""
    if node.schedulable != Node.Schedulable.OPEN:
        return str(node.schedulable)
    if node.health == Node.Health.UNKNOWN:
        return "no_agent"
    return None if node.takes_work else str(node.health)


def gpu_blocked(gpu: Gpu) -> str | None:
    """The code why nothing new is placed on a card, or None."""
    if gpu.condition != Gpu.Condition.OK:
        return gpu.condition_reason or str(gpu.condition)
    if gpu.cordoned:
        return "cordoned"
    return "foreign_use" if gpu.foreign_use else None


def _nodes(flavours: dict[int, GpuFlavour]) -> tuple[model.Node, ...]:
    slices: dict[int, list[MigSlice]] = {}
    for one in MigSlice.objects.filter(gone_at=None).order_by("gpu_id", "start"):
        slices.setdefault(one.gpu_id, []).append(one)
    cards: dict[int, list[Gpu]] = {}
    for gpu in (
        Gpu.objects.exclude(condition=Gpu.Condition.RETIRED).filter(flavour__isnull=False).order_by("id")
    ):
        cards.setdefault(gpu.node_id, []).append(gpu)
    nodes = (
        Node.objects.exclude(schedulable=Node.Schedulable.RETIRED)
        .select_related("cluster__site")
        .order_by("id")
    )
    return tuple(_node(node, cards.get(node.pk, []), flavours, slices) for node in nodes)


def _node(
    node: Node, cards: list[Gpu], flavours: dict[int, GpuFlavour], slices: dict[int, list[MigSlice]]
) -> model.Node:
    groups = _link_groups(cards)
    gpus = tuple(
        _gpu(gpu, flavours[gpu.flavour_id or 0], groups[gpu.uuid], slices.get(gpu.pk, [])) for gpu in cards
    )
    told = any(gpu.nvlink for gpu in cards)
    linked = any(gpu.nvlink.get("links") or gpu.nvlink.get("peers") for gpu in cards if gpu.nvlink)
    return model.Node(
        id=node.pk,
        name=node.name,
        cluster_id=node.cluster_id,
        site=node.cluster.site.code,
        gpus=gpus,
        cpu_milli=node.cpu_milli or None,
        memory_mib=node.memory_mib or None,
        driver=model.version_of(node.driver),
        cuda=model.version_of(node.cuda),
        nvlink=linked if told else any(flavours[gpu.flavour_id or 0].nvlink for gpu in cards),
        blocked=node_blocked(node),
        cpu_only=node.test_only,
    )


def _gpu(gpu: Gpu, flavour: GpuFlavour, group: int, slices: list[MigSlice]) -> model.Gpu:
    has = gpu.memory_mib or flavour.memory_mib
    nominal = has >= flavour.memory_mib * NOMINAL_TOLERANCE
    return model.Gpu(
        id=gpu.pk,
        index=gpu.index,
        flavour=flavour.code,
        memory_mib=max(has, flavour.memory_mib) if nominal else has,
        blocked=gpu_blocked(gpu),
        mig=gpu.mig_enabled,
        slices=tuple(_slice(one, flavour) for one in slices),
        link_group=group,
    )


def _slice(one: MigSlice, flavour: GpuFlavour) -> model.Slice:
    table = mig.geometry(flavour.mig_table) if flavour.mig_table else None
    memory_slices = flavour.memory_slices or (table.memory_slices if table else 8)
    compute_slices = flavour.compute_slices or (table.compute_slices if table else 7)
    return model.Slice(
        id=one.pk,
        profile=one.profile,
        span=(1000 * one.start // memory_slices, min(1000, 1000 * one.end // memory_slices)),
        charge_milli=mig_charge(min(one.compute_slices, compute_slices), compute_slices),
        memory_mib=one.memory_mib,
    )


def _link_groups(cards: list[Gpu]) -> dict[str, int]:
    """Cards that reach each other over NVLink share a number (the smallest index among them)."""
    group = {gpu.uuid: gpu.index for gpu in cards}
    for gpu in cards:
        for peer in (gpu.nvlink or {}).get("peers") or ():
            if peer in group and group[peer] != group[gpu.uuid]:
                low, high = sorted((group[peer], group[gpu.uuid]))
                group = {uuid: low if number == high else number for uuid, number in group.items()}
    if not any((gpu.nvlink or {}).get("peers") for gpu in cards):
        return {gpu.uuid: 0 for gpu in cards}
    return group


def _users(user_ids: set[int]) -> dict[int, model.UserRoom]:
    if not user_ids:
        return {}
    own = {row.user_id: row.gpus_at_once_milli for row in UserLimit.objects.all()}
    held = dict(
        CapacityRequest.objects.filter(
            requester_id__in=user_ids, state=CapacityRequest.State.ALLOCATED
        ).values_list("requester_id").annotate(n=Sum("charge_milli"))
    )  # fmt: skip
    rooms: dict[int, model.UserRoom] = {}
    for user_id in user_ids:
        limit = own[user_id] if user_id in own else own.get(None)
        if limit is not None:
            rooms[user_id] = model.UserRoom(limit, held.get(user_id) or 0)
    return rooms


def _ms(moment: datetime | None) -> int | None:
    return None if moment is None else to_ms(moment)
