"""Prometheus text of the pool: cards, measures, waste, incidents. A missing measure is absent, never 0 (P19)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from django.db.models import Count, Sum
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from monitoring.engine.board import Board
from monitoring.engine.frames import NONE16, NONE32
from monitoring.engine.tiles import STATES
from monitoring.models import Finding, GpuEvent, MetricSource
from monitoring.selectors.board import board_now
from pool.models import Node
from portal.ops.models import Incident
from portal.ops.selectors.runs import sweep_last

_LABELS = ["gpu", "slot", "node", "index", "site", "model"]
"""`slot` 0 is the card, others its MIG instances: sums and means over cards take slot 0 alone."""


class PoolCollector(Collector):
    """Reads the board of this process when it is scraped."""

    def __init__(self, board: Board) -> None:
        self.board = board

    def collect(self) -> Iterator[Metric]:
        """All families; base units as Prometheus has them (ratio, bytes, celsius, watts, seconds)."""
        yield self._states()
        yield from self._measures()
        yield self._installed()
        yield from _found()
        yield from _sources()
        yield from _sweeps()

    def _states(self) -> Metric:
        board = self.board
        counts: Counter[tuple[str, str, str]] = Counter()
        for i in board.cards():
            node = board.nodes[board.cells[i].node]
            counts[board.sites[node.site][1], node.model, STATES[board.columns[i]["state"]]] += 1
        family = GaugeMetricFamily("gpupool_gpus", "Cards by state", labels=["site", "model", "state"])
        for labels, n in sorted(counts.items()):
            family.add_metric(list(labels), n)
        return family

    def _installed(self) -> Metric:
        sums = self.board.sums()
        family = GaugeMetricFamily(
            "gpupool_capacity_gpus", "Parts of what is installed, in GPUs", labels=["part"]
        )
        for part in (
            "installed",
            "allocated",
            "free",
            "stranded",
            "cordoned",
            "outside",
            "maintenance",
            "down",
        ):
            family.add_metric([part], getattr(sums, part) / 1000)
        return family

    def _measures(self) -> Iterator[Metric]:
        board = self.board
        families: list[tuple[str, str, Any, int, float]] = [
            ("gpupool_gpu_busy_ratio", "Share of time in which a kernel ran", board.util, NONE16, 1 / 1000),
            ("gpupool_gpu_sm_activity_ratio", "SM or GR-engine activity", board.sm, NONE16, 1 / 1000),
            ("gpupool_gpu_memory_used_bytes", "Memory used", board.mem_used, NONE32, 1_048_576),
            (
                "gpupool_gpu_memory_total_bytes",
                "Memory of the card or slice",
                board.mem_total,
                NONE32,
                1_048_576,
            ),
            ("gpupool_gpu_temperature_celsius", "Temperature of the card", board.temp, NONE16, 1),
            ("gpupool_gpu_power_watts", "Power of the board", board.power, NONE32, 1 / 1000),
        ]
        labels, silent = [self._labels(i) for i in range(len(board.cells))], board.silent.tolist()
        for name, text, values, none, scale in families:
            family = GaugeMetricFamily(name, text, labels=_LABELS)
            for i, value in enumerate(values.tolist()):
                if value != none and not silent[i]:
                    family.add_metric(labels[i], value * scale)
            yield family
        age = GaugeMetricFamily(
            "gpupool_gpu_last_sample_timestamp_seconds", "Time of the last sample", labels=_LABELS
        )
        for i, at in enumerate(board.at.tolist()):
            if at:
                age.add_metric(labels[i], at / 1000)
        yield age

    def _labels(self, i: int) -> list[str]:
        cell = self.board.cells[i]
        node = self.board.nodes[cell.node]
        return [
            cell.uid,
            str(cell.slot),
            node.name,
            str(cell.number),
            self.board.sites[node.site][1],
            node.model,
        ]


def _sources() -> Iterator[Metric]:
    """Telemetry sources that are switched on: whether the last fetch was well, and when one was."""
    labels = ["source", "cluster"]
    up = GaugeMetricFamily("gpupool_source_up", "Whether the last fetch of a source was well", labels=labels)
    good = GaugeMetricFamily(
        "gpupool_source_last_good_timestamp_seconds", "Time of the last fetch that was well", labels=labels
    )
    rows = MetricSource.objects.filter(active=True).values_list(
        "name", "cluster__code", "last_code", "last_ok_at"
    )
    for name, cluster, code, at in rows:
        up.add_metric([name, cluster], float(code == "ok"))
        if at is not None:
            good.add_metric([name, cluster], at.timestamp())
    yield from (up, good)


def _sweeps() -> Iterator[Metric]:
    """When periodic work began last: expiry, reclaim, charging and notices all hang on it."""
    last = sweep_last()
    if last is not None:
        family = GaugeMetricFamily(
            "gpupool_last_sweep_timestamp_seconds",
            "Time of the last periodic sweep; alert when it stands still",
        )
        family.add_metric([], last.timestamp())
        yield family


def _found() -> Iterator[Metric]:
    """What was found: waste by kind, open incidents, XIDs seen, rows of work that waits; five queries."""
    waste = GaugeMetricFamily("gpupool_waste_gpus", "GPUs wasted now, by kind of finding", labels=["kind"])
    count = GaugeMetricFamily("gpupool_findings_open", "Open waste findings", labels=["kind"])
    so_long = CounterMetricFamily(
        "gpupool_waste_gpu_seconds", "GPU-seconds wasted so far, by kind", labels=["kind"]
    )
    open_now = {
        kind: (n, milli)
        for kind, n, milli in Finding.objects.filter(state=Finding.State.OPEN)
        .values_list("kind")
        .annotate(Count("id"), Sum("waste_milli"))
    }
    so_far = dict(Finding.objects.values_list("kind").annotate(Sum("gpu_ms")))
    for kind in Finding.Kind.values:
        n, milli = open_now.get(kind, (0, 0))
        count.add_metric([kind], n)
        waste.add_metric([kind], milli / 1000)
        so_long.add_metric([kind], so_far.get(kind, 0) / 1000)
    yield from (waste, count, so_long)
    incidents = GaugeMetricFamily("gpupool_incidents_open", "Open incidents", labels=["kind", "severity"])
    rows = Incident.objects.exclude(state="closed").values_list("kind", "severity").annotate(Count("id"))
    for kind, severity, n in rows.order_by("kind", "severity"):
        incidents.add_metric([kind, severity], n)
    yield incidents
    xids = CounterMetricFamily("gpupool_xid_events", "XIDs that nodes reported, by code", labels=["code"])
    for code, n in (
        GpuEvent.objects.filter(kind="xid").values_list("code").annotate(Count("id")).order_by("code")
    ):
        if code is not None:
            xids.add_metric([str(code)], n)
    yield xids
    nodes = GaugeMetricFamily(
        "gpupool_nodes", "Nodes by what was seen and what was decided", labels=["health", "schedulable"]
    )
    seen = (
        Node.objects.exclude(schedulable="retired").values_list("health", "schedulable").annotate(Count("id"))
    )
    for health, schedulable, n in seen.order_by("health", "schedulable"):
        nodes.add_metric([health, schedulable], n)
    yield nodes


_kept: tuple[float, Board, bytes] | None = None
KEEP_S = 10.0


def metrics_text() -> bytes:
    """The page of metrics; made at most every 10 s in a process, as several scrapers may ask."""
    global _kept
    board = board_now()
    if _kept is not None and _kept[1] is board and time.monotonic() - _kept[0] < KEEP_S:
        return _kept[2]
    registry = CollectorRegistry(auto_describe=False)
    registry.register(PoolCollector(board))
    text = bytes(generate_latest(registry))
    _kept = (time.monotonic(), board, text)
    return text
