"""Tables that people upload: CSV and XLSX, read into rows of text with row numbers as in the spreadsheet.

Encodings: UTF-8 with or without byte order mark, UTF-16 with mark, GB18030. Separators: comma, semicolon,
tab. Lines before the head that start with ``#`` are skipped and a neutralising apostrophe before a formula
sign is taken off, so that our own exports for people come back in (portal.kernel.csv_export).
"""

from __future__ import annotations

import csv
import io
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date, datetime
from decimal import Decimal
from typing import Any, BinaryIO

from django.utils.translation import gettext_lazy as _

from portal.kernel.csv_export import FORMULA_SIGNS
from portal.kernel.errors import FieldProblem, Invalid

MAX_BYTES = 20 * 1024 * 1024
MAX_UNPACKED = 300 * 1024 * 1024
MAX_ROWS = 100_000
MAX_PROBLEMS = 200
_ZIP = b"PK\x03\x04"
_OLD_EXCEL = b"\xd0\xcf\x11\xe0"


@dataclass(frozen=True)
class Row:
    """One data row: `number` as the spreadsheet shows it (the head counts), `cells` is stripped text."""

    number: int
    cells: Mapping[str, str]

    def __getitem__(self, column: str) -> str:
        """The cell's text; "" where the column or the cell is missing."""
        return self.cells.get(column, "")


@dataclass
class Problems:
    """Collects what is wrong, by row and column, so that a file is judged as a whole.

    `pointer` of each is ``row/column`` (``0/column`` for the head); `row_of` and `column_of` take it apart.
    """

    found: list[FieldProblem] = field(default_factory=list)
    more: int = 0

    def add(self, row: int, column: str, detail: Any) -> None:
        """Note one problem; beyond 200 they are only counted."""
        if len(self.found) >= MAX_PROBLEMS:
            self.more += 1
        else:
            self.found.append({"pointer": f"{row}/{column}", "detail": detail})

    def __bool__(self) -> bool:
        return bool(self.found)

    def raise_if_any(self) -> None:
        """Raise `Invalid` (code ``table_invalid``) with all of them: nothing of the file is taken."""
        if self.found:
            raise Invalid(
                code="table_invalid",
                detail=_("The file has errors. Nothing was taken from it."),
                errors=self.found,
                extra={"more_errors": self.more} if self.more else {},
            )


def row_of(problem: FieldProblem) -> int:
    """The row number of a problem of a table (0: the head, or the file itself)."""
    head = problem["pointer"].split("/", 1)[0]
    return int(head) if head.isdecimal() else 0


def column_of(problem: FieldProblem) -> str:
    """The column of a problem of a table."""
    return problem["pointer"].split("/", 1)[-1]


@dataclass(frozen=True)
class Table:
    """A read file: normalised column names in order, and its rows without the empty ones."""

    columns: tuple[str, ...]
    rows: tuple[Row, ...]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def expect(self, required: Iterable[str], optional: Iterable[str] = ()) -> None:
        """Raise `Invalid` for columns that are missing or unknown (an unknown one may be a mistyped one)."""
        problems = Problems()
        needed, allowed = set(required), {*required, *optional}
        for name in sorted(needed - set(self.columns)):
            problems.add(0, name, _("This column is missing."))
        for name in self.columns:
            if name not in allowed:
                known = ", ".join(sorted(allowed))
                problems.add(0, name, _("This column is not known. Known: %(known)s.") % {"known": known})
        problems.raise_if_any()


def read_table(file: BinaryIO | bytes, name: str = "", *, aliases: Mapping[str, str] | None = None) -> Table:
    """Read a CSV or XLSX file (told apart by content, not by `name`).

    `aliases` maps other spellings of a head (also Chinese ones) to our column names. Column names come back
    in small letters with underscores. Raises `Invalid` for what is no table: wrong kind, unknown encoding, no
    head, doubled columns, too large.
    """
    data = file if isinstance(file, bytes) else file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise _unreadable(_("The file is larger than 20 MiB."))
    if not data.strip():
        raise _unreadable(_("The file is empty."))
    if data.startswith(_OLD_EXCEL):
        raise _unreadable(_("This is an old Excel file (.xls). Save it as .xlsx or CSV."))
    lines = _xlsx_lines(data) if data.startswith(_ZIP) else _csv_lines(data)
    return _table(lines, {_normal(k): v for k, v in (aliases or {}).items()})


