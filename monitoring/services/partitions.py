"""Partitions by time: raw samples and minute rollups by UTC day, hour rollups by UTC month. Dropped by retention.

All of it is safe to run twice and from many processes.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, date, datetime, timedelta

from django.conf import settings
from django.db import connection, transaction

from portal.kernel.clock import now

DAYS_AHEAD = 3
_LOCK = 7_301_001  # advisory lock of this duty


def raw_days() -> int:
    """How many whole days of raw samples are kept besides today."""
    return int(settings.GPUPOOL_RAW_DAYS)


def oldest_kept() -> datetime:
    """Start (UTC) of the oldest day whose raw samples are taken and kept."""
    today = now().astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    return today - timedelta(days=raw_days())


def _name(day: date) -> str:
    return f"monitoring_gpusample_{day:%Y%m%d}"


def partitions_ensure(*, days: Iterable[date]) -> None:
    """Make the partitions of these UTC days; those that exist are left alone."""
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
        for day in sorted(set(days)):
            start, end = day.isoformat(), (day + timedelta(days=1)).isoformat()
            cursor.execute(
                f"CREATE TABLE IF NOT EXISTS {_name(day)} PARTITION OF monitoring_gpusample "
                f"FOR VALUES FROM ('{start} 00:00:00+00') TO ('{end} 00:00:00+00')"
            )


def partitions_existing() -> dict[str, date]:
    """Table name → UTC day of the partitions there are."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid "
            "WHERE i.inhparent = 'monitoring_gpusample'::regclass"
        )
        names = [row[0] for row in cursor.fetchall()]
    return {name: datetime.strptime(name[-8:], "%Y%m%d").date() for name in names}


def partitions_keep() -> dict[str, list[str]]:
    """Make the coming days' partitions and drop those past retention; returns what was made and dropped."""
    today = now().astimezone(UTC).date()
    there = partitions_existing()
    wanted = [today + timedelta(days=n) for n in range(-1, DAYS_AHEAD + 1)]
    made = [_name(day) for day in wanted if _name(day) not in there]
    partitions_ensure(days=wanted)
    oldest = oldest_kept().date()
    dropped = sorted(name for name, day in there.items() if day < oldest)
    for name in dropped:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
            cursor.execute(f"DROP TABLE IF EXISTS {name}")
    return {"made": made, "dropped": dropped}


_ROLLUP = "monitoring_gpurollup"
_there: set[str] = set()


def _span(step: int, bucket: datetime) -> tuple[str, datetime, datetime]:
    """(table, start, end) of the partition that holds a minute or an hour."""
    day = bucket.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    if step == 60:
        return f"{_ROLLUP}_60_{day:%Y%m%d}", day, day + timedelta(days=1)
    month = day.replace(day=1)
    return f"{_ROLLUP}_3600_{month:%Y%m}", month, (month + timedelta(days=32)).replace(day=1)


def rollup_partitions_ensure(*, step: int, buckets: Iterable[datetime]) -> None:
    """Make the partitions of these buckets (days have one of their own). Rows that were written before their
    partition was made lie in the default one and are moved."""
    if step not in (60, 3600):
        return
    for name, start, end in sorted({_span(step, bucket) for bucket in buckets}):
        if name in _there:
            continue
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
            cursor.execute("SELECT to_regclass(%s)", [name])
            if cursor.fetchone()[0] is None:
                span = f"FOR VALUES FROM ('{start.isoformat()}') TO ('{end.isoformat()}')"
                cursor.execute(f"CREATE TABLE {name} (LIKE {_ROLLUP}_{step} INCLUDING DEFAULTS)")
                cursor.execute(
                    f"WITH moved AS (DELETE FROM {_ROLLUP}_{step}_rest WHERE bucket >= %s AND bucket < %s "
                    f"RETURNING *) INSERT INTO {name} SELECT * FROM moved",
                    [start, end],
                )
                cursor.execute(f"ALTER TABLE {_ROLLUP}_{step} ATTACH PARTITION {name} {span}")
        if not connection.in_atomic_block:
            _there.add(name)


def rollup_partitions_drop(*, step: int, before: datetime) -> list[str]:
    """Drop the partitions that end before then, and older rows that never got one; returns the tables dropped."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid "
            "WHERE i.inhparent = %s::regclass",
            [f"{_ROLLUP}_{step}"],
        )
        names = [row[0] for row in cursor.fetchall() if row[0][-6:].isdecimal()]
    dropped = []
    for name in sorted(names):
        digits = name.rsplit("_", 1)[1]
        start = datetime.strptime(digits, "%Y%m%d" if step == 60 else "%Y%m").replace(tzinfo=UTC)
        if _span(step, start)[2] <= before:
            with transaction.atomic(), connection.cursor() as cursor:
                cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
                cursor.execute(f"DROP TABLE IF EXISTS {name}")
            _there.discard(name)
            dropped.append(name)
    with connection.cursor() as cursor:
        cursor.execute(f"DELETE FROM {_ROLLUP}_{step}_rest WHERE bucket < %s", [before])
    return dropped
