"""How the raw values of a report's columns read, and the parts of the pool as a bar takes them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.utils.translation import gettext

from portal.kernel import tables
from portal.web import formats
from quotas.templatetags.money_tags import MINUS


def shown(value: Any, kind: str) -> str:
    """Rounded for reading."""
    if value is None:
        return formats.DASH
    if kind == tables.HOURS:
        return formats.number(tables.plain(value, kind), 1)
    if kind == tables.MONEY:
        return formats.money(value)
    if kind == tables.PERCENT:
        return formats.number(tables.plain(value, kind), 1)
    if kind == tables.GPUS:
        return formats.number(tables.plain(value, kind))
    if kind in (tables.COUNT, tables.SECONDS):
        return formats.number(value)
    return str(value)


def difference(value: int | None, kind: str) -> str:
    """With its sign; a dash where there is none. Seconds as a length of time."""
    if value is None:
        return formats.DASH
    size = formats.duration(abs(value)) if kind == tables.SECONDS else shown(abs(value), kind)
    return f"{'+' if value > 0 else MINUS}{size}" if value else size


BARS = 8
"""Groups drawn as bars; the table has all."""


def group_bars(table: tables.Table) -> list[dict[str, Any]]:
    """The largest groups by the table's first figure that adds up, each with what filters by it; [] where there is
    nothing to choose between.
    """
    place = next((i for i, column in enumerate(table.columns) if column.sums), None)
    if place is None:
        return []
    found = [(row, params) for row, params in table.linked if params and (row[place] or 0) > 0]
    found.sort(key=lambda item: -item[0][place])
    if len(found) < 2:
        return []
    top, kind = found[0][0][place], table.columns[place].kind
    return [
        {
            "label": row[0],
            "params": params,
            "share": f"{100 * row[place] / top:.2f}",
            "text": shown(row[place], kind),
            "measure": table.columns[place].label,
        }
        for row, params in found[:BARS]
    ]


def part_rows(parts: Iterable[tuple[str, int, str]]) -> list[dict[str, Any]]:
    """(label, GPU-milliseconds, tone) as the bar of parts takes them: with hours and percent of the whole."""
    rows = list(parts)
    whole = sum(value for _label, value, _tone in rows)
    return [
        {
            "label": label,
            "value": value,
            "tone": tone,
            "hatch": tone == "act",
            "text": f"{shown(value, tables.HOURS)} {gettext('GPU·h')}, "
            f"{formats.number(100 * value / whole if whole else 0, 1)}{formats.NBSP}%",
        }
        for label, value, tone in rows
    ]
