"""XLSX files for people: a first sheet that says what the file is, then one formatted sheet per table.

Written row by row (constant memory): heads, formats and totals by XlsxWriter, the rows between them as XML that is put
into its sheets, which takes a quarter of the time. Text is never taken for a formula or a link. Totals are formulas
over the rows, with the value beside them, so that a reader without a calculator sees the same figure. The same
input gives the same bytes: the only time in the file is the one that is passed in.
"""

from __future__ import annotations

import contextlib
import html
import io
import re
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from functools import lru_cache
from typing import IO, Any, BinaryIO

import xlsxwriter
from xlsxwriter.utility import xl_col_to_name, xl_rowcol_to_cell

from portal.kernel import tables
from portal.kernel.tables import COUNT, GPUS, HOURS, MONEY, PERCENT, SECONDS, TEXT, Table
from portal.kernel.units import MICRO

FORMATS = {
    TEXT: "@",
    HOURS: "#,##0.00####",
    MONEY: "#,##0.00####",
    PERCENT: "0.00",
    COUNT: "#,##0",
    GPUS: "#,##0.###",
    SECONDS: "#,##0",
}
WIDTHS = {TEXT: 30, HOURS: 16, MONEY: 18, PERCENT: 10, COUNT: 12, GPUS: 12, SECONDS: 14}
LEVEL = 2
"""How hard the file is packed: a third of the time of the usual level for a fifth more bytes."""

NOTHING = (None, "")
"""What leaves a cell out."""

ROWS_AT_MOST, LONGEST = 1_048_576 - 2, 32_767
"""What a sheet and a cell hold."""

_ILLEGAL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f]")
_CODED = re.compile(r"_(?=x[0-9A-Fa-f]{4}_)")
_SPECIAL = re.compile(f"[&<>]|{_ILLEGAL.pattern}|{_CODED.pattern}")
_SHEET = re.compile(r"[\[\]:*?/\\]")


class TooManyRows(ValueError):
    """A table has more rows than a sheet holds."""


def xlsx_bytes(
    *,
    about: Iterable[tuple[Any, Any]],
    found: Sequence[Table],
    made_at: datetime,
    words: dict[str, str],
) -> bytes:
    """The file in memory. `words`: "about", "total", "milliseconds" in the reader's language."""
    target = io.BytesIO()
    xlsx_write(target, about=about, found=found, made_at=made_at, words=words)
    return target.getvalue()


def xlsx_write(
    target: BinaryIO,
    *,
    about: Iterable[tuple[Any, Any]],
    found: Sequence[Table],
    made_at: datetime,
    words: dict[str, str],
) -> None:
    """Write the file; rows may come one by one. TooManyRows for more of them than a sheet holds."""
    frame = io.BytesIO()
    book = xlsxwriter.Workbook(
        frame,
        {
            "constant_memory": True,
            "strings_to_formulas": False,
            "strings_to_urls": False,
            "remove_timezone": True,
        },
    )
    book.set_properties({"created": made_at.replace(tzinfo=None, microsecond=0)})
    _about(book, about, words["about"])
    names: set[str] = {words["about"].lower()}
    with contextlib.ExitStack() as files:
        rows: dict[str, IO[bytes]] = {}
        for number, table in enumerate(found, start=2):  # the first sheet says what the file is
            part = files.enter_context(tempfile.TemporaryFile())
            if _sheet(book, table, _free_name(table.title, names), words, part):
                rows[f"xl/worksheets/sheet{number}.xml"] = part
        book.close()
        _join(frame, rows, target)


def _join(frame: io.BytesIO, rows: dict[str, IO[bytes]], target: BinaryIO) -> None:
    """The workbook with the rows in their sheets, after the head."""
    with zipfile.ZipFile(frame) as source, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as out:
        for entry in source.infolist():
            content = source.read(entry)
            info = zipfile.ZipInfo(entry.filename, entry.date_time)
            info.compress_type, info.external_attr = zipfile.ZIP_DEFLATED, entry.external_attr
            info._compresslevel = LEVEL  # type: ignore[attr-defined]
            with out.open(info, "w", force_zip64=entry.filename in rows) as file:
                if part := rows.get(entry.filename):
                    head = content.index(b"</row>") + len(b"</row>")
                    file.write(content[:head])
                    part.seek(0)
                    shutil.copyfileobj(part, file, 1 << 20)
                    content = content[head:]
                file.write(content)


def _free_name(title: str, names: set[str]) -> str:
    base = _SHEET.sub(" ", title).strip("' ")[:28] or "Table"
    name, number = base, 2
    while name.lower() in names:
        name, number = f"{base} {number}", number + 1
    names.add(name.lower())
    return name


def text(value: Any) -> str:
    """A cell's text: without characters that no XML file may hold, and not longer than a cell may be."""
    return _ILLEGAL.sub("", str(value))[:LONGEST]


def _about(book: Any, about: Iterable[tuple[Any, Any]], title: str) -> None:
    sheet = book.add_worksheet(title[:31])
    bold, wrap = book.add_format({"bold": True, "valign": "top"}), book.add_format({"text_wrap": True})
    sheet.set_column(0, 0, 24)
    sheet.set_column(1, 1, 100)
    for row, (label, value) in enumerate(about):
        sheet.write_string(row, 0, text(label), bold)
        sheet.write_string(row, 1, text(value), wrap)


