"""Thirty days of 10,000 GPUs in rollups, made in the database: what a page about a GPU, a node and the pool reads, in
milliseconds, and what a GPU's day costs on disk.

Hours and days are there for all cards and all thirty days (7.5 million rows), minutes for the last hour of all cards
and for the last day of the cards that are asked for. A GPU page reads its day from minutes and its month from hours;
a node page the month of its eight cards; the pool page the month of all, from the sums that are kept ready.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from tests.perf._database import fresh_database
from tests.perf.ingest import GPUS, fleet

NODES, DAYS, ASKED = 1250, 30, 40
_COLUMNS = (
    "gpu_id, slot, step, bucket, samples, covered_s, util_n, util_sum, util_max, sm_n, sm_sum, mem_n, mem_sum, "
    "mem_max, temp_n, temp_sum, temp_max, power_n, power_sum, power_max"
)
_MADE = f"""
INSERT INTO monitoring_gpurollup ({_COLUMNS})
SELECT g.id, 0, %(step)s, b, n, n * 10, n, n * u, 1000, n, n * u / 2, n, n * 61000, 73000, n, n * 61, 71,
    n, n * 412000::bigint, 621000
FROM generate_series(%(start)s::timestamptz, %(end)s::timestamptz - interval '1 second', %(each)s::interval) b,
    pool_gpu g, LATERAL (SELECT %(step)s / 10 AS n, (g.id * 37 + extract(epoch FROM b)::bigint / 3600) %% 1000 AS u) v
WHERE %(only)s::bigint[] IS NULL OR g.id = ANY(%(only)s)
"""


def run() -> dict[str, Any]:
    """Milliseconds and bytes."""
    with fresh_database():
        return _measure()


def _measure() -> dict[str, Any]:
    import structlog
    from django.db import connection

    from monitoring.engine.rollup import bucket_start
    from monitoring.selectors.fleet_series import fleet_history
    from monitoring.selectors.series import SPANS, span_points
    from monitoring.services.partitions import rollup_partitions_ensure
    from monitoring.services.rollups import fleet_sums, rollup_run, rollups_mark
    from pool.models import Gpu
    from portal.kernel.clock import now

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    fleet(NODES)
    ids = list(Gpu.objects.order_by("id").values_list("pk", flat=True))
    asked = [ids[number * len(ids) // ASKED] for number in range(ASKED)]
    nodes = [ids[number * GPUS : number * GPUS + GPUS] for number in range(0, NODES, NODES // ASKED)][:ASKED]
    end = bucket_start(now(), 3600)
    today = bucket_start(end, 86400)
    hours = [end - timedelta(hours=n) for n in range(1, DAYS * 24 + 1)]
    minutes = [end - timedelta(minutes=n) for n in range(1, 24 * 60 + 1)]
    rollup_partitions_ensure(step=3600, buckets=hours)
    rollup_partitions_ensure(step=60, buckets=minutes)
    began = time.perf_counter()
    with connection.cursor() as cursor:
        for step, start, until, only in (
            (3600, hours[-1], end, None),
            (86400, today - timedelta(days=DAYS), today, None),
            (60, end - timedelta(hours=1), end, None),
            (60, minutes[-1], end - timedelta(hours=1), asked),
        ):
            each = timedelta(seconds=step)
            cursor.execute(_MADE, {"step": step, "start": start, "end": until, "each": each, "only": only})
        cursor.execute("ANALYZE monitoring_gpurollup")
    made_s = time.perf_counter() - began
    rollups_mark(buckets=[hours[0]], step=3600)
    began = time.perf_counter()
    rollup_run()
    hour_s = time.perf_counter() - began
    fleet_sums(step=3600, start=hours[-1], end=end)

    def month() -> None:
        assert len(fleet_history(start=hours[-1], end=end, step=3600)) == DAYS * 24

    figures: dict[str, float] = {"made_s": round(made_s, 1), "hour_of_all_cards_s": round(hour_s, 2)}
    for name, ask in (
        ("gpu_24h", [lambda gpu=gpu: span_points([(gpu, 0)], SPANS["24h"]) for gpu in asked]),
        ("gpu_30d", [lambda gpu=gpu: span_points([(gpu, 0)], SPANS["30d"]) for gpu in asked]),
        (
            "node_30d",
            [lambda node=node: span_points([(gpu, 0) for gpu in node], SPANS["30d"]) for node in nodes],
        ),
        ("pool_30d", [month] * ASKED),
    ):
        figures |= _timed(name, ask)
    figures |= _disk()
    return {
        "sizes": {"gpus": len(ids), "days": DAYS, "hour_rows": len(ids) * DAYS * 24},
        "figures": figures,
        "aims": {f"{name}_p95_ms": ["<", 100] for name in ("gpu_24h", "gpu_30d", "node_30d", "pool_30d")},
    }


def _timed(name: str, questions: list[Callable[[], Any]]) -> dict[str, float]:
    """The first time is that of cold pages, told apart; then the 50th and 95th of a hundred."""
    began = time.perf_counter()
    questions[0]()
    cold = time.perf_counter() - began
    took = []
    for _ in range(3):
        for question in questions:
            began = time.perf_counter()
            question()
            took.append((time.perf_counter() - began) * 1000)
    took.sort()
    return {
        f"{name}_first_ms": round(cold * 1000, 1),
        f"{name}_p50_ms": round(took[len(took) // 2], 1),
        f"{name}_p95_ms": round(took[int(len(took) * 0.95)], 1),
    }


def _disk() -> dict[str, float]:
    """Bytes of a row with its index by step, and what a GPU's day keeps at the set retentions."""
    from django.conf import settings
    from django.db import connection

    found = {}
    with connection.cursor() as cursor:
        for step in (60, 3600, 86400):
            cursor.execute(
                "SELECT COALESCE(sum(pg_total_relation_size(relid)), 0) FROM pg_partition_tree(%s::regclass) "
                "WHERE isleaf",
                [f"monitoring_gpurollup_{step}"],
            )
            size = int(cursor.fetchone()[0])
            cursor.execute("SELECT count(*) FROM monitoring_gpurollup WHERE step = %s", [step])
            found[step] = size / max(1, int(cursor.fetchone()[0]))
    a_day = 1440 * found[60] + 24 * found[3600] + found[86400]
    kept = (
        settings.GPUPOOL_MINUTE_DAYS * 1440 * found[60]
        + settings.GPUPOOL_HOUR_DAYS * 24 * found[3600]
        + 365 * found[86400]
    )
    return {
        "bytes_per_hour_row": round(found[3600]),
        "bytes_per_minute_row": round(found[60]),
        "kib_per_gpu_day": round(a_day / 1024, 1),
        "mib_per_gpu_kept": round(kept / 1024 / 1024, 1),
    }
