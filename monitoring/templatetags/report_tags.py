"""Filters of report tables."""

from __future__ import annotations

from typing import Any

from django import template

from monitoring.web import report_figures
from portal.kernel import tables
from quotas.templatetags.money_tags import exact, hours_exact

register = template.Library()


@register.filter
def shown(value: Any, kind: str) -> str:
    """``{{ value|shown:column.kind }}``: rounded for reading."""
    return report_figures.shown(value, kind)


@register.filter
def change_shown(value: Any, kind: str) -> str:
    """``{{ row.difference|change_shown:row.kind }}``: a difference with its sign; a dash where there is none."""
    return report_figures.difference(value, kind)


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
