"""What alert rules compare: metric → subject → value. Cards from the board of this process, nodes, and the pool."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
from django.db.models import Avg, Sum

from monitoring.engine.board import Board
from monitoring.engine.frames import NONE16, NONE32
from monitoring.engine.tiles import NO_DATA_MS, STATES
from monitoring.models import AlertRule, Finding, GpuSample, NodeState
from monitoring.selectors.board import board_now
from pool.models import Node
from portal.kernel.clock import now
from portal.kernel.units import to_ms

M = AlertRule.Metric
CARDS = frozenset({M.GPU_TEMP, M.GPU_BUSY, M.GPU_MEMORY, M.GPU_POWER, M.GPU_AGE})
POWER_MEAN = timedelta(seconds=30)
NODES = frozenset({M.NODE_CPU, M.NODE_IOWAIT, M.NODE_SKEW})


@dataclass(frozen=True, slots=True)
class Subject:
    """One thing with its value in the metric's unit; `site` empty for the pool."""

    label: str
    site: str
    value: float


def values_of(metrics: Iterable[str]) -> dict[str, dict[str, Subject]]:
    """Values of these metrics; what has none (no sample, too old a one, not reported) is left out."""
    wanted = set(metrics)
    board = board_now()
    out: dict[str, dict[str, Subject]] = {metric: {} for metric in wanted}
    for metric in wanted & CARDS:
        out[metric] = _cards(board, metric)
    if wanted & NODES:
        _nodes(out, wanted & NODES)
    pool = wanted - CARDS - NODES
    if pool:
        counts, sums = board.counts(), board.sums()
        values = {
            M.POOL_FREE: sums.free / 1000,
            M.POOL_DOWN: sums.down / 1000,
            M.POOL_NO_DATA: counts["no_data"],
            M.POOL_WASTE: _waste() if M.POOL_WASTE in pool else 0,
        }
        for metric in pool:
            out[metric] = {"pool": Subject("pool", "", float(values[M(metric)]))}
    return out


def _cards(board: Board, metric: str) -> dict[str, Subject]:
    cards = np.flatnonzero(board.is_card)
    at = board.at[cards]
    now_ms = to_ms(now())
    age = (now_ms - at) / 1000
    fresh = (at > 0) & (now_ms - at <= NO_DATA_MS)
    values: npt.NDArray[Any]
    if metric == M.GPU_AGE:
        values, usable = age, at > 0
    elif metric == M.GPU_MEMORY:
        used, total = board.mem_used[cards], board.mem_total[cards]
        usable = fresh & (used != NONE32) & (total > 0)
        values = np.divide(100.0 * used, total, out=np.zeros(len(cards)), where=total > 0)
    elif metric == M.GPU_POWER:
        usable = fresh & (board.power[cards] != NONE32)
        means = _power_means()
        values = np.array(
            [
                means.get(board.cells[place].gpu_id, last)
                for place, last in zip(cards.tolist(), board.power[cards].tolist(), strict=True)
            ],
            float,
        )
        values /= 1000
    elif metric == M.GPU_BUSY:
        values, usable = board.util[cards] / 10, fresh & (board.util[cards] != NONE16)
    else:
        values, usable = board.temp[cards].astype(float), fresh & (board.temp[cards] != NONE16)
    # Work under maintenance or on cards that are known to be broken is not news.
    known = np.isin(
        board.columns["state"][cards], [STATES.index(s) for s in ("maintenance", "fault", "lost")]
    )
    out: dict[str, Subject] = {}
    for k in np.flatnonzero(usable & ~known).tolist():
        cell = board.cells[int(cards[k])]
        node = board.nodes[cell.node]
        site = board.sites[node.site][1]
        out[f"g:{cell.gpu_id}"] = Subject(f"{node.name}/{cell.number}", site, float(values[k]))
    return out


def _power_means() -> dict[int, float]:
    """Card → mean power in mW of the last half minute. What a driver tells is the mean of a second on some cards and an
    instant on others (pitfall P09): a threshold is about neither. A card that tells less often has its last value."""
    recent = GpuSample.objects.filter(at__gt=now() - POWER_MEAN, slot=0, power_mw__isnull=False)
    means = recent.order_by().values_list("gpu_id").annotate(mean=Avg("power_mw"))
    return {gpu: float(mean) for gpu, mean in means}


def _nodes(out: dict[str, dict[str, Subject]], metrics: set[str]) -> None:
    hosts = {
        node: (cpu, iowait)
        for node, cpu, iowait in NodeState.objects.filter(
            at__gt=now() - timedelta(milliseconds=NO_DATA_MS)
        ).values_list("node_id", "cpu_pm", "iowait_pm")
    }
    nodes = Node.objects.exclude(schedulable__in=["retired", "maintenance"]).exclude(health="unknown")
    for pk, name, site, skew in nodes.order_by("id").values_list(
        "id", "name", "cluster__site__code", "clock_skew_ms"
    ):
        cpu, iowait = hosts.get(pk, (None, None))
        values = {
            M.NODE_CPU: None if cpu is None else cpu / 10,
            M.NODE_IOWAIT: None if iowait is None else iowait / 10,
            M.NODE_SKEW: None if skew is None else abs(skew),
        }
        for metric in metrics:
            value = values[M(metric)]
            if value is not None:
                out[metric][f"n:{pk}"] = Subject(name, site, float(value))


def _waste() -> float:
    total = Finding.objects.filter(state=Finding.State.OPEN).aggregate(Sum("waste_milli"))["waste_milli__sum"]
    return (total or 0) / 1000
