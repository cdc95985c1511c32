"""Tables that come in and go out: encodings, row numbers, formulas."""

from __future__ import annotations

import csv
import io
from decimal import Decimal

import pytest

from portal.kernel.csv_export import csv_response, machine_csv, neutral, people_csv
from portal.kernel.errors import Invalid
from portal.kernel.tabular import MAX_PROBLEMS, Problems, column_of, read_table, row_of

CSV = "Code, Name ,cost center\nvision,视觉与多模态,CC-1\n\nnlp,语言,\n"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "gb18030", "utf-16"])
def test_every_encoding_gives_the_same_rows(encoding: str) -> None:
    table = read_table(CSV.encode(encoding), "d.csv")
    assert table.columns == ("code", "name", "cost_center")
    assert [(r.number, dict(r.cells)) for r in table] == [
        (2, {"code": "vision", "name": "视觉与多模态", "cost_center": "CC-1"}),
        (4, {"code": "nlp", "name": "语言"}),
    ]
    assert table.rows[1]["cost_center"] == ""


@pytest.mark.parametrize("sep", [";", "\t"])
def test_other_separators(sep: str) -> None:
    assert read_table(f"a{sep}b\n1{sep}2,5\n".encode()).rows[0].cells == {"a": "1", "b": "2,5"}


def test_xlsx_cells_become_text() -> None:
    from openpyxl import Workbook

    book = Workbook()
    book.active.append(["code", "gpus", "share", "on"])
    book.active.append(["n1", 8.0, 0.25, True])
    out = io.BytesIO()
    book.save(out)
    out.seek(0)
    row = read_table(out, "fleet.xlsx").rows[0]
    assert row.number == 2
    assert row.cells == {"code": "n1", "gpus": "8", "share": "0.25", "on": "true"}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"   \n",
        b"a,b\n\x00\x01\x02,\xff\xff",
        b"\xd0\xcf\x11\xe0 old",
        b"PK\x03\x04 no zip",
        b'a,b\n"open,1\n',
        b"a,a\n1,2\n",
        b"a,\xff",
        b",b\n1,2\n",
        b"a,b\n1,2,3\n",
    ],
)
def test_what_is_no_table_is_refused_with_words(data: bytes) -> None:
    with pytest.raises(Invalid) as caught:
        read_table(data, "x.csv")
    assert caught.value.status == 400
    assert caught.value.errors


def test_columns_are_held_to_the_list() -> None:
    table = read_table(b"code,nmae\nx,y\n")
    with pytest.raises(Invalid) as caught:
        table.expect(["code", "name"])
    assert {column_of(e) for e in caught.value.errors} == {"name", "nmae"}
    assert {row_of(e) for e in caught.value.errors} == {0}


def test_aliases_and_problem_limit() -> None:
    assert read_table("名称\nx\n".encode(), aliases={"名称": "name"}).columns == ("name",)
    problems = Problems()
    for n in range(MAX_PROBLEMS + 7):
        problems.add(n, "a", "bad")
    assert (len(problems.found), problems.more) == (MAX_PROBLEMS, 7)


def test_P058_formulas_become_text_and_numbers_stay() -> None:
    for text in ['=HYPERLINK("http://x","y")', "+cmd", "-1+1", "@x", "\tx", "\rx", "＝1"]:
        assert neutral(text) == "'" + text
    for value in ["-3.5", "+2", "1e-3", "", "视觉"]:
        assert neutral(value) == value
    assert neutral(Decimal("-3.5")) == Decimal("-3.5")
    assert neutral(-3) == -3


def test_P057_people_csv_has_a_mark_and_comes_back_in() -> None:
    rows = [["人工智能研究院", "=1+1", Decimal("-3.5")], ["b", "x", 7]]
    data = b"".join(people_csv(about=[("Zone", "Asia/Shanghai")], columns=["name", "note", "n"], rows=rows))
    assert data.startswith(b"\xef\xbb\xbf# Zone: Asia/Shanghai\r\n")
    table = read_table(data, "again.csv")
    assert [dict(r.cells) for r in table] == [
        {"name": "人工智能研究院", "note": "=1+1", "n": "-3.5"},
        {"name": "b", "note": "x", "n": "7"},
    ]
    assert table.rows[0].number == 3


def test_machine_csv_is_clean() -> None:
    data = b"".join(machine_csv(columns=["a", "b"], rows=[["=x", None], [True, 3]]))
    assert list(csv.reader(io.StringIO(data.decode()))) == [["a", "b"], ["=x", ""], ["true", "3"]]
    answer = csv_response("台账.csv", [data])
    assert "filename*=UTF-8''%E5%8F%B0%E8%B4%A6.csv" in answer["Content-Disposition"]
