"""CSV files: one shape for people, one for machines.

For people: byte order mark (so that spreadsheets read Chinese rightly), a block of ``#`` lines that says what
the file is (filter, zone, currency, definitions, time), and formulas made harmless. For machines: none of it.
"""

from __future__ import annotations

import csv
import io
import re
import urllib.parse
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any

from django.http import HttpResponse

BOM = "\ufeff"
CHUNK = 32_768
"""Characters that are handed on at once, about."""

FORMULA_SIGNS = "=+-@\t\r\n＝＋－＠"
_NUMBER = re.compile(r"^[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?$")


def neutral(value: Any) -> Any:
    """A cell that no spreadsheet runs: text that starts like a formula gets an apostrophe; numbers stay."""
    if value is None:
        return ""
    if isinstance(value, bool | int | float | Decimal):
        return value
    text = str(value)
    if text and text[0] in FORMULA_SIGNS and not _NUMBER.match(text):
        return "'" + text
    return text


def _plain(value: Any) -> Any:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, datetime):
        return value.isoformat()
    return value


def _lines(rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    """Some lines at a time."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\r\n")
    for row in rows:
        writer.writerow(row)
        if buffer.tell() > CHUNK:
            yield buffer.getvalue()
            buffer.seek(0)
            buffer.truncate()
    if buffer.tell():
        yield buffer.getvalue()


def people_csv(
    *, about: Iterable[tuple[Any, Any]], columns: Sequence[Any], rows: Iterable[Sequence[Any]]
) -> Iterator[bytes]:
    """Lines of a CSV for people. `about`: (label, value) pairs above the head as ``# label: value``."""
    yield BOM.encode()
    head = [[f"# {label}: {value}"] for label, value in about]
    yield from (line.encode() for line in _lines(head))
    yield from (line.encode() for line in _lines([[neutral(str(c)) for c in columns]]))
    yield from (line.encode() for line in _lines([neutral(_plain(v)) for v in row] for row in rows))


def machine_csv(*, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[bytes]:
    """Lines of a CSV for programs: UTF-8, no mark, head first, values as they are."""
    yield from (line.encode() for line in _lines([list(columns)]))
    yield from (
        line.encode() for line in _lines([v if type(v) is str else _plain(v) for v in row] for row in rows)
    )


def csv_response(filename: str, chunks: Iterable[bytes]) -> HttpResponse:
    """A download of the chunks; the file name may hold any script."""
    response = HttpResponse(b"".join(chunks), content_type="text/csv; charset=utf-8")
    ascii_name = re.sub(r"[^A-Za-z0-9._-]+", "_", filename)
    quoted = urllib.parse.quote(filename)
    response["Content-Disposition"] = f"attachment; filename=\"{ascii_name}\"; filename*=UTF-8''{quoted}"
    return response
