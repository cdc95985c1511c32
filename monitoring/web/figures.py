"""Plotly figures of histories, made on the server; the browser only draws them. The package is loaded at first use."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, timedelta
from typing import Any

from django.utils.translation import gettext as _

from monitoring.selectors.series import Point

_SM_LINE = {"color": "--cat-2", "width": 1.5, "dash": "dash"}
Getter = Callable[[Point], float | int | None]


def _gib(value: float | None) -> float | None:
    return None if value is None else round(value / 1024, 2)


def lines() -> list[tuple[str, str, Getter, Getter]]:
    """(title, unit, mean, maximum) of the four measures, in order."""
    return [
        (_("GPU busy (time)"), "%", lambda p: p.util, lambda p: p.util_max),
        (_("Memory used"), "GiB", lambda p: _gib(p.mem_mib), lambda p: _gib(p.mem_max_mib)),
        (_("Temperature"), "°C", lambda p: p.temp, lambda p: p.temp_max),
        (_("Power"), "W", lambda p: p.power_w, lambda p: p.power_max_w),
    ]


def history_figure(points: Sequence[Point], *, start: str, end: str) -> dict[str, Any]:
    """Four plots above one time axis: the mean as a line, the maximum as a thin one; a hole in the data is a hole.

    Times are UTC in ISO form; static/js/charts.mjs moves them into the reader's zone. Colours are token names.
    """
    from plotly import graph_objects as go

    traces: list[dict[str, Any]] = []
    xs, holes = with_holes(points)
    rows = lines()
    layout: dict[str, Any] = {
        "height": 560,
        "showlegend": False,
        "margin": {"l": 8, "r": 8, "t": 20, "b": 8},
        "annotations": [],
        "xaxis": {"range": [start, end], "type": "date", "anchor": f"y{len(rows)}"},
    }
    share = 1 / len(rows)
    for k, (title, unit, value, top) in enumerate(rows):
        axis = "" if k == 0 else str(k + 1)
        high = 1 - k * share
        colours = {"gridcolor": "--line", "linecolor": "--line-strong", "zerolinecolor": "--line"}
        layout[f"yaxis{axis}"] = {
            "domain": [high - share + 0.05, high - 0.045],
            "rangemode": "tozero",
            "fixedrange": True,
            "automargin": True,
            "nticks": 4,
            **colours,
            **({"range": [0, 100]} if unit == "%" else {}),
        }
        layout["annotations"].append(
            {
                "text": f"{title}, {unit}",
                "xref": "paper",
                "yref": "paper",
                "x": 0,
                "y": high - 0.005,
                "showarrow": False,
                "xanchor": "left",
                "yanchor": "top",
                "font": {"size": 12, "color": "--ink-2"},
            }
        )
        for getter, name, line in (
            (
                top,
                _("%(measure)s, maximum") % {"measure": title},
                {"color": "--line-control", "width": 1, "dash": "dot"},
            ),
            (value, title, {"color": "--series", "width": 1.75}),
        ):
            ys = [None if i is None else getter(points[i]) for i in holes]
            trace = go.Scatter(
                x=xs,
                y=ys,
                name=f"{name}, {unit}",
                mode="lines",
                yaxis=f"y{axis}",
                xaxis="x",
                connectgaps=False,
            )
            plain = trace.to_plotly_json()
            plain["line"] = line  # token names are no colours to the package
            traces.append(plain)
    if any(point.sm is not None for point in points):
        # Beside the busy time, never mixed with it (P01)
        name = _("SM activity")
        ys = [None if i is None else points[i].sm for i in holes]
        trace = {"type": "scatter", "mode": "lines", "name": f"{name}, %", "x": xs, "y": ys}
        traces.append({**trace, "xaxis": "x", "yaxis": "y", "connectgaps": False, "line": _SM_LINE})
        layout["annotations"][0]["text"] += " · " + _("dashed: %(measure)s") % {"measure": name}
    return {"data": traces if points else [], "layout": layout, "table": history_table(points)}


def with_holes(points: Sequence[Point]) -> tuple[list[str], list[int | None]]:
    """Times and point numbers, with an empty one after each point that the next does not follow at once."""
    xs: list[str] = []
    numbers: list[int | None] = []
    for i, point in enumerate(points):
        before = points[i - 1] if i else point
        if (point.at - before.at).total_seconds() > before.seconds * 1.5:
            xs.append(iso(before.at, before.seconds))
            numbers.append(None)
        xs.append(iso(point.at))
        numbers.append(i)
    return xs, numbers


def iso(moment: Any, plus_s: int = 0) -> str:
    """A time for Plotly and CSV: UTC, whole seconds, Z."""
    return (
        (moment + timedelta(seconds=plus_s))
        .astimezone(UTC)
        .isoformat(timespec="seconds")
        .replace("+00:00", "Z")
    )


def head() -> list[str]:
    """Column heads of table twin and CSV, units in the head."""
    return [
        _("From"),
        _("Busy, mean %"),
        _("Busy, max %"),
        _("SM activity, mean %"),
        _("Memory, mean GiB"),
        _("Memory, max GiB"),
        _("Temperature, mean °C"),
        _("Temperature, max °C"),
        _("Power, mean W"),
        _("Power, max W"),
        _("Coverage, %"),
        _("Samples"),
    ]


def values(point: Point) -> list[Any]:
    """One row: means with one decimal, None where no sample had the measure."""
    return [
        iso(point.at),
        _r(point.util),
        _r(point.util_max),
        _r(point.sm),
        _r(_gib(point.mem_mib)),
        _r(_gib(point.mem_max_mib)),
        _r(point.temp),
        point.temp_max,
        _r(point.power_w),
        _r(point.power_max_w),
        _r(100 * point.coverage),
        point.samples,
    ]


def _r(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def history_table(points: Iterable[Point]) -> dict[str, Any]:
    """The table twin: newest first; N/A where a measure was missing."""
    rows = [[_("N/A") if v is None else v for v in values(point)] for point in points]
    return {"head": head(), "rows": rows[::-1]}


def history_csv(points: Iterable[Point]) -> str:
    """CSV for people: BOM, the same figures as the table, empty where a measure was missing (never 0)."""
    out = io.StringIO()
    out.write("\ufeff")
    writer = csv.writer(out, lineterminator="\r\n")
    writer.writerow([*head(), _("Zone")])
    for point in points:
        writer.writerow(["" if v is None else v for v in values(point)] + ["UTC"])
    return out.getvalue()