def _unreadable(detail: Any) -> Invalid:
    return Invalid.field("file", detail, code="table_unreadable")


def _decoded(data: bytes) -> str:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        encodings = ["utf-16"]
    else:
        encodings = ["utf-8-sig", "gb18030"]
    for encoding in encodings:
        try:
            text = data.decode(encoding)
        except UnicodeDecodeError:
            continue
        if "\x00" not in text:
            return text
    raise _unreadable(_("The file is neither UTF-8 nor GB18030 text, nor XLSX."))


def _separator(text: str) -> str:
    for line in text.splitlines():
        if line.strip() and not line.startswith(("#", '"#')):
            return max(",;\t", key=line.count)
    return ","


def _csv_lines(data: bytes) -> Iterator[tuple[int, list[str]]]:
    text = _decoded(data)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=_separator(text), strict=True)
    number = 0
    while True:
        number += 1
        try:
            yield number, next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise _unreadable(
                _("Row %(row)s cannot be read: %(why)s.") % {"row": number, "why": error}
            ) from error


def _xlsx_lines(data: bytes) -> Iterator[tuple[int, list[str]]]:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if sum(info.file_size for info in archive.infolist()) > MAX_UNPACKED:
                raise _unreadable(_("The workbook is too large once unpacked."))
        from openpyxl import load_workbook

        book = load_workbook(io.BytesIO(data), read_only=True, data_only=True)
    except Invalid:
        raise
    except Exception as error:  # openpyxl raises many kinds for what is no workbook
        raise _unreadable(_("The file is no readable XLSX workbook.")) from error
    try:
        sheet = book.worksheets[0]
        for number, values in enumerate(sheet.iter_rows(values_only=True), start=1):
            yield number, [_cell_text(v) for v in values]
    finally:
        book.close()


def _cell_text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else format(Decimal(repr(value)), "f")
    if isinstance(value, datetime):
        return value.date().isoformat() if value.time() == datetime.min.time() else value.isoformat(sep=" ")
    if isinstance(value, date):
        return value.isoformat()
    return str(value)


def _normal(name: str) -> str:
    return re.sub(r"[\s\-]+", "_", name.strip().lower())


def _plain(text: str) -> str:
    text = text.strip()
    if text.startswith("'") and text[1:2] in FORMULA_SIGNS and text[1:2]:
        return text[1:].strip()
    return text


def _table(lines: Iterable[tuple[int, list[str]]], aliases: Mapping[str, str]) -> Table:
    columns: list[str] = []
    rows: list[Row] = []
    problems = Problems()
    for number, line in lines:
        cells = [_plain(c) for c in line]
        while cells and not cells[-1]:
            cells.pop()
        if not cells:
            continue
        if not columns:
            if cells[0].startswith("#"):
                continue
            columns = _head(cells, aliases)
            continue
        if len(rows) >= MAX_ROWS:
            raise _unreadable(_("The file has more than 100,000 rows. Cut it into several."))
        if len(cells) > len(columns):
            problems.add(number, columns[-1], _("This row has more cells than the head."))
            continue
        rows.append(Row(number, dict(zip(columns, cells, strict=False))))
    if not columns:
        raise _unreadable(_("The file has no head row with column names."))
    problems.raise_if_any()
    return Table(tuple(columns), tuple(rows))


def _head(cells: list[str], aliases: Mapping[str, str]) -> list[str]:
    names = [aliases.get(_normal(c), _normal(c)) for c in cells]
    problems = Problems()
    for index, name in enumerate(names, start=1):
        if not name:
            problems.add(0, str(index), _("Column %(n)s has no name.") % {"n": index})
        elif names.index(name) + 1 != index:
            problems.add(0, name, _("This column stands twice."))
    problems.raise_if_any()
    return names
