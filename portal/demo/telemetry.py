"""What the cards did in the story: hourly rollups for 90 days, raw samples for the last two hours.

Figures follow the lives on each card (load, then memory, temperature and power from it), with noise that is
the same in every run. A split card has no utilization of its own: its slices have SM activity.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
from django.db import connection, transaction

from monitoring.services.partitions import partitions_ensure, rollup_partitions_ensure
from monitoring.services.rollups import fleet_sums, rollup_run, rollups_mark
from pool.models import Gpu, MigSlice
from portal.demo import cast, fleet
from portal.demo.story import Life

HOUR = 3600
EACH_S = 5
RAW_EACH_S = 10
RAW_HOURS = 2
SAMPLES = HOUR // EACH_S
ROLLUP = (
    "gpu_id, slot, step, bucket, samples, covered_s, util_n, util_sum, util_max, sm_n, sm_sum, mem_n, mem_sum, "
    "mem_max, temp_n, temp_sum, temp_max, power_n, power_sum, power_max"
)
RAW = "at, gpu_id, slot, util_pm, sm_pm, mem_used_mib, mem_total_mib, temp_c, power_mw"


@dataclass(frozen=True)
class Track:
    """One card, or one slice of a split card (`slot` > 0), and the lives on it as (start, end, load) in epoch
    seconds."""

    gpu_id: int
    slot: int
    memory_mib: int
    watts: int
    split: bool
    lives: list[tuple[float, float, float]]


def tracks(lives: Iterable[Life]) -> list[Track]:
    """All cards and slices of the fleet with what ran on them."""
    by_seat: dict[tuple[str, int, int], list[tuple[float, float, float]]] = defaultdict(list)
    for life in lives:
        for seat in life.seats:
            span = (life.started_at.timestamp(), life.ended_at.timestamp(), life.load)
            by_seat[seat.node, seat.index, seat.start if seat.profile else -1].append(span)
            if seat.profile or seat.milli < 1000:
                by_seat[seat.node, seat.index, -1].append((*span[:2], span[2] * 0.4))
    watts = {kind.name: kind.watts for _s, _n, kind, _c, _m in fleet.LAYOUT}
    silent = {card for card, what in fleet.BEHAVIOUR.items() if what["behaviour"] == "no_data"}
    found = []
    for gpu in Gpu.objects.filter(simulated=True).select_related("node").order_by("id"):
        key = (gpu.node.name, gpu.index)
        if key in silent:
            continue
        found.append(
            Track(
                gpu.pk, 0, gpu.memory_mib, watts.get(gpu.model_name, 300), gpu.mig_enabled, by_seat[*key, -1]
            )
        )
    for one in MigSlice.objects.filter(gpu__simulated=True, gone_at=None).select_related("gpu__node"):
        key3 = (one.gpu.node.name, one.gpu.index, one.start)
        found.append(Track(one.gpu_id, one.gpu_instance + 1, one.memory_mib, 0, True, by_seat[key3]))
    return found


def _busy(track: Track, starts: np.ndarray, length: int) -> np.ndarray:
    """Mean load of each window [start, start + length), from 0 to 1."""
    load = np.zeros(len(starts))
    for begin, end, level in track.lives:
        first = max(0, int(np.searchsorted(starts, begin - length, side="right")))
        last = int(np.searchsorted(starts, end, side="left"))
        window = starts[first:last]
        part = np.minimum(window + length, end) - np.maximum(window, begin)
        load[first:last] += level * np.clip(part, 0, length) / length
    return np.minimum(load, 0.99)


def _figures(track: Track, load: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Utilization in per mille, memory in MiB, °C and mW for a row of loads."""
    busy = load > 0.005
    wave = 1 + 0.08 * np.sin(np.arange(len(load)) / 3.1) + rng.normal(0, 0.04, len(load))
    util = np.where(busy, np.clip(load * wave, 0.01, 1.0), 0.0)
    memory = np.where(busy, 0.35 + 0.55 * np.sqrt(load), 0.006) * track.memory_mib
    temp = 31 + 40 * util + rng.normal(0, 1.2, len(load))
    power = (0.14 + 0.8 * util) * track.watts * 1000
    return {
        "util": np.round(util * 1000).astype(int),
        "mem": np.round(memory).astype(int),
        "temp": np.round(temp).astype(int),
        "power": np.round(power).astype(int),
    }


