"""Celery tasks of the ledger (imported by quotas.tasks)."""

from __future__ import annotations

from celery import shared_task

from portal.ops.services import task_run
from quotas.services.ledger import ledger_accrue
from quotas.services.reconcile import reconcile


@shared_task(name="quotas.accrue_ledger", queue="reports", ignore_result=True)
def accrue_ledger() -> None:
    """Book the whole days of running work; run by beat, and harmless at any time."""
    with task_run("quotas.accrue_ledger") as facts:
        facts["lines"] = ledger_accrue()


@shared_task(name="quotas.reconcile", queue="reports", ignore_result=True)
def reconcile_books() -> None:
    """Compare counters with open spans and the ledger with closed ones; differences become incidents."""
    with task_run("quotas.reconcile") as facts:
        facts.update(reconcile().as_facts())
