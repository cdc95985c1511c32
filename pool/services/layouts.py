"""New layouts of cards (MIG): what the plan wants on a drained card, as a task.

A node whose agent can do it is told to: only while nobody holds the card, which is out of placement meanwhile. Where
none can, or it failed, the task is an administrator's: it names the commands, an incident tells. Either way the task
closes by itself when the card reports the slices.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.db import transaction
from django.utils.translation import gettext_lazy as _

from pool.engine.model import Layout
from pool.executors.base import executor_for
from pool.models import AgentCommand, Cluster, Gpu, LayoutTask, Lease, MigSlice, Node, SchedulerCycle
from pool.services.capacity import capacity_refresh
from pool.services.clusters import outside
from pool.services.commands import node_poke
from pool.services.nodes import require_pool_admin
from portal.kernel.clock import now
from portal.kernel.errors import Conflict
from portal.kernel.models import advance
from portal.ops.actor import Actor, system
from portal.ops.services import audit_record, incident_open, incident_resolve
from quotas.models import CapacityRequest

State = LayoutTask.State
SCHEDULER = system("scheduler")
LAYOUT = "layout"
CORDON = "new layout"


def layout_ask(*, layout: Layout, cycle: SchedulerCycle | None = None) -> LayoutTask:
    """Ask for a layout once; a different wish for the same card replaces the open one."""
    profiles = [[profile, start] for profile, start in layout.profiles]
    with transaction.atomic():
        gpu = (
            Gpu.objects.select_for_update(of=("self",), no_key=True)
            .select_related("node")
            .get(pk=layout.gpu_id)
        )
        found = LayoutTask.objects.filter(gpu=gpu, state=State.OPEN).first()
        if found is not None and found.profiles == profiles:
            return found
        if found is not None:
            _close(found, State.DROPPED, "replaced")
        made = LayoutTask.objects.create(
            gpu=gpu, for_request_id=layout.for_request_id, cycle=cycle, profiles=profiles
        )
        incident_open(
            kind="mig_layout_wanted",
            dedupe_key=_key(gpu),
            subject=gpu,
            facts={
                "node": gpu.node.name,
                "index": gpu.index,
                "profiles": profiles,
                "commands": commands(made),
            },
        )
    return made


def commands(task: LayoutTask) -> list[str]:
    """What an administrator runs: on the node, by the card's UUID; on Kubernetes MIG Manager is asked, by the name of a
    configuration that the site has."""
    if task.gpu.node.cluster.executor == Cluster.Executor.KUBERNETES:
        return [f"python manage.py mig_layout {task.gpu.node.name} CONFIGURATION --wait 600"]
    card = task.gpu.uuid
    wanted = ",".join(f"{profile}:{start}" for profile, start in task.profiles)
    return [
        f"nvidia-smi -i {card} -mig 1",
        f"nvidia-smi mig -i {card} -dci",
        f"nvidia-smi mig -i {card} -dgi",
        f"nvidia-smi mig -i {card} -cgi {wanted} -C",
    ]


def node_layout(*, node: Node) -> tuple[str, str]:
    """Configuration and state of a node whose layouts a program over there keeps (MIG Manager)."""
    ask = getattr(executor_for(node.cluster), "layout", None)
    if ask is None:
        raise Conflict(code="layouts_not_kept_there", detail=_("No program there keeps its MIG layouts."))
    with outside():
        found = ask(node=node)
    return found.config, found.state


def node_layout_set(*, acting_user: Actor, node: Node, config: str) -> tuple[str, str]:
    """Ask that program for another configuration of the whole node; on a closed node without work alone. Conflict or
    503 with its code where it does not take it; asked twice, asked once."""
    require_pool_admin(acting_user)
    was, state = node_layout(node=node)
    with outside():
        found = executor_for(node.cluster).layout_set(node=node, config=config)  # type: ignore[attr-defined]
    with transaction.atomic():
        audit_record(
            acting_user=acting_user,
            action="node.mig_config",
            subject=node,
            before={"config": was, "state": state},
            after={"config": found.config, "state": found.state},
        )
    return found.config, found.state


def layout_order(task: LayoutTask) -> bool:
    """Have the node's agent split the card; False where it cannot, was told before, or somebody holds the card."""
    with transaction.atomic():
        gpu = (
            Gpu.objects.select_for_update(of=("self",), no_key=True)
            .select_related("node__cluster")
            .get(pk=task.gpu_id)
        )
        can = ((gpu.node.facts.get("can") or {}).get("mig") or {}).get("ok")
        by_agent = gpu.node.cluster.executor == Cluster.Executor.AGENT
        told = AgentCommand.objects.filter(kind=LAYOUT, payload__task=str(task.uid)).exists()
        held = Lease.objects.filter(gpu=gpu, ended_at=None).exists()
        if not (can and by_agent) or told or held or gpu.cordoned or gpu.node.health != gpu.node.Health.OK:
            return False
        advance(Gpu.objects.filter(pk=gpu.pk), cordoned=True, cordon_reason=CORDON)
        payload = {"task": str(task.uid), "gpu_uuid": gpu.uuid, "profiles": task.profiles}
        AgentCommand.objects.create(node=gpu.node, kind=LAYOUT, payload=payload)
        audit_record(
            acting_user=SCHEDULER, action="layout.ordered", subject=gpu, after={"profiles": task.profiles}
        )
        node_id = gpu.node_id
        transaction.on_commit(lambda: node_poke(node_id))
    return True


