"""FOCUS 1.2: its columns and rules as data, and a validator of rows.

Source: FinOps Open Cost and Usage Specification 1.2. The data file lists the 21 mandatory columns and those further
ones that the ledger has an answer for; columns of our own begin with ``x_``. Rows are mappings of column to text, as
they stand in a CSV file; an empty text is null.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[1] / "data" / "focus_1_2.json"
HALF_MICRO = Decimal("0.0000005")
HALF_QUANTITY = Decimal("0.0000000000000005")
"""Quantities have 15 decimals, so that a cost that lies half-way may come out a trace below half."""

_TIME = re.compile(r"^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}(\.\d{1,6})?Z$")
_NUMBER = re.compile(r"^-?(\d+(\.\d+)?)$")


@dataclass(frozen=True, slots=True)
class Problem:
    """A rule that a row breaks; `row` counts from 1, 0 is the head."""

    row: int
    column: str
    rule: str


@lru_cache(maxsize=1)
def specification() -> dict[str, Any]:
    """The data file."""
    found: dict[str, Any] = json.loads(DATA.read_text())
    return found


def mandatory() -> list[str]:
    """The columns that every file must have."""
    return [name for name, column in specification()["columns"].items() if column["level"] == "mandatory"]


def problems(head: Iterable[str], rows: Iterable[Mapping[str, str]]) -> list[Problem]:
    """Every rule that a file breaks, in order; [] for a valid one."""
    names = list(head)
    found = [Problem(0, name, "missing") for name in mandatory() if name not in names]
    found += [Problem(0, name, "unknown") for name in names if not _known(name)]
    if len(set(names)) != len(names):
        found.append(Problem(0, "", "twice"))
    for number, row in enumerate(rows, start=1):
        found += [Problem(number, column, rule) for column, rule in _row(row)]
    return found


def _known(name: str) -> bool:
    return name in specification()["columns"] or name.startswith("x_")


def _row(row: Mapping[str, str]) -> Iterable[tuple[str, str]]:
    columns = specification()["columns"]
    correction = row.get("ChargeClass") == "Correction"
    for name, column in columns.items():
        if name not in row:
            continue
        value = row[name]
        if value == "":
            if not column["null"] or (column.get("null_only_for_correction") and not correction):
                yield name, "null"
            continue
        yield from ((name, rule) for rule in _value(value, column))
        if (other := column.get("null_with")) and row.get(other, "") == "":
            yield name, f"without {other}"
    yield from _periods(row)
    yield from _products(row, correction)


def _value(value: str, column: Mapping[str, Any]) -> Iterable[str]:
    kind = column["type"]
    if kind == "decimal":
        if not _NUMBER.match(value):
            yield "not a decimal"
        elif column.get("at_least_0") and Decimal(value) < 0:
            yield "below 0"
    elif kind == "datetime":
        if not _TIME.match(value):
            yield "not a UTC time"
    elif kind == "currency":
        if not re.fullmatch(r"[A-Z]{3}", value):
            yield "not a currency code"
    elif kind == "json":
        try:
            tags = json.loads(value)
        except ValueError:
            tags = None
        if not isinstance(tags, dict):
            yield "not a JSON object"
    allowed = column.get("values") or specification().get(column.get("values_from", ""), None)
    if allowed and value not in allowed:
        yield "not an allowed value"


def _periods(row: Mapping[str, str]) -> Iterable[tuple[str, str]]:
    """Starts are included, ends are not, so an end lies after its start."""
    for name in ("BillingPeriod", "ChargePeriod"):
        start, end = row.get(f"{name}Start", ""), row.get(f"{name}End", "")
        if _TIME.match(start) and _TIME.match(end) and _moment(start) >= _moment(end):
            yield f"{name}End", "not after its start"


def _moment(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def _products(row: Mapping[str, str], correction: bool) -> Iterable[tuple[str, str]]:
    """Unit price × quantity is the cost, rounded half up to a millionth; corrections may differ."""
    if correction:
        return
    for cost, price in (("ListCost", "ListUnitPrice"), ("ContractedCost", "ContractedUnitPrice")):
        try:
            value = Decimal(row[price]) * Decimal(row["PricingQuantity"])
            if abs(value - Decimal(row[cost])) > HALF_MICRO + abs(Decimal(row[price])) * HALF_QUANTITY:
                yield cost, "not price × quantity"
        except (KeyError, InvalidOperation):
            continue
