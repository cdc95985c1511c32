"""How the raw values of a report's columns read."""

from __future__ import annotations

from typing import Any

from django import template
from django.utils.translation import gettext

from portal.kernel import tables
from portal.web import formats
from portal.web.tags.bars import sumbar
from quotas.templatetags.money_tags import exact, hours_exact

register = template.Library()


@register.filter
def shown(value: Any, kind: str) -> str:
    """``{{ value|shown:column.kind }}``: rounded for reading."""
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


@register.filter
def every_digit(value: Any, kind: str) -> str:
    """The same with all digits, for a title."""
    if value is None:
        return ""
    if kind == tables.HOURS:
        return hours_exact(value)
    if kind == tables.MONEY:
        return exact(value)
    return ""


@register.filter
def zipped(row: list[Any], columns: list[tables.Column]) -> list[tuple[Any, tables.Column]]:
    """``{% for value, column in row|zipped:table.columns %}``."""
    return list(zip(row, columns, strict=True))


@register.simple_tag
def report_parts(parts: list[dict[str, Any]]) -> Any:
    """``{% report_parts parts %}``: the bar of what adds up, its legend in GPU-hours and percent."""
    whole = sum(part["value"] for part in parts)
    rows = [
        {
            **part,
            "text": f"{formats.number(tables.plain(part['value'], tables.HOURS), 1)} {gettext('GPU·h')}, "
            f"{formats.number(100 * part['value'] / whole if whole else 0, 1)}{formats.NBSP}%",
            "hatch": part["tone"] == "act",
        }
        for part in parts
    ]
    return sumbar(rows)
