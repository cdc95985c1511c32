"""Tell quotas what exists: installed and healthy capacity per flavour, from per-GPU rows, never nodes × count."""

from __future__ import annotations

import re
from typing import Any

from django.db import transaction
from django.db.models import Count, Q

from pool.models import Gpu, Node, NodeFabric, NodeStorage, Site
from portal.ops.outbox import outbox_add
from quotas.models import FlavourCapacity, PoolName
from quotas.services.capacity import capacity_write, pool_names_write

MILLI = 1000
LEVELS = ("row", "rack", "switch")


def healthy_gpus() -> Q:
    """GPUs that could take work now or after what holds them ends."""
    return (
        Q(condition=Gpu.Condition.OK, cordoned=False)
        & Q(node__schedulable=Node.Schedulable.OPEN)
        & Q(node__health__in=[Node.Health.OK, Node.Health.LATE, Node.Health.SUSPECT])
    )


def newest_cuda(told: set[str]) -> str:
    """The newest CUDA version among nodes, "" while any of them has not told its own (then nothing is refused)."""
    if not told or "" in told:
        return ""
    return max(told, key=_version)


def node_facts() -> dict[int, dict[str, Any]]:
    """What the nodes of each flavour offer, for wishes to be held against: sites with their number of nodes,
    fastest network of each kind, kinds of storage, the most nodes in one row, rack and on one switch, newest
    driver. Three queries.
    """
    fabrics: dict[int, list[tuple[str, int]]] = {}
    for node_id, kind, speed in NodeFabric.objects.values_list("node_id", "kind", "speed_gbit_s"):
        fabrics.setdefault(node_id, []).append((kind, speed))
    storage: dict[int, set[str]] = {}
    for node_id, kind in NodeStorage.objects.values_list("node_id", "kind"):
        storage.setdefault(node_id, set()).add(kind)
    rows = (
        Gpu.objects.filter(flavour__isnull=False)
        .exclude(condition=Gpu.Condition.RETIRED)
        .exclude(node__schedulable=Node.Schedulable.RETIRED)
        .order_by("flavour_id", "node_id")
        .values_list(
            "flavour_id", "node_id", "node__cluster__site__code", "node__row", "node__rack", "node__switch",
            "node__driver", "node__nvlink_domain",
        ).distinct()
    )  # fmt: skip
    out: dict[int, dict[str, Any]] = {}
    places: dict[tuple[int, str, tuple[str, ...]], int] = {}
    for flavour_id, node_id, site, *path, driver, nvlink in rows:
        facts = out.setdefault(
            flavour_id, {"sites": {}, "fabrics": {}, "storage": [], "levels": {}, "driver": ""}
        )
        facts["sites"][site] = facts["sites"].get(site, 0) + 1
        for kind, speed in [*fabrics.get(node_id, ()), *([("nvlink", 0)] if nvlink else [])]:
            facts["fabrics"][kind] = max(facts["fabrics"].get(kind, 0), speed)
        facts["storage"] = sorted({*facts["storage"], *storage.get(node_id, ())})
        facts["driver"] = max(facts["driver"], driver, key=_version)
        for depth, level in enumerate(LEVELS, 1):
            if path[depth - 1]:
                key = (flavour_id, level, (site, *path[:depth]))
                places[key] = places.get(key, 0) + 1
                levels = facts["levels"]
                levels[level] = max(levels.get(level, 0), places[key])
    return out


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))


def capacity_refresh() -> None:
    """Recount all flavours in a few queries and write those that changed, with one outbox event."""
    with transaction.atomic():
        installed_rule = ~Q(condition=Gpu.Condition.RETIRED) & ~Q(node__schedulable=Node.Schedulable.RETIRED)
        counts = {
            row["flavour_id"]: (row["installed"], row["healthy"])
            for row in Gpu.objects.filter(flavour__isnull=False)
            .values("flavour_id")
            .annotate(
                installed=Count("id", filter=installed_rule), healthy=Count("id", filter=healthy_gpus())
            )
            .order_by("flavour_id")
        }
        largest: dict[int, int] = {}
        cuda: dict[int, set[str]] = {}
        for row in (
            Gpu.objects.filter(installed_rule, flavour__isnull=False)
            .values("flavour_id", "node_id", "node__cuda")
            .annotate(n=Count("id"))
            .order_by("flavour_id")
        ):
            largest[row["flavour_id"]] = max(largest.get(row["flavour_id"], 0), row["n"])
            cuda.setdefault(row["flavour_id"], set()).add(row["node__cuda"])
        facts = node_facts()
        known = {c.flavour_id: c for c in FlavourCapacity.objects.all()}
        changed: list[int] = []
        for flavour_id in sorted(set(counts) | set(known)):
            installed, healthy = counts.get(flavour_id, (0, 0))
            healthy = min(healthy, installed)
            old = known.get(flavour_id)
            newest = newest_cuda(cuda.get(flavour_id, set()))
            offers = facts.get(flavour_id, {})
            new = (installed * MILLI, healthy * MILLI, largest.get(flavour_id, 0), newest, offers)
            if old and new == (
                old.installed_milli,
                old.healthy_milli,
                old.largest_node_gpus,
                old.cuda_max,
                old.facts,
            ):
                continue
            capacity_write(
                flavour_id=flavour_id,
                installed_milli=new[0],
                healthy_milli=new[1],
                largest_node_gpus=new[2],
                cuda_max=newest,
                facts=offers,
            )
            changed.append(flavour_id)
        sites = {site.code: {"name": site.name} for site in Site.objects.all()}
        pool_names_write(kind=PoolName.Kind.SITE, rows=sites)
        if changed:
            outbox_add("pool.capacity_changed", {"flavours": changed})
