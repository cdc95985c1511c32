"""Nodes as outside systems show them: signs of life, drains in step both ways, cards, and the import of new ones.

Who closed a node decides who opens it: a drain over there closes it here and its end opens it again; a cordon of
people here closes it there and its end opens it there. Where both closed it, both must open it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import structlog
from django.db import transaction

from pool.executors.base import CORDONS, ExecutorFailure, Found, PolledExecutor
from pool.models import Cluster, Gpu, Node
from pool.services.agent_inbox import node_heard
from pool.services.capacity import capacity_refresh
from pool.services.fleet_import import NAME
from pool.services.inventory_report import inventory_sync
from pool.services.nodes import node_cordon, node_uncordon, require_pool_admin
from portal.kernel.clock import now
from portal.kernel.errors import Conflict
from portal.kernel.models import advance
from portal.ops.actor import Actor, system
from portal.ops.services import audit_record

log = structlog.get_logger(__name__)
MARK = "gpupool:"
"""Begins the reason of whatever we closed over there."""
S = Node.Schedulable


def outside_actor(cluster: Cluster) -> Actor:
    """Who acts when an outside system decided something."""
    return system(f"{cluster.executor} {cluster.code}", via="task")


def nodes_take(*, cluster: Cluster, executor: PolledExecutor, found: list[Found], at: datetime) -> int:
    """Bring the known nodes of a cluster in line with a look; returns how many are up. New nodes are not added: that
    is an administrator's import."""
    known = {node.name: node for node in Node.objects.filter(cluster=cluster).exclude(schedulable=S.RETIRED)}
    # One object for all: else each of a thousand nodes reads its cluster, every look.
    for row in known.values():
        row.cluster = cluster
    up = [item for item in found if item.up and item.name in known]
    well = [known[item.name].pk for item in up if known[item.name].health == Node.Health.OK]
    Node.objects.filter(pk__in=well, health=Node.Health.OK).update(last_heartbeat_at=at)
    for item in found:
        node = known.get(item.name)
        if node is None:
            continue
        if item.up and node.health != Node.Health.OK:
            with transaction.atomic():
                node_heard(node=node, at=at)
        _facts(node, item)
        _in_step(node, item, executor)
    return len(up)


def _digest(item: Found) -> str:
    said = [item.gpus, item.cpu_milli, item.memory_mib, item.address, item.labels, item.facts]
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _facts(node: Node, item: Found) -> None:
    """What it is made of, written where it changed since the last look."""
    digest = _digest(item)
    if (node.facts or {}).get("outside_digest") == digest:
        return
    with transaction.atomic():
        locked = Node.objects.select_for_update(of=("self",), no_key=True).get(pk=node.pk)
        locked.cluster = node.cluster
        values: dict[str, Any] = {
            "facts": {**item.facts, "outside_digest": digest},
            "labels": {**locked.labels, **item.labels},
        }
        for name in ("cpu_milli", "memory_mib", "address"):
            if getattr(item, name):
                values[name] = getattr(item, name)
        advance(Node.objects.filter(pk=node.pk), **values)
        locked.refresh_from_db()
        if item.gpus is not None:
            inventory_sync(node=locked, gpus=list(item.gpus), nvml_ok=True)


def _in_step(node: Node, item: Found, executor: PolledExecutor) -> None:
    """Close and open it here or there, as the one who closed it says."""
    if CORDONS not in executor.can or not item.up:
        return
    actor = outside_actor(node.cluster)
    ours_there = not item.open and item.reason.startswith(MARK)
    theirs_here = node.schedulable == S.CORDONED and node.schedulable_by_name == actor.name
    try:
        if not item.open and not ours_there and node.schedulable == S.OPEN:
            node_cordon(acting_user=actor, node=node, reason=item.reason or "closed over there")
        elif item.open and theirs_here:
            node_uncordon(acting_user=actor, node=node, reason="open again over there")
        elif item.open and node.schedulable != S.OPEN:
            executor.cordon(node=node, reason=f"{MARK} {node.schedulable_reason}"[:200])
        elif ours_there and (node.schedulable == S.OPEN or theirs_here):
            executor.uncordon(node=node)
    except Conflict:  # somebody decided about it at this moment: the next look sees what
        pass
    except ExecutorFailure as error:
        log.warning("cordon_not_ordered", node=node.name, code=error.code)


# -- import -----------------------------------------------------------------------------------------------


@dataclass
class NodePlan:
    """What an import of a cluster's nodes would do. ``changed`` is {name: {field: (before, after)}}."""

    new: list[Found] = field(default_factory=list)
    known: list[str] = field(default_factory=list)
    changed: dict[str, dict[str, tuple[Any, Any]]] = field(default_factory=dict)
    gone: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def gpus(self) -> int:
        """Cards of the new nodes."""
        return sum(len(item.gpus or ()) for item in self.new)


def nodes_plan(*, cluster: Cluster, found: list[Found]) -> NodePlan:
    """Compare a discovery with the inventory; writes nothing."""
    plan = NodePlan()
    known = {node.name: node for node in Node.objects.filter(name__in=[item.name for item in found])}
    for item in found:
        node = known.get(item.name)
        if not NAME.match(item.name):
            plan.refused[item.name] = "node_name"
        elif node is None:
            plan.new.append(item)
        elif node.cluster_id != cluster.pk:
            plan.refused[item.name] = "node_of_another_cluster"
        else:
            plan.known.append(item.name)
            changes = _changes(node, item)
            if changes:
                plan.changed[item.name] = changes
    names = {item.name for item in found}
    gone = Node.objects.filter(cluster=cluster).exclude(name__in=names).exclude(schedulable=S.RETIRED)
    plan.gone = list(gone.order_by("name").values_list("name", flat=True))
    return plan


def _changes(node: Node, item: Found) -> dict[str, tuple[Any, Any]]:
    out: dict[str, tuple[Any, Any]] = {}
    for name in ("cpu_milli", "memory_mib", "address"):
        if getattr(item, name) and getattr(item, name) != getattr(node, name):
            out[name] = (getattr(node, name), getattr(item, name))
    if item.gpus is not None:
        cards = node.gpus.exclude(condition__in=[Gpu.Condition.VANISHED, Gpu.Condition.RETIRED]).count()
        if cards != len(item.gpus):
            out["gpus"] = (cards, len(item.gpus))
    return out


def nodes_import(
    *, acting_user: Actor, cluster: Cluster, found: list[Found], names: list[str] | None = None
) -> NodePlan:
    """Add the new nodes of a discovery (all, or those of ``names``); known ones are brought up to date by every look.
    Done twice, done once."""
    require_pool_admin(acting_user)
    with transaction.atomic():
        plan = nodes_plan(cluster=cluster, found=found)
        if names is not None:
            plan.new = [item for item in plan.new if item.name in names]
        at = now()
        for item in plan.new:
            node = Node.objects.create(
                name=item.name,
                cluster=cluster,
                hostname=item.name,
                address=item.address,
                cpu_milli=item.cpu_milli,
                memory_mib=item.memory_mib,
                labels=item.labels,
                facts={**item.facts, "outside_digest": _digest(item)},
                health=Node.Health.OK if item.up else Node.Health.UNKNOWN,
                health_since=at,
                last_heartbeat_at=at if item.up else None,
            )
            if item.gpus:
                inventory_sync(node=node, gpus=list(item.gpus), nvml_ok=True)
        if plan.new:
            audit_record(
                acting_user=acting_user,
                action="cluster.nodes_imported",
                subject=cluster,
                after={"nodes": [item.name for item in plan.new][:200], "gpus": plan.gpus},
            )
            capacity_refresh()
    return plan
