"""How fast requests are placed, and how much of a real fleet a real workload fills.

The recorded tasks of the openb trace (1,213 nodes, 6,212 GPUs, 10,846 tasks up to 130 % of them; seed 1 with seed 2 as
the history) through the product's placement, one core. Times are CPU time, each decision's the least of three equal
runs: what else the machine does counts as little as can be. Beside it the same tasks by plain first fit (the first
node in the order of the file) and by best fit (the node left with the least CPU and GPU), and by the product with no
history at all. Needs ../shared/traces.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"
WIDTH = 8
RUNS = 3

Place = tuple[int, list[int]]


def rows(name: str) -> list[dict[str, str]]:
    with (TRACES / name).open(newline="") as file:
        return list(csv.DictReader(file))


class Bare:
    """The fleet as plain arrays, for the two simple policies."""

    def __init__(self, nodes: list[Any]) -> None:
        self.cpu = np.array([node.cpu_milli for node in nodes])
        self.memory = np.array([node.memory_mib for node in nodes])
        self.free = np.array([[1000] * len(node.gpus) + [0] * (WIDTH - len(node.gpus)) for node in nodes])
        self.model = np.array([node.gpus[0].flavour if node.gpus else "" for node in nodes])
        self.largest_cpu = self.cpu.max()

    def fitting(self, task: Any) -> np.ndarray:
        fits = (self.cpu >= task.cpu_milli) & (self.memory >= task.memory_mib)
        if task.gpus:
            fits &= (self.free >= task.milli).sum(axis=1) >= task.gpus
        if task.models:
            fits &= np.isin(self.model, task.models)
        return np.flatnonzero(fits)

    def book(self, task: Any, row: int) -> None:
        free = self.free[row]
        able = np.flatnonzero(free >= task.milli) if task.gpus else np.array([], dtype=int)
        chosen = able[np.argsort(free[able], kind="stable")][: task.gpus]
        self.cpu[row] -= task.cpu_milli
        self.memory[row] -= task.memory_mib
        free[chosen] -= task.milli


def first_fit(bare: Bare, fitting: np.ndarray, task: Any) -> int:
    return int(fitting[0])


def best_fit(bare: Bare, fitting: np.ndarray, task: Any) -> int:
    """The published comparison's score: what is left of CPU and GPU, against the largest node."""
    cpu = (bare.cpu[fitting] - task.cpu_milli) / bare.largest_cpu
    gpu = (bare.free[fitting].sum(axis=1) - task.gpus * task.milli) / (1000 * WIDTH)
    return int(fitting[np.argmin(cpu + gpu)])


def simple(nodes: list[Any], tasks: list[Any], choose: Callable[[Bare, np.ndarray, Any], int]) -> list[bool]:
    """Which tasks find a place by a simple policy."""
    bare = Bare(nodes)
    placed = []
    for task in tasks:
        fitting = bare.fitting(task)
        placed.append(bool(len(fitting)))
        if len(fitting):
            bare.book(task, choose(bare, fitting, task))
    return placed


def allocated(nodes: list[Any], tasks: list[Any], placed: Iterable[bool]) -> tuple[float, float]:
    """Allocated share of all GPUs in percent when 100 % of them had been asked for, and at the end."""
    capacity = 1000 * sum(len(node.gpus) for node in nodes)
    arrived = used = 0
    at_full = 0.0
    for task, there in zip(tasks, placed, strict=True):
        arrived += task.gpus * task.milli
        used += task.gpus * task.milli * there
        if arrived <= capacity:
            at_full = 100 * used / capacity
    return round(at_full, 3), round(100 * used / capacity, 3)


def run() -> dict[str, Any]:
    """Decisions per second with their 99th percentile, and the allocation of four ways to place the same tasks."""
    from pool.engine.replay_nodes import history_mix, read_nodes, read_tasks, replay_nodes

    if not TRACES.is_dir():
        return {"sizes": {}, "figures": {"not_run": "needs ../shared/traces"}, "aims": {}}
    nodes = read_nodes(rows("nodes.csv"))
    tasks, past = read_tasks(rows("tasks_seed1.csv")), read_tasks(rows("tasks_seed2.csv"))
    runs = [list(replay_nodes(nodes, tasks, history_mix(past), time.process_time)) for _ in range(RUNS)]
    decisions = runs[0]
    seconds = np.array([[one.seconds for one in decided] for decided in runs]).min(axis=0)
    learning = list(replay_nodes(nodes, tasks, None, time.process_time))
    full, end = allocated(nodes, tasks, [bool(one.node) for one in decisions])
    full_learnt, end_learnt = allocated(nodes, tasks, [bool(one.node) for one in learning])
    full_first, end_first = allocated(nodes, tasks, simple(nodes, tasks, first_fit))
    full_best, end_best = allocated(nodes, tasks, simple(nodes, tasks, best_fit))
    return {
        "sizes": {"nodes": len(nodes), "gpus": sum(len(node.gpus) for node in nodes), "tasks": len(tasks)},
        "figures": {
            "decisions_per_s": round(len(seconds) / float(seconds.sum()), 1),
            "decision_p50_ms": round(1000 * float(np.percentile(seconds, 50)), 3),
            "decision_p99_ms": round(1000 * float(np.percentile(seconds, 99)), 3),
            "allocated_at_100_percent": full,
            "allocated_at_130_percent": end,
            "no_history_at_100_percent": full_learnt,
            "no_history_at_130_percent": end_learnt,
            "first_fit_at_100_percent": full_first,
            "first_fit_at_130_percent": end_first,
            "best_fit_at_100_percent": full_best,
            "best_fit_at_130_percent": end_best,
        },
        "aims": {
            "decisions_per_s": [">=", 4000],
            "decision_p99_ms": ["<", 5],
            "allocated_at_100_percent": [">=", 95.9],
            "allocated_at_130_percent": [">=", 96.0],
        },
    }
