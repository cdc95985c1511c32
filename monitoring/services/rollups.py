"""Rollups per minute, hour and day: written over, so they may run twice, and late data mends them.

A bucket is summed again whenever samples came for it since (`RollupDue`); minutes are summed from raw samples,
hours from minutes, days from hours, and hours and days once more over the cards of a cluster and flavour. An open
hour is refreshed every five minutes, an open day every hour.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

from django.conf import settings
from django.db import connection, transaction

from monitoring.engine.rollup import SLOT_S, bucket_start
from monitoring.models import RollupDue
from monitoring.services.partitions import rollup_partitions_drop, rollup_partitions_ensure
from portal.kernel.clock import now

_LOCK = 7_301_002
_SUMS = (
    "samples, covered_s, util_n, util_sum, util_max, sm_n, sm_sum, mem_n, mem_sum, mem_max, "
    "temp_n, temp_sum, temp_max, power_n, power_sum, power_max"
)
_OVER = ", ".join(f"{c} = EXCLUDED.{c}" for c in _SUMS.split(", "))
_FROM_RAW = f"""
INSERT INTO monitoring_gpurollup (gpu_id, slot, step, bucket, {_SUMS})
SELECT gpu_id, slot, 60, %(start)s, count(*), count(DISTINCT floor(extract(epoch FROM at) / {SLOT_S})) * {SLOT_S},
    count(util_pm), COALESCE(sum(util_pm), 0), max(util_pm), count(sm_pm), COALESCE(sum(sm_pm), 0),
    count(mem_used_mib), COALESCE(sum(mem_used_mib), 0), max(mem_used_mib),
    count(temp_c), COALESCE(sum(temp_c), 0), max(temp_c),
    count(power_mw), COALESCE(sum(power_mw), 0), max(power_mw)
FROM monitoring_gpusample WHERE at >= %(start)s AND at < %(end)s GROUP BY gpu_id, slot
ON CONFLICT (gpu_id, slot, step, bucket) DO UPDATE SET {_OVER}
"""
_FROM_FINER = f"""
INSERT INTO monitoring_gpurollup (gpu_id, slot, step, bucket, {_SUMS})
SELECT gpu_id, slot, %(step)s, %(start)s, sum(samples), sum(covered_s), sum(util_n), sum(util_sum), max(util_max),
    sum(sm_n), sum(sm_sum), sum(mem_n), sum(mem_sum), max(mem_max), sum(temp_n), sum(temp_sum), max(temp_max),
    sum(power_n), sum(power_sum), max(power_max)
FROM monitoring_gpurollup WHERE step = %(finer)s AND bucket >= %(start)s AND bucket < %(end)s GROUP BY gpu_id, slot
ON CONFLICT (gpu_id, slot, step, bucket) DO UPDATE SET {_OVER}
"""
_FLEET_SUMS = (
    "cards, covered_s, util_n, util_sum, sm_n, sm_sum, mem_n, mem_sum, temp_n, temp_sum, power_n, power_sum"
)
_FLEET = f"""
INSERT INTO monitoring_fleetrollup (cluster_id, flavour_id, step, bucket, {_FLEET_SUMS})
SELECT n.cluster_id, g.flavour_id, %(step)s, r.bucket, count(*), sum(r.covered_s), sum(r.util_n), sum(r.util_sum),
    sum(r.sm_n), sum(r.sm_sum), sum(r.mem_n), sum(r.mem_sum), sum(r.temp_n), sum(r.temp_sum), sum(r.power_n),
    sum(r.power_sum)
FROM monitoring_gpurollup r JOIN pool_gpu g ON g.id = r.gpu_id JOIN pool_node n ON n.id = g.node_id
WHERE r.step = %(step)s AND r.slot = 0 AND r.bucket >= %(start)s AND r.bucket < %(end)s GROUP BY 1, 2, 4
ON CONFLICT (step, bucket, cluster_id, flavour_id) DO UPDATE SET
    {", ".join(f"{c} = EXCLUDED.{c}" for c in _FLEET_SUMS.split(", "))}
"""
_REFRESH = {60: timedelta(0), 3600: timedelta(minutes=5), 86400: timedelta(hours=1)}
_FINER = {3600: 60, 86400: 3600}


def rollup_run(*, force: bool = False) -> dict[int, int]:
    """Sum what is due; returns step → buckets done. One run at a time; a second one returns nothing at once.

    `force` also refreshes open hours and days that are not due yet (tests, the end of the demo's history).
    """
    done = {60: 0, 3600: 0, 86400: 0}
    for step in (60, 3600, 86400):
        due = _due(step, force)
        rollup_partitions_ensure(step=step, buckets=due)
        for bucket in due:
            with transaction.atomic(), connection.cursor() as cursor:
                cursor.execute("SELECT pg_try_advisory_xact_lock(%s)", [_LOCK])
                if not cursor.fetchone()[0]:
                    return done
                # Taken away first: samples that are committed later bring a row of their own.
                if not RollupDue.objects.filter(step=step, bucket=bucket).delete()[0]:
                    continue
                end = bucket + timedelta(seconds=step)
                span = {"start": bucket, "end": end, "step": step}
                cursor.execute(_FROM_RAW if step == 60 else _FROM_FINER, {**span, "finer": _FINER.get(step)})
                if step != 60:
                    fleet_sums(step=step, start=bucket, end=end)
                coarser = {60: 3600, 3600: 86400}.get(step)
                if coarser:
                    RollupDue.objects.create(step=coarser, bucket=bucket_start(bucket, coarser))
            done[step] += 1
    return done


def fleet_sums(*, step: int, start: datetime, end: datetime) -> None:
    """Sum the hours or days from `start` to before `end` over the cards of each cluster and flavour, written over."""
    with connection.cursor() as cursor:
        cursor.execute(_FLEET, {"step": step, "start": start, "end": end})


def _due(step: int, force: bool) -> list[datetime]:
    """Due buckets, oldest first: closed ones at once, the open one when its refresh time has come."""
    buckets = (
        RollupDue.objects.filter(step=step).order_by("bucket").values_list("bucket", flat=True).distinct()
    )
    moment = now()
    if force or step == 60:
        return list(buckets)
    fresh = bucket_start(moment, int(_REFRESH[step].total_seconds()))
    open_bucket = bucket_start(moment, step)
    return [b for b in buckets if b < open_bucket or moment - fresh < timedelta(seconds=70)]


def rollups_mark(*, buckets: Iterable[datetime], step: int = 60) -> None:
    """Ask for buckets to be summed again."""
    RollupDue.objects.bulk_create([RollupDue(step=step, bucket=bucket) for bucket in sorted(set(buckets))])


def rollups_keep() -> list[str]:
    """Drop minute and hour rollups past their retention, by whole days and months; days stay. Returns the tables."""
    moment = now()
    dropped = rollup_partitions_drop(
        step=60, before=moment - timedelta(days=int(settings.GPUPOOL_MINUTE_DAYS))
    )
    return dropped + rollup_partitions_drop(
        step=3600, before=moment - timedelta(days=int(settings.GPUPOOL_HOUR_DAYS))
    )
