"""Nodes, cards and slices as the engine reads them: rows of columns, never instances."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

from django.db.models import Q

from pool.engine import mig, model
from pool.models import Cluster, Dataset, Gpu, MigSlice, Node, NodeFabric, NodeStorage
from quotas.engine.charge import mig_charge
from quotas.models import GpuFlavour

K = TypeVar("K")
NOMINAL_TOLERANCE = 0.9
"""A card that reports at least this part of its flavour's memory counts as having all of it: drivers keep
some.
"""
NODE_COLUMNS = (
    "id", "name", "cluster_id", "cluster__site__code", "cpu_milli", "memory_mib", "driver", "cuda", "row", "rack",
    "switch", "nvlink_domain", "test_only", "health", "schedulable", "facts__can__containers__ok", "cluster__executor",
    "cluster__settings__image_runner",
)  # fmt: skip
GPU_COLUMNS = (
    "id", "node_id", "flavour_id", "index", "uuid", "memory_mib", "nvlink", "mig_enabled", "condition",
    "condition_reason", "cordoned", "foreign_use",
)  # fmt: skip


class NodeCondition(Protocol):
    """What decides whether a node takes work; a row and an instance both have it."""

    @property
    def schedulable(self) -> str: ...
    @property
    def health(self) -> str: ...


class GpuCondition(Protocol):
    """What decides whether a card takes work."""

    @property
    def condition(self) -> str: ...
    @property
    def condition_reason(self) -> str: ...
    @property
    def cordoned(self) -> bool: ...
    @property
    def foreign_use(self) -> Any: ...


class _Table(NamedTuple):
    """A flavour with its MIG table looked up once."""

    flavour: GpuFlavour
    geometry: mig.Geometry | None

    @property
    def memory_slices(self) -> int:
        return self.flavour.memory_slices or (self.geometry.memory_slices if self.geometry else 8)

    @property
    def compute_slices(self) -> int:
        return self.flavour.compute_slices or (self.geometry.compute_slices if self.geometry else 7)


def node_blocked(node: NodeCondition) -> str | None:
    """The code why nothing new is placed on a node, or None."""
    if node.schedulable != Node.Schedulable.OPEN:
        return str(node.schedulable)
    if node.health == Node.Health.UNKNOWN:
        return "no_agent"
    return None if node.health in (Node.Health.OK, Node.Health.LATE) else str(node.health)


def gpu_blocked(gpu: GpuCondition) -> str | None:
    """The code why nothing new is placed on a card, or None."""
    if gpu.condition != Gpu.Condition.OK:
        return gpu.condition_reason or str(gpu.condition)
    if gpu.cordoned:
        return "cordoned"
    return "foreign_use" if gpu.foreign_use else None


def facts_of(flavour: GpuFlavour) -> model.FlavourFacts:
    """A flavour as the engine reads it."""
    return model.FlavourFacts(
        code=flavour.code,
        memory_mib=flavour.memory_mib,
        nvlink=flavour.nvlink,
        fp8=flavour.fp8,
        geometry=mig.geometry(flavour.mig_table) if flavour.mig_table else None,
    )


def nodes_read(
    flavours: Iterable[GpuFlavour], node_ids: Collection[int] | None = None
) -> dict[int, model.Node]:
    """The nodes in service by id (all, or those of ``node_ids`` that are), with their cards, slices, networks,
    storage and data sets: six queries.
    """
    tables = {one.pk: _Table(one, mig.geometry(one.mig_table) if one.mig_table else None) for one in flavours}
    nodes = Node.objects.exclude(schedulable=Node.Schedulable.RETIRED)
    cards = Gpu.objects.exclude(condition=Gpu.Condition.RETIRED).filter(flavour__isnull=False)
    of_nodes, of_cards = Q(), Q()
    if node_ids is not None:
        nodes, cards = nodes.filter(pk__in=node_ids), cards.filter(node_id__in=node_ids)
        of_nodes, of_cards = Q(node_id__in=node_ids), Q(gpu__node_id__in=node_ids)
    slices: dict[int, list[Any]] = {}
    for one in MigSlice.objects.filter(of_cards, gone_at=None).order_by("gpu_id", "start"):
        slices.setdefault(one.gpu_id, []).append(one)
    by_node: dict[int, list[Any]] = {}
    for gpu in cards.order_by("id").values_list(*GPU_COLUMNS, named=True):
        by_node.setdefault(gpu.node_id, []).append(gpu)
    fabrics: dict[int, list[model.Fabric]] = {}
    for node_id, kind, gbps, domain in (
        NodeFabric.objects.filter(of_nodes)
        .order_by("kind")
        .values_list("node_id", "kind", "speed_gbit_s", "domain")
    ):
        fabrics.setdefault(node_id, []).append(model.Fabric(kind, gbps, domain))
    storage = _sets(NodeStorage.objects.filter(of_nodes).values_list("node_id", "kind"))
    cached = Dataset.objects.filter(cached_on__isnull=False)
    if node_ids is not None:
        cached = cached.filter(cached_on__in=node_ids)
    datasets = _sets(cached.values_list("cached_on", "code"))
    by_site = _sets(Dataset.objects.filter(site__isnull=False).values_list("site__code", "code"))
    return {
        row.id: _node(
            row,
            by_node.get(row.id, []),
            tables,
            slices,
            (
                tuple(fabrics.get(row.id, ())),
                storage.get(row.id),
                datasets.get(row.id, frozenset()) | by_site.get(row.cluster__site__code, frozenset()),
            ),
        )
        for row in nodes.order_by("id").values_list(*NODE_COLUMNS, named=True)
    }


def _sets(rows: Iterable[tuple[K, str]]) -> dict[K, frozenset[str]]:
    found: dict[K, set[str]] = {}
    for key, value in rows:
        found.setdefault(key, set()).add(value)
    return {key: frozenset(values) for key, values in found.items()}


def _node(
    row: Any,
    cards: list[Any],
    tables: Mapping[int, _Table],
    slices: Mapping[int, list[Any]],
    extras: tuple[tuple[model.Fabric, ...], frozenset[str] | None, frozenset[str] | None],
) -> model.Node:
    groups = _link_groups(cards)
    told = any(gpu.nvlink for gpu in cards)
    linked = any(gpu.nvlink.get("links") or gpu.nvlink.get("peers") for gpu in cards if gpu.nvlink)
    place = (row.row, row.rack, row.switch)
    fabrics, storage, datasets = extras
    if row.nvlink_domain and not any(one.kind == "nvlink" for one in fabrics):
        fabrics = (*fabrics, model.Fabric("nvlink", 0, row.nvlink_domain))
    return model.Node(
        id=row.id,
        name=row.name,
        cluster_id=row.cluster_id,
        site=row.cluster__site__code,
        gpus=tuple(
            _gpu(gpu, tables[gpu.flavour_id], groups[gpu.uuid], slices.get(gpu.id, ())) for gpu in cards
        ),
        cpu_milli=row.cpu_milli or None,
        memory_mib=row.memory_mib or None,
        driver=model.version_of(row.driver),
        cuda=model.version_of(row.cuda),
        nvlink=linked if told else any(tables[gpu.flavour_id].flavour.nvlink for gpu in cards),
        blocked=node_blocked(row),
        cpu_only=row.test_only,
        domain=place if any(place) else (),
        fabrics=fabrics,
        storage=storage or frozenset(),
        datasets=datasets or frozenset(),
        caution=row.health == Node.Health.LATE,
        no_images=_no_images(row),
    )


def _no_images(row: Any) -> bool:
    """Whether nothing on a node runs container images, as its agent or its cluster's settings say."""
    if row.cluster__executor == Cluster.Executor.SLURM:
        return not row.cluster__settings__image_runner
    return row.cluster__executor == Cluster.Executor.AGENT and row.facts__can__containers__ok is False


