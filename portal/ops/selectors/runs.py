"""Whether periodic work comes at all: expiry, reclaim, charging and notices all hang on beat and a worker."""

from __future__ import annotations

from datetime import datetime, timedelta

from django.db import connection

from portal.kernel.clock import now
from portal.ops.models import AuditEvent, TaskRun

SWEEP = "quotas.sweep_queue"
"""Runs every 30 s; schedules are intervals, so that no change of clocks skips or doubles one."""
SILENT_AFTER = timedelta(minutes=10)
LAST_OR_FIRST = f"""
SELECT coalesce(
    (SELECT started_at FROM {TaskRun._meta.db_table} WHERE name = %s ORDER BY started_at DESC LIMIT 1),
    (SELECT at FROM {AuditEvent._meta.db_table} ORDER BY id LIMIT 1)
)
"""


def sweep_last() -> datetime | None:
    """When the sweep began last, None where it never did."""
    found = TaskRun.objects.filter(name=SWEEP).order_by("-started_at").values_list("started_at", flat=True)
    return found.first()


def sweeps_silent_since() -> datetime | None:
    """Since when no sweep came, where that is too long; where none ever came, since anybody did anything. One query."""
    with connection.cursor() as cursor:
        cursor.execute(LAST_OR_FIRST, [SWEEP])
        last: datetime | None = cursor.fetchone()[0]
    return last if last is not None and last < now() - SILENT_AFTER else None
