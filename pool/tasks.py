"""Celery tasks of pool: each takes ids, calls one service, and may be delivered twice."""

from __future__ import annotations

import structlog
from celery import shared_task

from pool.services.closing import allocation_finish
from pool.services.cycle import schedule_cycle as run_cycle
from pool.services.execution import allocation_start, execution_reconcile
from pool.services.expiry import leases_sweep
from pool.services.hooks import hooks_repeat, post_checkpoint
from pool.services.keeps import keeps_settle
from pool.services.ladder import case_step, checkpoint_reported
from pool.services.layouts import layouts_settle
from pool.services.maintenance import windows_sweep
from pool.services.node_watch import listening_since, nodes_sweep
from pool.services.outside_accounts import accounts_compare_all
from pool.services.outside_output import outputs_follow
from pool.services.policies import policy_preview
from pool.services.polling import cluster_poll, clusters_polled, nodes_due, poll_due
from pool.services.rolling import replicas_roll
from pool.services.snapshot_store import snapshots_tidy
from pool.services.surplus import surplus_settle
from pool.services.uploads import uploads_tidy
from portal.kernel.clock import now
from portal.kernel.locks import try_advisory_lock

log = structlog.get_logger(__name__)
POLL_EXPIRES_S = 3


@shared_task(name="pool.schedule_cycle", queue="schedule", ignore_result=True)
def schedule_cycle(cause: str = "beat") -> None:
    """Plan and apply; a second planner at the same time leaves at once."""
    run_cycle(cause=cause)


@shared_task(name="pool.start_allocation", queue="execute", ignore_result=True)
def start_allocation(allocation_id: int) -> None:
    """Order the start of one allocation."""
    allocation_start(allocation_id=allocation_id)


@shared_task(name="pool.start_allocations", queue="execute", ignore_result=True)
def start_allocations(allocation_ids: list[int]) -> None:
    """Order the starts of some allocations, one after the other; what one fails with the others do not feel."""
    for pk in allocation_ids:
        try:
            allocation_start(allocation_id=pk)
        except Exception:  # the sweep finds what is still reserved
            log.exception("start_failed", allocation=pk)


@shared_task(name="pool.step_case", queue="execute", ignore_result=True)
def step_case(case_id: int) -> None:
    """Take the step of a reclaim case that is due."""
    case_step(case_id=case_id)


@shared_task(name="pool.finish_allocation", queue="execute", ignore_result=True)
def finish_allocation(allocation_id: int) -> None:
    """Close one allocation whose cards were seen free."""
    allocation_finish(allocation_id=allocation_id)


@shared_task(name="pool.sweep_leases", queue="schedule", ignore_result=True)
def sweep_leases() -> None:
    """Warnings, expiry, ends of notices."""
    leases_sweep()


@shared_task(name="pool.sweep_windows", queue="schedule", ignore_result=True)
def sweep_windows() -> None:
    """Maintenance windows, and services that roll over nodes; kept places, layouts and surpluses that nobody needs
    any more."""
    windows_sweep()
    replicas_roll()
    keeps_settle()
    layouts_settle()
    surplus_settle()


@shared_task(name="pool.checkpoint_call", queue="execute", ignore_result=True)
def checkpoint_call(case_id: int) -> None:
    """Post the checkpoint hook of one case, and tell the ladder what came of it."""
    answer = post_checkpoint(case_id=case_id)
    if answer is not None and not answer.later:
        checkpoint_reported(case_id=case_id, member=None, ok=answer.ok, detail=answer.text)


@shared_task(name="pool.sweep_nodes", queue="schedule", ignore_result=True)
def sweep_nodes() -> None:
    """Silent nodes and the fencing of lost ones."""
    nodes_sweep(listening=listening_since())


@shared_task(name="pool.reconcile_execution", queue="execute", ignore_result=True)
def reconcile_execution() -> None:
    """Repeat orders that were lost; one at a time."""
    with try_advisory_lock("pool.reconcile_execution") as got:
        if got:
            execution_reconcile(listening=listening_since())
            hooks_repeat(now())


@shared_task(name="pool.poll_clusters", queue="execute", ignore_result=True)
def poll_clusters() -> None:
    """Have every outside system looked at, each by a task of its own: a slow one holds up no other."""
    for cluster_id in clusters_polled():
        poll_cluster.apply_async([cluster_id], expires=POLL_EXPIRES_S)


@shared_task(name="pool.poll_cluster", queue="execute", ignore_result=True)
def poll_cluster(cluster_id: int) -> None:
    """Look at one outside system; one at a time, its nodes every few seconds."""
    with try_advisory_lock(f"pool.poll_cluster.{cluster_id}") as got:
        if got and poll_due(cluster_id=cluster_id):
            cluster_poll(cluster_id=cluster_id, nodes=nodes_due(cluster_id=cluster_id))
            outputs_follow(cluster_id=cluster_id)


@shared_task(name="pool.compare_accounts", queue="reports", ignore_result=True)
def compare_accounts() -> None:
    """The books of outside systems against ours."""
    accounts_compare_all()


@shared_task(name="pool.preview_policy", queue="reports", ignore_result=True)
def preview_policy(policy_id: int) -> None:
    """Decide the last stored decisions again under a draft of the policy."""
    policy_preview(policy_id=policy_id)


@shared_task(name="pool.tidy_decisions", queue="reports", ignore_result=True)
def tidy_decisions() -> None:
    """Snapshots of decisions past their retention go."""
    snapshots_tidy()


@shared_task(name="pool.tidy_uploads", queue="reports", ignore_result=True)
def tidy_uploads() -> None:
    """Folders sent with requests that are over go."""
    uploads_tidy()
