"""One definition of a table of figures, from which the page, CSV, XLSX, PDF and the API are made.

Values are the exact integers of the product's units; how they read is decided by the column's kind alone, so that
every form shows the same figure. A total is the sum of its rows, never a figure of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from portal.kernel.units import MICRO, MS_PER_HOUR

TEXT, HOURS, MONEY, PERCENT, COUNT, GPUS, SECONDS = (
    "text",
    "hours",
    "money",
    "percent",
    "count",
    "gpus",
    "seconds",
)
KINDS = (TEXT, HOURS, MONEY, PERCENT, COUNT, GPUS, SECONDS)
ADDED = frozenset({HOURS, MONEY, COUNT})
"""Kinds whose columns have a total."""


@dataclass(frozen=True, slots=True)
class Column:
    """`kind` of the raw values: text as it is; hours in GPU-milliseconds; money in micro; percent in hundredths of
    a percent; gpus in milli-GPU; seconds and counts as integers. `added` false: a total would mean nothing."""

    key: str
    label: str
    kind: str = TEXT
    added: bool = True
    help: str = ""

    @property
    def sums(self) -> bool:
        """Whether the column has a total."""
        return self.added and self.kind in ADDED


@dataclass
class Table:
    """Rows of raw values in the order of the columns; `params` are what the drill-down of each row adds."""

    title: str
    columns: list[Column]
    rows: list[list[Any]] = field(default_factory=list)
    params: list[dict[str, str]] = field(default_factory=list)

    def total(self) -> list[Any]:
        """Sums of the columns that have one; None elsewhere."""
        return [
            sum(row[i] for row in self.rows if row[i] is not None) if column.sums else None
            for i, column in enumerate(self.columns)
        ]

    @property
    def sums(self) -> bool:
        """Whether any column has a total."""
        return any(column.sums for column in self.columns)

    @property
    def linked(self) -> list[tuple[list[Any], dict[str, str]]]:
        """Rows with what their drill-down adds."""
        return list(zip(self.rows, self.params, strict=True))

    def column(self, key: str) -> int:
        """The place of a column. KeyError when there is none."""
        for place, column in enumerate(self.columns):
            if column.key == key:
                return place
        raise KeyError(key)

    def as_json(self) -> dict[str, Any]:
        """For keeping a table as it was."""
        return {
            "title": self.title,
            "columns": [[c.key, c.label, c.kind, c.added, c.help] for c in self.columns],
            "rows": self.rows,
            "params": self.params,
        }

    @classmethod
    def from_json(cls, kept: dict[str, Any]) -> Table:
        """The inverse of `as_json`."""
        return cls(kept["title"], [Column(*c) for c in kept["columns"]], kept["rows"], kept["params"])


def plain(value: Any, kind: str) -> Any:
    """A value as a number that people read: GPU-hours, money, percent, GPUs, hours of waiting; exact decimals."""
    if value is None or kind in (TEXT, COUNT):
        return value
    if kind == HOURS:
        return (Decimal(value) / MS_PER_HOUR).quantize(Decimal("0.000001"))
    if kind == MONEY:
        return (Decimal(value) / MICRO).quantize(Decimal("0.000001"))
    if kind == PERCENT:
        return Decimal(value) / 100
    if kind == GPUS:
        return Decimal(value) / 1000
    return value


def people_columns(table: Table, milliseconds: str) -> list[str]:
    """Heads of a file for people: GPU-hours come with their milliseconds, so that sums can be checked exactly."""
    heads: list[str] = []
    for column in table.columns:
        heads.append(column.label)
        if column.kind == HOURS:
            heads.append(f"{column.label} ({milliseconds})")
    return heads


def people_rows(table: Table, total: str) -> Iterator[list[Any]]:
    """Rows of a file for people, the total last."""
    last = table.total()
    if table.columns and last[0] is None:
        last[0] = total
    for row in (*table.rows, last):
        out: list[Any] = []
        for value, column in zip(row, table.columns, strict=True):
            out.append(plain(value, column.kind))
            if column.kind == HOURS:
                out.append(value)
        yield out


MACHINE_UNITS = {
    HOURS: "gpu_ms",
    MONEY: "micro",
    PERCENT: "percent_hundredths",
    GPUS: "milli_gpu",
    SECONDS: "s",
}


def machine_columns(table: Table) -> list[str]:
    """Heads of a file for machines: the keys with their unit."""
    return [f"{c.key}_{MACHINE_UNITS[c.kind]}" if c.kind in MACHINE_UNITS else c.key for c in table.columns]


def share(part: int, whole: int) -> int | None:
    """A part of a whole in hundredths of a percent, rounded half up; None of nothing."""
    if whole == 0:
        return None
    return (20_000 * part + whole) // (2 * whole)


def check(tables: Sequence[Table]) -> None:
    """ValueError for a row that does not fit its columns, or a kind that does not exist."""
    for table in tables:
        for column in table.columns:
            if column.kind not in KINDS:
                raise ValueError(f"no such kind: {column.kind}")
        for row in table.rows:
            if len(row) != len(table.columns):
                raise ValueError(f"a row of {table.title} has {len(row)} values")
