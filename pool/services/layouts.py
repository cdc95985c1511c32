"""New layouts of cards (MIG): what the plan wants on a drained card, as a task with the commands for it.

Splitting a card ends every process on it and needs root on the node, so it is left to an administrator: the
task names the commands, an incident tells, and both close by themselves when the card reports the slices.
"""

from __future__ import annotations

from django.db import transaction

from pool.engine.model import Layout
from pool.models import Gpu, LayoutTask, MigSlice, SchedulerCycle
from portal.kernel.clock import now
from portal.kernel.models import advance
from portal.ops.services import incident_open, incident_resolve
from quotas.models import CapacityRequest

State = LayoutTask.State


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
    """What an administrator runs on the node, by the card's UUID."""
    card = task.gpu.uuid
    wanted = ",".join(f"{profile}:{start}" for profile, start in task.profiles)
    return [
        f"nvidia-smi -i {card} -mig 1",
        f"nvidia-smi mig -i {card} -dci",
        f"nvidia-smi mig -i {card} -dgi",
        f"nvidia-smi mig -i {card} -cgi {wanted} -C",
    ]


def layouts_settle() -> int:
    """Close tasks whose card has the wanted slices by now, or whose request waits no more. Returns how many."""
    closed = 0
    for task in (
        LayoutTask.objects.filter(state=State.OPEN).select_related("gpu", "for_request").order_by("id")
    ):
        has = sorted([one.profile, one.start] for one in MigSlice.objects.filter(gpu=task.gpu, gone_at=None))
        if has == sorted(task.profiles):
            closed += _close(task, State.DONE, "the card has these slices")
        elif task.for_request is not None and task.for_request.state != CapacityRequest.State.QUEUED:
            closed += _close(task, State.DROPPED, "nobody waits for it")
    return closed


def _close(task: LayoutTask, state: str, note: str) -> bool:
    with transaction.atomic():
        rows = LayoutTask.objects.filter(pk=task.pk, state=State.OPEN)
        if not advance(rows, state=state, closed_at=now()):
            return False
        incident_resolve(dedupe_key=_key(task.gpu), note=note)
    return True


def _key(gpu: Gpu) -> str:
    return f"mig_layout:{gpu.uid}"
