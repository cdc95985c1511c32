"""Celery tasks of quotas: each calls one service."""

from __future__ import annotations

from celery import shared_task

from portal.ops.services.runs import task_run
from quotas import tasks_money
from quotas.models import GpuFlavour
from quotas.services.grants import limits_sweep
from quotas.services.queue_sweep import queue_sweep
from quotas.services.sweeps import approvals_sweep
from quotas.services.usage import usage_recompute

__all__ = ["recompute_usage", "sweep_approvals", "sweep_queue", "tasks_money"]


@shared_task(name="quotas.sweep_approvals", queue="notify", ignore_result=True)
def sweep_approvals() -> None:
    """Reminders, escalation, lapsed changes; grants that begin or end."""
    with task_run("quotas.sweep_approvals") as facts:
        facts.update(approvals_sweep())
        facts["limits"] = limits_sweep()


@shared_task(name="quotas.sweep_queue", queue="notify", ignore_result=True)
def sweep_queue() -> None:
    """Series, reviews, deadlines, dependencies."""
    with task_run("quotas.sweep_queue") as facts:
        facts.update(queue_sweep())


@shared_task(name="quotas.recompute_usage", queue="notify", ignore_result=True)
def recompute_usage() -> int:
    """Bring counters in line after departments moved; returns how many rows changed."""
    ids = (
        GpuFlavour.objects.filter(usage_rows__isnull=False)
        .order_by("pk")
        .values_list("pk", flat=True)
        .distinct()
    )
    return sum(usage_recompute(flavour_id=pk) for pk in ids)