def _gpu(gpu: Any, table: _Table, group: int, slices: Iterable[MigSlice]) -> model.Gpu:
    flavour = table.flavour
    has = gpu.memory_mib or flavour.memory_mib
    nominal = has >= flavour.memory_mib * NOMINAL_TOLERANCE
    return model.Gpu(
        id=gpu.id,
        index=gpu.index,
        flavour=flavour.code,
        memory_mib=max(has, flavour.memory_mib) if nominal else has,
        blocked=gpu_blocked(gpu),
        mig=gpu.mig_enabled,
        slices=tuple(_slice(one, table) for one in slices),
        link_group=group,
    )


def _slice(one: MigSlice, table: _Table) -> model.Slice:
    slots = table.memory_slices
    return model.Slice(
        id=one.pk,
        profile=one.profile,
        span=(1000 * one.start // slots, min(1000, 1000 * one.end // slots)),
        charge_milli=mig_charge(min(one.compute_slices, table.compute_slices), table.compute_slices),
        memory_mib=one.memory_mib,
    )


def _link_groups(cards: list[Any]) -> dict[str, int]:
    """Cards that reach each other over NVLink share a number (the smallest index among them)."""
    if not any((gpu.nvlink or {}).get("peers") for gpu in cards):
        return {gpu.uuid: 0 for gpu in cards}
    group = {gpu.uuid: gpu.index for gpu in cards}
    for gpu in cards:
        for peer in (gpu.nvlink or {}).get("peers") or ():
            if peer in group and group[peer] != group[gpu.uuid]:
                low, high = sorted((group[peer], group[gpu.uuid]))
                group = {uuid: low if number == high else number for uuid, number in group.items()}
    return group
