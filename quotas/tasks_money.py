"""Celery tasks of the ledger (imported by quotas.tasks)."""

from __future__ import annotations

from celery import shared_task

from portal.kernel.clock import now
from portal.ops.services import task_run
from quotas.engine.billing import month_bounds
from quotas.selectors.billing_time import billing_zone, month_of, previous_month
from quotas.services.budgets import budgets_watch
from quotas.services.ledger import ledger_accrue, ledger_sums_merge
from quotas.services.reconcile import reconcile

NIGHT = 2
"""Local hour in which everything is compared."""


@shared_task(name="quotas.accrue_ledger", queue="reports", ignore_result=True)
def accrue_ledger() -> None:
    """Book the whole days of running work; run by beat, and harmless at any time."""
    with task_run("quotas.accrue_ledger") as facts:
        facts["lines"] = ledger_accrue()
        facts["sums"] = ledger_sums_merge()


@shared_task(name="quotas.reconcile", queue="reports", ignore_result=True)
def reconcile_books() -> None:
    """Compare counters with open spans and the ledger with closed ones; differences become incidents.

    Each hour those that ended since the month before began; at night all there ever were.
    """
    with task_run("quotas.reconcile") as facts:
        local = now().astimezone(billing_zone())
        before = previous_month(month_of(now()))
        since = None if local.hour == NIGHT else month_bounds(before.year, before.month, billing_zone())[0]
        facts.update(reconcile(since=since).as_facts())


@shared_task(name="quotas.watch_budgets", queue="reports", ignore_result=True)
def watch_budgets() -> None:
    """Warn of thresholds that budgets have reached."""
    with task_run("quotas.watch_budgets") as facts:
        facts["notices"] = budgets_watch()
