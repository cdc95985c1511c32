"""Write samples: one transaction per group of batches, by binary COPY, idempotent, newest state wins.

A batch that comes twice (an agent that reconnected before its ack) changes nothing: raw rows are unique by
(GPU, slot, time), the last state moves only forward in time, and rollups are sums over the unique rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from typing import Any

import numpy as np
from django.db import connection, transaction
from psycopg.types.json import Jsonb

from monitoring.engine import frames
from monitoring.engine.samples import BUSY, QUIET, UNKNOWN, HostLoad, Sample, activity, latched
from monitoring.models import RollupDue
from monitoring.services.bus import publish
from monitoring.services.partitions import oldest_kept, partitions_ensure
from portal.kernel.clock import now
from portal.kernel.units import from_ms

_STAGE = """
CREATE TEMP TABLE IF NOT EXISTS monitoring_stage (
    gpu_id bigint, slot smallint, at timestamptz, util_pm smallint, sm_pm smallint, mem_used_mib integer,
    mem_total_mib integer, temp_c smallint, power_mw integer
) ON COMMIT DELETE ROWS;
CREATE TEMP TABLE IF NOT EXISTS monitoring_stage_state (
    gpu_id bigint, slot smallint, at timestamptz, util_pm smallint, sm_pm smallint, mem_used_mib integer,
    mem_total_mib integer, temp_c smallint, power_mw integer, mig_uuid text, mem_reserved_mib integer,
    sm_clock_mhz integer, throttle bigint, quiet_since timestamptz, latched boolean, missing jsonb, processes jsonb,
    more jsonb, source text
) ON COMMIT DELETE ROWS;
DELETE FROM monitoring_stage; DELETE FROM monitoring_stage_state
"""
_RAW_TYPES = ["int8", "int2", "timestamptz", "int2", "int2", "int4", "int4", "int2", "int4"]
_STATE_TYPES = [
    *_RAW_TYPES,
    *["text", "int4", "int4", "int8", "timestamptz", "bool", "jsonb", "jsonb", "jsonb", "text"],
]
_RAW_COLUMNS = "gpu_id, slot, at, util_pm, sm_pm, mem_used_mib, mem_total_mib, temp_c, power_mw"
_RAW = (
    f"INSERT INTO monitoring_gpusample ({_RAW_COLUMNS}) SELECT {_RAW_COLUMNS} FROM monitoring_stage "
    "ORDER BY gpu_id, slot, at ON CONFLICT DO NOTHING"
)
_STATE_COLUMNS = (
    "at, util_pm, sm_pm, mem_used_mib, mem_total_mib, temp_c, power_mw, mig_uuid, mem_reserved_mib, sm_clock_mhz, "
    "throttle, quiet_since, latched, missing, processes, more, source"
)
_STATE = (
    f"INSERT INTO monitoring_gpustate AS s (gpu_id, slot, {_STATE_COLUMNS}, received_at) "
    f"SELECT gpu_id, slot, {_STATE_COLUMNS}, %s FROM monitoring_stage_state ORDER BY gpu_id, slot "
    "ON CONFLICT (gpu_id, slot) DO UPDATE SET received_at = EXCLUDED.received_at, "
    + ", ".join(f"{c} = EXCLUDED.{c}" for c in _STATE_COLUMNS.split(", "))
    + " WHERE s.at < EXCLUDED.at"
)
# Locked in the order of the key, so that two processes that write the same cards wait and never deadlock.
_LOCK_STATES = (
    "SELECT gpu_id, slot, at, quiet_since FROM monitoring_gpustate WHERE gpu_id = ANY(%s) "
    "ORDER BY gpu_id, slot FOR UPDATE"
)
_NODE = """
INSERT INTO monitoring_nodestate (node_id, at, cpu_pm, mem_used_mib, iowait_pm, dropped_samples)
VALUES (%s, %s, %s, %s, %s, 0)
ON CONFLICT (node_id) DO UPDATE SET at = EXCLUDED.at, cpu_pm = EXCLUDED.cpu_pm,
    mem_used_mib = EXCLUDED.mem_used_mib, iowait_pm = EXCLUDED.iowait_pm