def _sheet(
    book: Any,
    table: Table,
    name: str,
    words: dict[str, str],
    part: IO[bytes],
) -> int:
    """The sheet without its rows, which go to `part` as XML; returns their number."""
    sheet = book.add_worksheet(name)
    head = book.add_format(
        {"bold": True, "bg_color": "#EEF1F5", "bottom": 1, "text_wrap": True, "valign": "top"}
    )
    formats = {kind: book.add_format({"num_format": code}) for kind, code in FORMATS.items()}
    totals = {
        kind: book.add_format({"num_format": code, "bold": True, "top": 1}) for kind, code in FORMATS.items()
    }
    heads = tables.people_columns(table, words["milliseconds"])
    kinds: list[
        tuple[str, int, bool]
    ] = []  # kind, column of the table, whether it is the milliseconds of hours
    for place, shown in enumerate(table.columns):
        kinds.append((shown.kind, place, False))
        if shown.kind == HOURS:
            kinds.append((COUNT, place, True))
    for place, (kind, _column, _ms) in enumerate(kinds):
        sheet.set_column(place, place, WIDTHS[kind])
    for place, label in enumerate(heads):
        sheet.write_string(0, place, text(label), head)
    sheet.freeze_panes(1, 1)
    cells = [
        (column, f'<c r="{xl_col_to_name(place)}', _cell(kind, is_ms, formats[kind]._get_xf_index()))
        for place, (kind, column, is_ms) in enumerate(kinds)
    ]
    sums = [place for place, column in enumerate(table.columns) if column.sums]
    last = 0
    total: list[Any] = [0 if column.sums else None for column in table.columns]
    for last, row in enumerate(table.rows, start=1):
        if last > ROWS_AT_MOST:
            raise TooManyRows("more rows than a sheet holds")
        at = str(last + 1)
        found = "".join(
            [f"{begin}{at}{end(row[column])}" for column, begin, end in cells if row[column] not in NOTHING]
        )
        part.write(f'<row r="{at}">{found}</row>'.encode())
        for place in sums:
            if row[place] is not None:
                total[place] += row[place]
    if last:
        sheet.autofilter(0, 0, last, len(kinds) - 1)
        _totals(sheet, total, kinds, last, totals, words["total"])
    return last


def _cell(kind: str, is_ms: bool, style: int) -> Callable[[Any], str]:
    """What writes a value of a column as a cell of a row, from its reference on; what comes again is kept."""
    if kind == TEXT:
        inline = f'" s="{style}" t="inlineStr"><is>'
        return lru_cache(maxsize=4096)(lambda value: f"{inline}{_escaped(str(value))}</is></c>")
    number: Callable[[Any], str] = {HOURS: _hours, MONEY: _money}.get(kind) or (
        lambda value: str(tables.plain(value, kind))
    )
    if is_ms:
        number = str
    return lru_cache(maxsize=4096)(lambda value: f'" s="{style}"><v>{number(value)}</v></c>')


def _escaped(value: str) -> str:
    """Text as XML; what looks like a coded character of this format is none. Blanks at its ends are kept."""
    if len(value) > LONGEST or _SPECIAL.search(value):
        value = html.escape(_CODED.sub("_x005F_", text(value)), quote=False)
    space = ' xml:space="preserve"' if value != value.strip() else ""
    return f"<t{space}>{value}</t>"


def _money(micro: int) -> str:
    whole, rest = divmod(abs(micro), MICRO)
    return f"{'-' if micro < 0 else ''}{whole}.{rest:06d}"


def _hours(gpu_ms: int) -> str:
    """GPU-hours to six decimals, as `tables.plain` rounds: half to even."""
    micro, rest = divmod(abs(gpu_ms) * 5, 18)
    if rest > 9 or (rest == 9 and micro % 2):
        micro += 1
    return _money(-micro if gpu_ms < 0 else micro)


def _totals(
    sheet: Any,
    total: list[Any],
    kinds: list[tuple[str, int, bool]],
    last: int,
    formats: dict[str, Any],
    word: str,
) -> None:
    """Sums as formulas: hours from the sum of their milliseconds, money rounded to the micro unit it is exact to."""
    row = last + 1
    for place, (kind, column, is_ms) in enumerate(kinds):
        value = total[column]
        if value is None:
            if place == 0:
                sheet.write_string(row, place, text(word), formats[TEXT])
            continue
        cells = f"{xl_rowcol_to_cell(1, place)}:{xl_rowcol_to_cell(last, place)}"
        if is_ms or kind == COUNT:
            sheet.write_formula(row, place, f"=SUM({cells})", formats[kind], value)
        elif kind == HOURS:
            ms = f"{xl_col_to_name(place + 1)}{row + 1}"
            shown = float(tables.plain(value, HOURS))
            sheet.write_formula(row, place, f"=ROUND({ms}/3600000,6)", formats[kind], shown)
        else:
            sheet.write_formula(
                row, place, f"=ROUND(SUM({cells}),6)", formats[kind], float(tables.plain(value, kind))
            )
