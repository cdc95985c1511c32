"""Note runs of periodic tasks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from portal.kernel.clock import now
from portal.ops.models import TaskRun


@contextmanager
def task_run(name: str) -> Iterator[dict[str, Any]]:
    """Keep a row of this run; the yielded dict becomes its facts."""
    row = TaskRun.objects.create(name=name, started_at=now())
    facts: dict[str, Any] = {}
    try:
        yield facts
    except BaseException as error:
        TaskRun.objects.filter(pk=row.pk).update(
            ended_at=now(), outcome="failed", facts={**facts, "error": type(error).__name__}
        )
        raise
    TaskRun.objects.filter(pk=row.pk).update(ended_at=now(), outcome="ok", facts=facts)
