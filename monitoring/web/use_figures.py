"""The pool's use before and after findings began, as sentence figures and a weekly chart with its table twin."""

from __future__ import annotations

from datetime import date
from typing import Any

from django.utils.translation import gettext as _

from monitoring.selectors.findings import Period, before_and_after
from portal.kernel.tables import share


def _percent(part: int, whole: int) -> float | None:
    value = share(part, whole)
    return None if value is None else value / 100


def turn_figure(weeks: list[Period], turn: date | None) -> dict[str, Any] | None:
    """Stats and chart: allocated and effective as shares of what was installed, week by week. None without data."""
    if not weeks:
        return None
    before, after = before_and_after(weeks, turn) if turn is not None else (None, None)
    xs = [f"{week.first:%Y-%m-%d}" for week in weeks]
    allocated = [_percent(week.allocated, week.installed) for week in weeks]
    effective = [_percent(week.effective, week.installed) for week in weeks]
    shapes = []
    if turn is not None and weeks[0].first <= turn:
        mark = {
            "type": "line",
            "xref": "x",
            "yref": "paper",
            "x0": f"{turn}",
            "x1": f"{turn}",
            "y0": 0,
            "y1": 1,
        }
        shapes.append({**mark, "line": {"color": "--line-control", "dash": "dot", "width": 1.5}})
    chart = {
        "data": [
            {"type": "scatter", "mode": "lines+markers", "name": _("Allocated"), "x": xs, "y": allocated,
             "line": {"color": "--cat-1"}, "marker": {"color": "--cat-1"}},
            {"type": "scatter", "mode": "lines+markers", "name": _("Effective"), "x": xs, "y": effective,
             "line": {"color": "--cat-2"}, "marker": {"color": "--cat-2"}},
        ],
        "layout": {"yaxis": {"range": [0, 100]}, "xaxis": {"type": "date"}, "shapes": shapes},
        "table": {
            "head": [_("Week from"), _("Allocated of installed, %"), _("Effective of installed, %"),
                     _("Effective of allocated, %")],
            "rows": [
                [x, a, e, _percent(week.effective, week.allocated)]
                for x, a, e, week in zip(xs, allocated, effective, weeks, strict=True)
            ][::-1],
        },
    }  # fmt: skip
    return {"chart": chart, "turn": turn, "stats": _stats(before, after)}


def _stats(before: Period | None, after: Period | None) -> list[dict[str, Any]]:
    """Before and after, side by side; empty where one of the two is missing."""
    if before is None or after is None:
        return []
    return [
        {
            "label": label,
            "before": _percent(getattr(before, part), getattr(before, whole)),
            "after": _percent(getattr(after, part), getattr(after, whole)),
        }
        for label, part, whole in (
            (_("Allocated of installed"), "allocated", "installed"),
            (_("Effective of installed"), "effective", "installed"),
            (_("Effective of allocated"), "effective", "allocated"),
        )
    ]