def _hour_rows(track: Track, starts: np.ndarray) -> list[tuple[Any, ...]]:
    rng = np.random.default_rng([track.gpu_id, track.slot])
    f = _figures(track, _busy(track, starts, HOUR), rng)
    board = track.slot == 0  # temperature and power belong to the board, once
    util_n, sm_n = (0, SAMPLES) if track.split else (SAMPLES, SAMPLES)
    if track.split and board:
        sm_n = 0
    rows = []
    for i, start in enumerate(starts):
        util, mem, temp, power = (int(f[name][i]) for name in ("util", "mem", "temp", "power"))
        rows.append(
            (
                track.gpu_id, track.slot, HOUR, datetime.fromtimestamp(float(start), UTC), SAMPLES, HOUR,
                util_n, util * util_n, min(1000, util + 40) if util_n else None,
                sm_n, int(util * 0.86) * sm_n,
                SAMPLES, mem * SAMPLES, mem,
                SAMPLES * board, temp * SAMPLES * board, temp + 3 if board else None,
                SAMPLES * board, power * SAMPLES * board, int(power * 1.05) if board else None,
            )
        )  # fmt: skip
    return rows


def _raw_rows(track: Track, starts: np.ndarray) -> list[tuple[Any, ...]]:
    rng = np.random.default_rng([track.gpu_id, track.slot, 1])
    f = _figures(track, _busy(track, starts, RAW_EACH_S), rng)
    board = track.slot == 0
    rows = []
    for i, start in enumerate(starts):
        util = int(f["util"][i])
        sm = None if track.split and board else int(util * 0.86)
        rows.append(
            (
                datetime.fromtimestamp(float(start), UTC), track.gpu_id, track.slot,
                None if track.split else util, sm, int(f["mem"][i]), track.memory_mib,
                int(f["temp"][i]) if board else None, int(f["power"][i]) if board else None,
            )
        )  # fmt: skip
    return rows


def _copy(table: str, columns: str, rows: list[tuple[Any, ...]]) -> None:
    """Add rows that are not there yet."""
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("DROP TABLE IF EXISTS pg_temp.demo_stage")
        cursor.execute(
            f"CREATE TEMP TABLE demo_stage ON COMMIT DROP AS SELECT {columns} FROM {table} LIMIT 0"
        )
        with cursor.copy(f"COPY demo_stage ({columns}) FROM STDIN") as copy:
            for row in rows:
                copy.write_row(row)
        cursor.execute(
            f"INSERT INTO {table} ({columns}) SELECT {columns} FROM demo_stage ON CONFLICT DO NOTHING"
        )


def write_hours(found: list[Track], anchor: datetime) -> int:
    """Hourly rollups of the whole time but the last two hours, and the days made of them; returns rows."""
    end = anchor.replace(minute=0, second=0, microsecond=0) - timedelta(hours=RAW_HOURS)
    begin = end - timedelta(days=cast.DAYS)
    starts = np.arange(begin.timestamp(), end.timestamp(), HOUR)
    rollup_partitions_ensure(step=HOUR, buckets=[begin + timedelta(days=n) for n in range(cast.DAYS + 1)])
    count = 0
    for part in range(0, len(found), 16):
        rows = [row for track in found[part : part + 16] for row in _hour_rows(track, starts)]
        _copy("monitoring_gpurollup", ROLLUP, rows)
        count += len(rows)
    fleet_sums(step=HOUR, start=begin, end=end)
    day = begin.replace(hour=0)
    rollups_mark(buckets=[day + timedelta(days=n) for n in range(cast.DAYS + 2)], step=86400)
    rollup_run()
    return count


def write_raw(found: list[Track], anchor: datetime) -> int:
    """Raw samples of the last two hours before the demo began, summed to minutes and hours; returns rows."""
    begin = anchor.replace(minute=0, second=0, microsecond=0) - timedelta(hours=RAW_HOURS)
    partitions_ensure(days={(begin + timedelta(days=n)).date() for n in range(3)})
    starts = np.arange(begin.timestamp(), anchor.timestamp() - RAW_EACH_S, RAW_EACH_S)
    count = 0
    for part in range(0, len(found), 16):
        rows = [row for track in found[part : part + 16] for row in _raw_rows(track, starts)]
        _copy("monitoring_gpusample", RAW, rows)
        count += len(rows)
    minutes = int((anchor - begin) / timedelta(minutes=1)) + 1
    rollups_mark(buckets=[begin + timedelta(minutes=n) for n in range(minutes)])
    rollup_run()
    return count
