"""The scheduling cycle through the database at 10,000 cards: snapshot, plan, apply, and what is written of those who
wait. Whole cycles with some work ended before each, cycles for one new request, and admissions in a row.
"""

from __future__ import annotations

from typing import Any

from tests.perf._database import fresh_database

CARDS = 10_000


def run() -> dict[str, Any]:
    """p50 and p95 of both kinds of cycle, admissions per second, memory, and that no card is held twice."""
    with fresh_database():
        import structlog

        from tests.perf import _pool_scale as pool
        from tests.perf._cycle_run import measure, over_allocated

        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
        scale = pool.build(CARDS)
        figures = measure(scale, whole=20, quick=30, burst=1500)
        figures["over_allocated_milli"] = max(0, over_allocated())
        return {
            "sizes": scale.sizes,
            "figures": figures,
            "aims": {
                "whole_p95_ms": ["<", 2000],
                "new_request_p95_ms": ["<", 150],
                "admissions_per_s": [">=", 400],
                "wish_p95_ms": ["<", 1000],
                "over_allocated_milli": ["<", 1],
            },
        }
