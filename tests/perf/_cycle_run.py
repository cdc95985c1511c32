"""Cycles through the database at one size, by `tests.perf.cycle` and `tests.perf.growth`."""

from __future__ import annotations

import resource
import time
from typing import Any

ENDED_A_CYCLE = 40
"""Allocations that end before each whole cycle."""


def percentile(values: list[float], share: float) -> float:
    """The smallest value that this share of the values does not exceed; 0 of no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def measure(scale: Any, *, whole: int, quick: int, burst: int) -> dict[str, float]:
    """Milliseconds of whole cycles (with what ended freed before each) and of cycles for one new request, and
    admissions per second while `burst` allocations end at once and others take their places.
    """
    from pool.models import SchedulerCycle
    from pool.services.cycle import schedule_cycle
    from tests.perf import _pool_scale as pool

    first = _timed(lambda: schedule_cycle(cause="perf"))
    wholes, quicks, steps, cpu = [], [], dict[str, list[float]](), ([], [])
    for _ in range(whole):
        pool.give_back(ENDED_A_CYCLE)
        used = time.process_time()
        took, result = _timed(lambda: schedule_cycle(cause="perf"))
        assert result.ran and result.whole, result
        wholes.append(took)
        cpu[0].append((time.process_time() - used) * 1000)
        for row in SchedulerCycle.objects.order_by("-id")[:1]:
            for name, value in row.timings.items():
                steps.setdefault(name, []).append(value)
    placed_quick = 0
    for _ in range(4 * quick):
        if len(quicks) == quick:
            break
        pool.queue(scale, 1, pool.moment())
        used = time.process_time()
        took, result = _timed(lambda: schedule_cycle(cause="perf"))
        assert result.ran, result
        if result.whole:  # the floor, or a new request that may take something back
            continue
        cpu[1].append((time.process_time() - used) * 1000)
        placed_quick += len(result.placed)
        quicks.append(took)
    figures = {
        "first_cycle_ms": first[0],
        "whole_p50_ms": percentile(wholes, 0.5),
        "whole_p95_ms": percentile(wholes, 0.95),
        **{f"whole_{name}_ms": percentile(values, 0.5) for name, values in sorted(steps.items())},
        "whole_cpu_p50_ms": percentile(cpu[0], 0.5),
        "whole_cpu_p95_ms": percentile(cpu[0], 0.95),
        "new_request_cpu_p50_ms": percentile(cpu[1], 0.5),
        "new_request_p50_ms": percentile(quicks, 0.5),
        "new_request_p95_ms": percentile(quicks, 0.95),
        "new_requests_placed": placed_quick,
    }
    figures |= _wishes(scale) | _admissions(burst)
    figures["memory_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {name: round(value, 1) for name, value in figures.items()}


def _wishes(scale: Any) -> dict[str, float]:
    """Milliseconds of "if I asked for this": the first in a process, and others while one request comes in line and
    is judged before each.
    """
    from pool.selectors.fit import fit_check
    from pool.services.cycle import schedule_cycle
    from tests.perf import _pool_scale as pool

    took, cpu = [], []
    for number in range(12):
        wish = pool.request_row(
            scale, "a800", number, pool.moment(), gpus_per_node=4, charge_milli=4000, state="draft"
        )
        used = time.process_time()
        took.append(_timed(lambda one=wish: fit_check(one, max_age_s=0))[0])
        cpu.append((time.process_time() - used) * 1000)
        pool.queue(scale, 1, pool.moment())
        schedule_cycle(cause="perf")
    return {
        "first_wish_ms": took[0],
        "wish_p50_ms": percentile(took[1:], 0.5),
        "wish_p95_ms": percentile(took[1:], 0.95),
        "wish_cpu_p50_ms": percentile(cpu[1:], 0.5),
    }


def _admissions(burst: int) -> dict[str, float]:
    """The whole path from snapshot to written leases, as often as it takes until little more starts."""
    from pool.services.cycle import schedule_cycle
    from tests.perf import _pool_scale as pool

    pool.give_back(burst)
    placed, spent, cpu = 0, 0.0, 0.0
    while True:
        used = time.process_time()
        took, result = _timed(lambda: schedule_cycle(cause="perf"))
        if len(result.placed) < burst // 20:
            break
        placed, spent = placed + len(result.placed), spent + took / 1000
        cpu += time.process_time() - used
    return {
        "admitted": placed,
        "admissions_per_s": placed / spent if spent else 0.0,
        "admissions_per_cpu_s": placed / cpu if cpu else 0.0,
    }


def over_allocated() -> int:
    """Milli by which a card is held beyond itself, at worst."""
    from django.db.models import Sum

    from pool.models import Lease

    rows = Lease.objects.filter(ended_at=None).values("gpu_id").annotate(n=Sum("charge"))
    return max((row["n"] - 1000 for row in rows), default=0) if rows else 0


def _timed(call: Any) -> tuple[float, Any]:
    began = time.perf_counter()
    result = call()
    return (time.perf_counter() - began) * 1000, result