WHERE monitoring_nodestate.at < EXCLUDED.at
"""


@dataclass(slots=True)
class Row:
    """A sample with the card and slot (0: the card, n + 1: MIG GPU instance n) it belongs to."""

    gpu_id: int
    slot: int
    sample: Sample


@dataclass(slots=True)
class Batch:
    """What one message of a node brings, after its rows were checked."""

    node_id: int
    rows: list[Row] = field(default_factory=list)
    host: HostLoad | None = None
    at: datetime | None = None


HOLE = timedelta(minutes=5)
_MINUTE_MS, _DAY_MS = 60_000, 86_400_000
_known_days: set[date] = set()


def samples_write(*, batches: Sequence[Batch], tell: bool = True) -> int:
    """Write the batches in one transaction and tell the hubs after it; returns the raw rows that were new.

    Repeating a call has no effect. Late rows go to their own day and mark their minute to be summed again.
    """
    rows = [row for batch in batches for row in batch.rows]
    days = {from_ms(day * _DAY_MS).date() for day in {row.sample.at_ms // _DAY_MS for row in rows}}
    oldest = oldest_kept().date()
    _known_days.difference_update({day for day in _known_days if day < oldest})
    if not days <= _known_days:
        partitions_ensure(days=days)
        if not connection.in_atomic_block:
            _known_days.update(days)
    received = now()
    new = 0
    with transaction.atomic():
        if rows:
            groups = _by_key(rows)
            new = _write_rows(rows, groups, received)
        for node_id, host, at in sorted(_newest_hosts(batches, received)):
            with connection.cursor() as cursor:
                cursor.execute(_NODE, [node_id, at, host[0], host[1], host[2]])
        if tell and rows:
            message = frames.bus_samples(bus_rows(group[-1] for group in groups.values()))
            transaction.on_commit(lambda: publish(message), robust=True)
    return new


def _write_rows(rows: list[Row], groups: dict[tuple[int, int], list[Row]], received: datetime) -> int:
    moments = {ms: from_ms(ms) for ms in {row.sample.at_ms for row in rows}}
    with connection.cursor() as cursor:
        cursor.execute(_STAGE)
        with cursor.copy("COPY monitoring_stage FROM STDIN (FORMAT BINARY)") as copy:
            copy.set_types(_RAW_TYPES)
            for row in rows:
                copy.write_row(_raw_tuple(row, moments))
        cursor.execute(_RAW)
        new = int(cursor.rowcount)
        if not new:
            return 0
        cursor.execute(_LOCK_STATES, [sorted({row.gpu_id for row in rows})])
        before = {(gpu, slot): (at, quiet) for gpu, slot, at, quiet in cursor.fetchall()}
        with cursor.copy("COPY monitoring_stage_state FROM STDIN (FORMAT BINARY)") as copy:
            copy.set_types(_STATE_TYPES)
            for key, group in groups.items():
                at, since = before.get(key, (None, None))
                last = group[-1].sample
                copy.write_row(
                    (
                        *_raw_tuple(group[-1], moments),
                        last.mig_uuid,
                        last.mem_reserved_mib,
                        last.sm_clock_mhz,
                        last.throttle,
                        quiet_since(group, at, since),
                        latched(last),
                        Jsonb(last.missing),
                        Jsonb(last.processes),
                        Jsonb(last.more),
                        last.source,
                    )
                )
        cursor.execute(_STATE, [received])
    minutes = {from_ms(minute * _MINUTE_MS) for minute in {ms // _MINUTE_MS for ms in moments}}
    RollupDue.objects.bulk_create([RollupDue(step=60, bucket=minute) for minute in sorted(minutes)])
    return new


def _raw_tuple(row: Row, moments: dict[int, datetime]) -> tuple[Any, ...]:
    s = row.sample
    return (
        row.gpu_id,
        row.slot,
        moments[s.at_ms],
        s.util_pm,
        s.sm_pm,
        s.mem_used_mib,
        s.mem_total_mib,
        s.temp_c,
        s.power_mw,
    )


def _by_key(rows: Iterable[Row]) -> dict[tuple[int, int], list[Row]]:
    groups: dict[tuple[int, int], list[Row]] = {}
    for row in sorted(rows, key=lambda r: (r.gpu_id, r.slot, r.sample.at_ms)):
        groups.setdefault((row.gpu_id, row.slot), []).append(row)
    return groups


def quiet_since(group: Sequence[Row], last_at: datetime | None, since: datetime | None) -> datetime | None:
    """Since when the card has been quiet after `group` (in order of time), given the state before it.

    A run of quiet samples goes on unless one that is not quiet, or a hole of five minutes, lies between; missing
    data is unknown and ends the run (it is never idle).
    """
    at = last_at
    for row in group:
        moment = from_ms(row.sample.at_ms)
        if last_at is not None and moment <= last_at:
            continue
        if activity(row.sample) != QUIET:
            since = None
        elif since is None or at is None or moment - at > HOLE:
            since = moment
        at = moment
    return since


def _newest_hosts(
    batches: Iterable[Batch], received: datetime
) -> list[tuple[int, tuple[int | None, int | None, int | None], datetime]]:
    newest: dict[int, tuple[datetime, HostLoad]] = {}
    for batch in batches:
        at = batch.at or received
        if batch.host is not None and (batch.node_id not in newest or newest[batch.node_id][0] <= at):
            newest[batch.node_id] = (at, batch.host)
    return [(node, (h.cpu_pm, h.mem_used_mib, h.iowait_pm), at) for node, (at, h) in newest.items()]


def bus_rows(newest: Iterable[Row]) -> Any:
    """Records of the bus, ordered by time, of the newest sample of each card and slot."""
    records = []
    for row in sorted(newest, key=lambda r: r.sample.at_ms):
        s = row.sample
        records.append(
            (
                row.gpu_id,
                s.at_ms,
                _or32(s.mem_used_mib),
                _or32(s.mem_total_mib),
                _or32(s.power_mw),
                row.slot,
                _or16(s.util_pm),
                _or16(s.sm_pm),
                _or16(s.temp_c),
                len(s.processes),
                activity(s) + (4 if latched(s) else 0),
            )
        )
    return np.array(records, dtype=frames.BUS)


def _or16(value: int | None) -> int:
    return frames.NONE16 if value is None else value


def _or32(value: int | None) -> int:
    return frames.NONE32 if value is None else value


def quiet_of(code: int) -> tuple[int, bool]:
    """(activity, latched) from the `quiet` field of a bus record."""
    return code & 3, bool(code & 4)


__all__ = ["BUSY", "QUIET", "UNKNOWN", "Batch", "Row", "bus_rows", "quiet_of", "samples_write"]
