"""Tell quotas what exists: installed and healthy capacity per flavour, from per-GPU rows, never nodes × count."""

from __future__ import annotations

import re

from django.db import transaction
from django.db.models import Count, Q

from pool.models import Gpu, Node
from portal.ops.outbox import outbox_add
from quotas.models import FlavourCapacity
from quotas.services.capacity import capacity_write

MILLI = 1000


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
    return max(told, key=lambda text: tuple(int(part) for part in re.findall(r"\d+", text)))


def capacity_refresh() -> None:
    """Recount all flavours in two queries and write those that changed, with one outbox event."""
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
        known = {c.flavour_id: c for c in FlavourCapacity.objects.all()}
        changed: list[int] = []
        for flavour_id in sorted(set(counts) | set(known)):
            installed, healthy = counts.get(flavour_id, (0, 0))
            healthy = min(healthy, installed)
            old = known.get(flavour_id)
            newest = newest_cuda(cuda.get(flavour_id, set()))
            new = (installed * MILLI, healthy * MILLI, largest.get(flavour_id, 0), newest)
            if old and (old.installed_milli, old.healthy_milli, old.largest_node_gpus, old.cuda_max) == new:
                continue
            capacity_write(
                flavour_id=flavour_id,
                installed_milli=new[0],
                healthy_milli=new[1],
                largest_node_gpus=new[2],
                cuda_max=newest,
            )
            changed.append(flavour_id)
        if changed:
            outbox_add("pool.capacity_changed", {"flavours": changed})
