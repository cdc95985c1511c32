"""Time series of cards: the last hour from raw samples, anything longer from rollups. Missing stays missing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from django.db import connection

from monitoring.engine.rollup import mean
from portal.kernel.clock import now
from portal.kernel.units import to_ms

Key = tuple[int, int]
RAW_LIMIT = timedelta(hours=1)
POINTS = 1000
HOUR_S = 3600


@dataclass(frozen=True)
class Span:
    """A period a chart offers: its length, the rollup it reads, and the seconds that one point covers."""

    code: str
    length: timedelta
    step: int
    point_s: int


SPANS: dict[str, Span] = {
    "1h": Span("1h", timedelta(hours=1), 60, 60),
    "24h": Span("24h", timedelta(hours=24), 60, 300),
    "7d": Span("7d", timedelta(days=7), 3600, 3600),
    "30d": Span("30d", timedelta(days=30), 3600, 3600),
    "1y": Span("1y", timedelta(days=365), 86400, 86400),
}


@dataclass
class Live:
    """Samples of one card in order of time: ms, percent, MiB, °C, W; None where a measure was missing."""

    t: list[int] = field(default_factory=list)
    busy: list[float | None] = field(default_factory=list)
    sm: list[float | None] = field(default_factory=list)
    mem: list[int | None] = field(default_factory=list)
    temp: list[int | None] = field(default_factory=list)
    power: list[float | None] = field(default_factory=list)

    def as_json(self) -> dict[str, list[Any]]:
        return {
            "t": self.t,
            "busy": self.busy,
            "sm": self.sm,
            "mem": self.mem,
            "temp": self.temp,
            "power": self.power,
        }


_RECENT = """
SELECT s.gpu_id, s.slot, s.at, s.util_pm, s.sm_pm, s.mem_used_mib, s.temp_c, s.power_mw
FROM unnest(%(gpus)s::bigint[], %(slots)s::smallint[]) AS k(gpu_id, slot)
JOIN monitoring_gpusample s ON s.gpu_id = k.gpu_id AND s.slot = k.slot
WHERE s.at >= %(since)s AND s.at < %(until)s ORDER BY s.at
"""


def recent(
    keys: Sequence[Key], *, length: timedelta, points: int = POINTS, until: datetime | None = None
) -> dict[Key, Live]:
    """The raw samples of the last `length` (at most an hour), thinned to about `points` a card by leaving out."""
    length = min(length, RAW_LIMIT)
    end = until or now() + timedelta(minutes=1)
    start = (until or now()) - length
    out: dict[Key, Live] = {key: Live() for key in keys}
    if not keys:
        return out
    with connection.cursor() as cursor:
        cursor.execute(
            _RECENT,
            {"gpus": [k[0] for k in keys], "slots": [k[1] for k in keys], "since": start, "until": end},
        )
        rows = cursor.fetchall()
    gap_ms = length / timedelta(milliseconds=1) / points
    for gpu_id, slot, at, util, sm, mem, temp, power in rows:
        line = out[gpu_id, slot]
        moment = to_ms(at)
        if line.t and moment - line.t[-1] < gap_ms:
            continue
        line.t.append(moment)
        line.busy.append(None if util is None else util / 10)
        line.sm.append(None if sm is None else sm / 10)
        line.mem.append(mem)
        line.temp.append(temp)
        line.power.append(None if power is None else round(power / 1000, 1))
    return out


@dataclass(frozen=True, slots=True)
class Point:
    """One point of a history: means of the samples that had the measure (None: none had), maxima, coverage 0–1."""

    at: datetime
    seconds: int
    samples: int
    coverage: float
    util: float | None
    util_max: float | None
    sm: float | None
    mem_mib: float | None
    mem_max_mib: int | None
    temp: float | None
    temp_max: int | None
    power_w: float | None
    power_max_w: float | None


_SUMS = """
    date_bin(%(point)s * interval '1 second', r.bucket, 'epoch') AS at, sum(samples), sum(covered_s),
    sum(util_n), sum(util_sum)::bigint, max(util_max), sum(sm_n), sum(sm_sum)::bigint,
    sum(mem_n), sum(mem_sum)::bigint, max(mem_max), sum(temp_n), sum(temp_sum)::bigint, max(temp_max),
    sum(power_n), sum(power_sum)::bigint, max(power_max)
