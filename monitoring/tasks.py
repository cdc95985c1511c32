"""Celery tasks of monitoring."""

from __future__ import annotations

from celery import shared_task

from monitoring.services.alerts import alerts_evaluate
from monitoring.services.card_states import card_states_sweep
from monitoring.services.day_sums import days_sum
from monitoring.services.exports import export_make, exports_sweep
from monitoring.services.findings import findings_sweep
from monitoring.services.health import health_judge
from monitoring.services.idle_surcharges import idle_surcharges_sweep
from monitoring.services.idleness import idle_judge
from monitoring.services.partitions import partitions_keep
from monitoring.services.report_runs import reports_send
from monitoring.services.rollups import rollup_run, rollups_keep
from monitoring.services.scrape import source_scrape
from monitoring.services.sources import sources_claim
from monitoring.services.waste_digest import digest_send
from monitoring.services.watching import watch_keep, watch_look
from monitoring.services.what_if import scenario_play, scenarios_sweep
from portal.ops.services import task_run


@shared_task(name="monitoring.rollup", queue="ingest", ignore_result=True)
def rollup() -> None:
    """Sum the minutes, hours and days that got samples."""
    with task_run("monitoring.rollup") as facts:
        facts.update({str(step): n for step, n in rollup_run().items()})


@shared_task(name="monitoring.partitions", queue="ingest", ignore_result=True)
def partitions() -> None:
    """Make the coming days' partitions; drop raw samples and fine rollups past retention."""
    with task_run("monitoring.partitions") as facts:
        facts.update(partitions_keep(), rollups=rollups_keep())


@shared_task(name="monitoring.judge_idle", queue="ingest", ignore_result=True)
def judge_idle() -> None:
    """Find idle work and give it to the pool."""
    with task_run("monitoring.judge_idle") as facts:
        facts.update(idle_judge())


@shared_task(name="monitoring.day_sums", queue="reports", ignore_result=True)
def day_sums() -> None:
    """The cards' states, and the sums of days that reports read."""
    with task_run("monitoring.day_sums") as facts:
        facts["states"] = card_states_sweep()
        facts["days"] = days_sum()
        facts["idle_surcharges"] = idle_surcharges_sweep()


@shared_task(name="monitoring.make_export", queue="reports", ignore_result=True)
def make_export(job_id: int) -> None:
    """One large file."""
    export_make(job_id=job_id)


@shared_task(name="monitoring.play_scenario", queue="reports", ignore_result=True)
def play_scenario(scenario_id: int) -> None:
    """One what-if, in a process of its own."""
    scenario_play(scenario_id=scenario_id)


@shared_task(name="monitoring.send_reports", queue="reports", ignore_result=True)
def send_reports() -> None:
    """Scheduled reports that are due; files that were left or have expired."""
    with task_run("monitoring.send_reports") as facts:
        facts["sent"] = reports_send()
        facts.update(exports_sweep())
        facts["what_ifs"] = scenarios_sweep()


@shared_task(name="monitoring.watch", queue="ingest", ignore_result=True)
def watch() -> None:
    """One look at all held cards beside their hosts."""
    with task_run("monitoring.watch") as facts:
        facts["looks"] = watch_look()


@shared_task(name="monitoring.find_waste", queue="reports", ignore_result=True)
def find_waste() -> None:
    """Open, keep and close waste findings."""
    with task_run("monitoring.find_waste") as facts:
        facts.update(findings_sweep())


@shared_task(name="monitoring.waste_digest", queue="reports", ignore_result=True)
def waste_digest() -> None:
    """The digest of the week to those who have not had it; looks past their retention."""
    with task_run("monitoring.waste_digest") as facts:
        facts["sent"] = digest_send()
        facts["dropped"] = watch_keep()


@shared_task(name="monitoring.scrape_due", queue="ingest", ignore_result=True)
def scrape_due() -> None:
    """Hand out the telemetry sources that are due, each to a task of its own."""
    for source_id in sources_claim():
        scrape.delay(source_id)


@shared_task(name="monitoring.scrape", queue="ingest", ignore_result=True, soft_time_limit=60, time_limit=90)
def scrape(source_id: int) -> None:
    """Fetch one source and write what it says."""
    source_scrape(source_id=source_id)


@shared_task(name="monitoring.judge_health", queue="ingest", ignore_result=True)
def judge_health() -> None:
    """Counters and states of cards, clocks and drivers of nodes."""
    with task_run("monitoring.judge_health") as facts:
        facts.update(health_judge())


@shared_task(name="monitoring.evaluate_alerts", queue="ingest", ignore_result=True)
def evaluate_alerts() -> None:
    """All alert rules."""
    with task_run("monitoring.evaluate_alerts") as facts:
        facts.update(alerts_evaluate())
