"""A workbook's rows: text as it was, numbers exact, totals as formulas that agree."""

from __future__ import annotations

import io
from datetime import UTC, datetime

import openpyxl
import pytest

from portal.kernel.tables import COUNT, HOURS, MONEY, Column, Table
from portal.kernel.xlsx_export import LONGEST, xlsx_bytes

WORDS = {"about": "About", "total": "Total", "milliseconds": "ms"}
H, CNY = 3_600_000, 1_000_000


def sheets(rows: list[list[object]], *, values: bool = True) -> list[list[object]]:
    columns = [Column("who", "Who"), Column("hours", "Hours", HOURS), Column("cost", "Cost", MONEY)]
    columns.append(Column("n", "Lines", COUNT))
    data = xlsx_bytes(
        about=[("Made", "now")],
        found=[Table("Lines", columns, rows)],
        made_at=datetime(2026, 5, 1, tzinfo=UTC),
        words=WORDS,
    )
    sheet = openpyxl.load_workbook(io.BytesIO(data), data_only=values).worksheets[1]
    assert sheet.freeze_panes == "B2"
    return [[cell.value for cell in row] for row in sheet]


@pytest.mark.parametrize(
    ("told", "found"),
    [
        ("a < b & c > d", "a < b & c > d"),
        (" blanks at both ends ", " blanks at both ends "),
        ("two\nlines", "two\nlines"),
        ("bell\x07 and escape\x1b", "bell and escape"),
        ("_x0041_", "_x005F_x0041_"),  # as the format escapes it; openpyxl decodes none
        ("=1+1", "=1+1"),
        ("中文 \U0001f600", "中文 \U0001f600"),
        ("x" * (LONGEST + 9), "x" * LONGEST),
        ("", None),
        (None, None),
    ],
)
def test_text_is_as_it_was(told: str | None, found: str | None) -> None:
    rows = sheets([[told, 0, 0, 0], [told, 0, 0, 0], ["last", 0, 0, 0]])
    assert [row[0] for row in rows] == ["Who", found, found, "last", "Total"]


def test_totals_are_formulas_that_agree_with_their_values() -> None:
    rows: list[list[object]] = [["a", H + 1, 3_333_333, 1], ["b", 2 * H, -1, None], ["c", None, 5 * CNY, 0]]
    assert sheets(rows)[1:] == [
        ["a", 1, H + 1, 3.333333, 1],
        ["b", 2, 2 * H, -0.000001, None],
        ["c", None, None, 5, 0],
        ["Total", 3, 3 * H + 1, 8.333332, 1],
    ]
    assert sheets(rows, values=False)[4] == [
        "Total", "=ROUND(C5/3600000,6)", "=SUM(C2:C4)", "=ROUND(SUM(D2:D4),6)", "=SUM(E2:E4)",
    ]  # fmt: skip