def layout_answered(payload: dict[str, Any]) -> None:
    """What an agent said of an order: a card that was not split is placed on again, and a person is to look."""
    kind = payload.get("kind")
    data = payload.get("data") or {}
    if kind not in ("layout_done", "layout_failed"):
        return
    task = LayoutTask.objects.select_related("gpu__node").filter(uid=_uid(data.get("task"))).first()
    if task is None or str(task.gpu.node.uid) != payload.get("node_uid"):
        return
    if kind == "layout_failed":
        _uncordon(task.gpu)
        incident_open(
            kind="mig_layout_failed",
            dedupe_key=f"{_key(task.gpu)}:failed",
            subject=task.gpu,
            facts={
                "node": task.gpu.node.name,
                "index": task.gpu.index,
                "profiles": task.profiles,
                "code": str(data.get("code"))[:64],
                "detail": str(data.get("detail"))[:500],
                "commands": commands(task),
            },
        )


def _uid(text: Any) -> UUID | None:
    try:
        return UUID(str(text))
    except ValueError:
        return None


def _uncordon(gpu: Gpu) -> None:
    rows = Gpu.objects.filter(pk=gpu.pk, cordoned=True, cordon_reason=CORDON)
    if advance(rows, cordoned=False, cordon_reason=""):
        capacity_refresh()


def layouts_settle() -> int:
    """Close tasks whose card has the wanted slices by now, or whose request waits no more; have agents do those
    that they can. Returns how many were closed."""
    closed = 0
    for task in (
        LayoutTask.objects.filter(state=State.OPEN).select_related("gpu", "for_request").order_by("id")
    ):
        has = sorted([one.profile, one.start] for one in MigSlice.objects.filter(gpu=task.gpu, gone_at=None))
        if has == sorted(task.profiles):
            closed += _close(task, State.DONE, "the card has these slices")
        elif task.for_request is not None and task.for_request.state != CapacityRequest.State.QUEUED:
            closed += _close(task, State.DROPPED, "nobody waits for it")
        else:
            layout_order(task)
    return closed


def _close(task: LayoutTask, state: str, note: str) -> bool:
    with transaction.atomic():
        rows = LayoutTask.objects.filter(pk=task.pk, state=State.OPEN)
        if not advance(rows, state=state, closed_at=now()):
            return False
        incident_resolve(dedupe_key=_key(task.gpu), note=note)
        incident_resolve(dedupe_key=f"{_key(task.gpu)}:failed", note=note)
        AgentCommand.objects.filter(kind=LAYOUT, payload__task=str(task.uid), acked_at=None).update(
            cancelled_at=now()
        )
        _uncordon(task.gpu)
    return True


def _key(gpu: Gpu) -> str:
    return f"mig_layout:{gpu.uid}"
