"""The periodic tasks of pool exist under the names that beat sends, and each may run twice."""

from __future__ import annotations

import pytest
from django.conf import settings

from pool import tasks
from portal.celery import app

BEAT = sorted(
    row["task"] for row in settings.CELERY_BEAT_SCHEDULE.values() if row["task"].startswith("pool.")
)


def test_beat_names_only_tasks_that_exist() -> None:
    assert BEAT == [
        "pool.compare_accounts",
        "pool.poll_clusters",
        "pool.reconcile_execution",
        "pool.schedule_cycle",
        "pool.sweep_leases",
        "pool.sweep_nodes",
        "pool.sweep_windows",
        "pool.tidy_decisions",
        "pool.tidy_uploads",
    ]
    app.loader.import_default_modules()
    assert set(BEAT) <= set(app.tasks)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("name", BEAT)
def test_on_an_empty_pool_they_do_nothing(name: str) -> None:
    task = getattr(tasks, name.removeprefix("pool."))
    task()
    task()