FROM unnest(%(gpus)s::bigint[], %(slots)s::smallint[]) AS k(gpu_id, slot)
JOIN monitoring_gpurollup r ON r.gpu_id = k.gpu_id AND r.slot = k.slot
WHERE r.step = %(step)s AND r.bucket >= %(start)s AND r.bucket < %(end)s
"""
_HISTORY = f"SELECT {_SUMS} GROUP BY 1 ORDER BY 1"
_HISTORIES = f"SELECT k.gpu_id, k.slot, {_SUMS} GROUP BY 1, 2, 3 ORDER BY 3"


def history(keys: Iterable[Key], *, start: datetime, end: datetime, step: int, point_s: int) -> list[Point]:
    """Means over the cards in points of `point_s` seconds (a multiple of `step`), only where there is data.

    A mean is over samples that had the measure; `coverage` is covered time over the time of all the cards asked
    for, so a card without data lowers it and never the mean.
    """
    wanted = list(dict.fromkeys(keys))
    if not wanted:
        return []
    with connection.cursor() as cursor:
        cursor.execute(_HISTORY, _asked(wanted, start, end, step, point_s))
        return [_point(row, point_s, len(wanted)) for row in cursor.fetchall()]


def histories(
    keys: Iterable[Key], *, start: datetime, end: datetime, step: int, point_s: int
) -> dict[Key, list[Point]]:
    """The same for each card by itself, in one query; a card without data has no points."""
    out: dict[Key, list[Point]] = {key: [] for key in keys}
    if out:
        with connection.cursor() as cursor:
            cursor.execute(_HISTORIES, _asked(list(out), start, end, step, point_s))
            for gpu_id, slot, *row in cursor.fetchall():
                out[gpu_id, slot].append(_point(row, point_s, 1))
    return out


def _asked(keys: list[Key], start: datetime, end: datetime, step: int, point_s: int) -> dict[str, Any]:
    gpus, slots = [k[0] for k in keys], [k[1] for k in keys]
    return {"gpus": gpus, "slots": slots, "step": step, "point": point_s, "start": start, "end": end}


def _point(row: Sequence[Any], point_s: int, cards: int) -> Point:
    at, samples, covered, un, us, um, sn, ss, mn, ms, mm, tn, ts, tm, pn, ps, pm = row
    return Point(
        at=at,
        seconds=point_s,
        samples=samples,
        coverage=min(1.0, covered / (point_s * cards)),
        util=_scaled(us, un, 10),
        util_max=None if um is None else um / 10,
        sm=_scaled(ss, sn, 10),
        mem_mib=_scaled(ms, mn, 1),
        mem_max_mib=mm,
        temp=_scaled(ts, tn, 1),
        temp_max=tm,
        power_w=_scaled(ps, pn, 1000),
        power_max_w=None if pm is None else round(pm / 1000, 1),
    )


def _scaled(total: int, n: int, scale: int) -> float | None:
    value = mean(total, n)
    return None if value is None else round(value / scale, 2)


def span_start(span: Span, end: datetime) -> datetime:
    """Where a span that ends then begins: at the begin of a point."""
    start = end - span.length
    return start - timedelta(seconds=start.timestamp() % span.point_s)


def chart(keys: Iterable[Key], *, start: datetime, end: datetime, step: int, point_s: int) -> list[Point]:
    """`history` for a chart: where minutes are asked and do not reach back (they are kept for a shorter time), the
    hours before them stand in."""
    wanted = list(keys)
    points = history(wanted, start=start, end=end, step=step, point_s=point_s)
    hours = _hours_before(points[0].at if points else end, start, step)
    return history(wanted, step=HOUR_S, point_s=HOUR_S, **hours) + points if hours else points


def charts(
    keys: Iterable[Key], *, start: datetime, end: datetime, step: int, point_s: int
) -> dict[Key, list[Point]]:
    """The same for each card by itself."""
    wanted = list(keys)
    found = histories(wanted, start=start, end=end, step=step, point_s=point_s)
    hours = _hours_before(min((p[0].at for p in found.values() if p), default=end), start, step)
    older = histories(wanted, step=HOUR_S, point_s=HOUR_S, **hours) if hours else {}
    return {key: older.get(key, []) + points for key, points in found.items()}


def _hours_before(first: datetime, start: datetime, step: int) -> dict[str, datetime]:
    """The whole hours from `start` to the hour of the `first` point; empty where there is none."""
    begin, end = (at - timedelta(seconds=at.timestamp() % HOUR_S) for at in (start, first))
    return {"start": begin, "end": end} if step < HOUR_S and begin < end else {}


def span_points(keys: Iterable[Key], span: Span) -> list[Point]:
    """The history of a span that ends now."""
    end = now()
    return chart(keys, start=span_start(span, end), end=end, step=span.step, point_s=span.point_s)
