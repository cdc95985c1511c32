"""The history of the whole pool, or of its clusters and flavours, by hour or day: from sums that are kept ready."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db import connection

from monitoring.engine.rollup import mean

STEPS = (3600, 86400)


@dataclass(frozen=True, slots=True)
class FleetPoint:
    """Means of the samples of one hour or day over the cards that had any; None where none had the measure.

    `cards` had at least one sample; `coverage` is covered time over the time of those cards, 0 to 1.
    """

    at: datetime
    cards: int
    coverage: float
    util: float | None
    sm: float | None
    mem_mib: float | None
    temp: float | None
    power_w: float | None


_HISTORY = """
SELECT bucket, sum(cards), sum(covered_s), sum(util_n), sum(util_sum), sum(sm_n), sum(sm_sum), sum(mem_n),
    sum(mem_sum), sum(temp_n), sum(temp_sum), sum(power_n), sum(power_sum)
FROM monitoring_fleetrollup
WHERE step = %(step)s AND bucket >= %(start)s AND bucket < %(end)s
    AND (%(clusters)s::bigint[] IS NULL OR cluster_id = ANY(%(clusters)s))
    AND (%(flavours)s::bigint[] IS NULL OR flavour_id = ANY(%(flavours)s))
GROUP BY bucket ORDER BY bucket
"""


def fleet_history(
    *,
    start: datetime,
    end: datetime,
    step: int,
    clusters: Sequence[int] | None = None,
    flavours: Sequence[int] | None = None,
) -> list[FleetPoint]:
    """Points of `step` seconds (3600 or 86400) from `start`, inclusive, to `end`, only where there is data."""
    with connection.cursor() as cursor:
        cursor.execute(
            _HISTORY,
            {
                "step": step,
                "start": start,
                "end": end,
                "clusters": None if clusters is None else list(clusters),
                "flavours": None if flavours is None else list(flavours),
            },
        )
        rows = cursor.fetchall()
    return [_point(row, step) for row in rows]


def _point(row: Sequence[Any], step: int) -> FleetPoint:
    at, cards, covered, *sums = row
    counts = [int(number) for number in sums]

    def value(place: int, scale: int) -> float | None:
        found = mean(counts[place + 1], counts[place])
        return None if found is None else round(found / scale, 2)

    return FleetPoint(
        at=at,
        cards=int(cards),
        coverage=min(1.0, int(covered) / (int(cards) * step)) if cards else 0.0,
        util=value(0, 10),
        sm=value(2, 10),
        mem_mib=value(4, 1),
        temp=value(6, 1),
        power_w=value(8, 1000),
    )
