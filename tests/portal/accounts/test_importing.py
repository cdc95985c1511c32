"""Import of departments and people: dry run, errors by row and column, all or nothing."""

from __future__ import annotations

import io
from typing import Any

import pytest
from openpyxl import Workbook

from portal.accounts.models import Department, RoleBinding, User
from portal.accounts.services.importing import (
    PEOPLE_ALIASES,
    ImportResult,
    departments_import,
    people_import,
)
from portal.kernel.errors import Invalid, Refused
from portal.kernel.tabular import column_of, read_table, row_of
from portal.ops.models import AuditEvent, OutboxEvent
from tests.portal.builders import SYSTEM, actor, admin, client_of, department, person

pytestmark = pytest.mark.django_db
TREE = "code,name,parent,cost_center,position\nvg,视频生成,vision,CC-2,1\nvision,Vision,ai,CC-1,\nai,AI,,,\n"
PEOPLE = (
    "username,name,email,department,roles\n"
    "lin.yue,林月,lin@x.lan,vg,researcher\n"
    "chen.hao,陈浩,,vision,lead;researcher@vg\n"
    "he,何,,,auditor@*\n"
)


def departments(text: str, dry_run: bool = False) -> ImportResult:
    return departments_import(acting_user=SYSTEM, table=read_table(text.encode()), dry_run=dry_run)


def people(text: str, dry_run: bool = False) -> ImportResult:
    return people_import(
        acting_user=SYSTEM, table=read_table(text.encode(), aliases=PEOPLE_ALIASES), dry_run=dry_run
    )


def state() -> tuple[Any, ...]:
    return (
        sorted(
            Department.objects.without_tree_fields().values_list(
                "code", "name", "parent__code", "cost_center"
            )
        ),
        sorted(User.objects.values_list("username", "display_name", "home_department__code")),
        sorted(map(str, RoleBinding.objects.values_list("user__username", "role", "department__code"))),
        AuditEvent.objects.count(),
        OutboxEvent.objects.count(),
    )


def problems(caught: pytest.ExceptionInfo[Invalid]) -> list[tuple[int, str]]:
    return [(row_of(e), column_of(e)) for e in caught.value.errors]


def test_a_dry_run_says_all_and_writes_nothing() -> None:
    before = state()
    result = departments(TREE, dry_run=True)
    assert (result.created, result.changed, result.kept) == (3, 0, 0)
    assert [r.number for r in result.rows] == [2, 3, 4]
    assert state() == before


def test_parents_may_stand_later_and_a_second_run_changes_nothing() -> None:
    departments(TREE)
    rows = {d.code: d for d in Department.objects.without_tree_fields()}
    assert rows["vg"].parent_id == rows["vision"].pk
    assert (rows["vg"].name, rows["vg"].cost_center, rows["vg"].position) == ("视频生成", "CC-2", 1)
    before = state()
    result = departments(TREE)
    assert (result.created, result.changed, result.kept) == (0, 0, 3)
    assert state() == before
    moved = departments("code,name,parent\nvg,Video,ai\n")
    assert [(r.act, r.what) for r in moved.rows] == [("change", "name, parent")]
    row = Department.objects.without_tree_fields().get(code="vg")
    assert (row.name, row.parent_id, row.cost_center) == ("Video", rows["ai"].pk, "CC-2")


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("code,name,parent\na,A,\nb,B,nowhere\n", [(3, "parent")]),
        ("code,name,parent\na,A,b\nb,B,a\n", [(2, "parent")]),
        ("code,name,parent\na,A,a\n", [(2, "parent")]),
        (
            "code,name,position\na,A,-1\nb,B,text\nc,C,1.5\n",
            [(2, "position"), (3, "position"), (4, "position")],
        ),
        ("code,name\na,A\na,B\n", [(3, "code")]),
        ("code,name\nBad Code,A\nb,\n", [(2, "code"), (3, "name")]),
        ("code,name,boss\na,A,x\n", [(0, "boss")]),
        ("code\na\n", [(0, "name")]),
        ("code,name\na,Same\nb,same\n", [(3, "name")]),
    ],
)
def test_what_is_wrong_is_named_and_nothing_is_written(text: str, where: list[tuple[int, str]]) -> None:
    before = state()
    for dry_run in (True, False):
        with pytest.raises(Invalid) as caught:
            departments(text, dry_run=dry_run)
        assert problems(caught) == where
    assert state() == before


def test_a_cycle_through_what_exists_is_refused() -> None:
    a = department("a")
    department("b", a)
    before = state()
    with pytest.raises(Invalid) as caught:
        departments("code,name,parent\na,A,b\n")
    assert problems(caught) == [(2, "parent")]
    assert state() == before


def test_people_come_with_roles_and_temporary_passwords() -> None:
    departments(TREE)
    result = people(PEOPLE)
    assert (result.created, [name for name, _v in result.passwords]) == (3, ["lin.yue", "chen.hao", "he"])
    lin = User.objects.get(username="lin.yue")
    assert (lin.display_name, lin.home_department.code) == ("林月", "vg")  # type: ignore[union-attr]
    value = dict(result.passwords)["lin.yue"]
    assert lin.check_password(value)
    assert lin.must_change_password
    held = sorted(map(str, RoleBinding.objects.values_list("user__username", "role", "department__code")))
    assert held == [
        "('chen.hao', 'lead', 'vision')",
        "('chen.hao', 'researcher', 'vg')",
        "('he', 'auditor', None)",
        "('lin.yue', 'researcher', 'vg')",
    ]
    before = state()
    again = people(PEOPLE)
    assert (again.created, again.changed, again.kept, again.passwords) == (0, 0, 3, [])
    assert state() == before
    dry = people(PEOPLE.replace("林月", "林 月"), dry_run=True)
    assert (dry.changed, dry.passwords) == (1, [])
    assert state() == before


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("username,name\nA B,x\n", [(2, "username")]),
        ("username,name\na,x\na,y\n", [(3, "username")]),
        ("username,name\nroot,x\nb,\n", [(2, "username"), (3, "name")]),
        ("username,name,department\na,A,nowhere\n", [(2, "department")]),
        (
            "username,name,roles\na,A,king@*\nb,B,lead\nc,C,lead@nowhere\n",
            [(2, "roles"), (3, "roles"), (4, "roles")],
        ),
        ("username,name,email\na,A,nope\n", [(2, "email")]),
        ("username,name,time_zone\na,A,Mars\n", [(2, "time_zone")]),
    ],
)
def test_wrong_people_are_named_and_nobody_is_written(text: str, where: list[tuple[int, str]]) -> None:
    before = state()
    with pytest.raises(Invalid) as caught:
        people(text)
    assert problems(caught) == where
    assert state() == before


def test_one_bad_row_of_many_takes_all_back() -> None:
    rows = "".join(f"p{n},Person {n}\n" for n in range(60))
    before = state()
    with pytest.raises(Invalid) as caught:
        people(f"username,name\n{rows}bad name,X\n")
    assert problems(caught) == [(62, "username")]
    assert state() == before


def test_an_administrator_gives_himself_no_role_by_a_file() -> None:
    boss = admin()
    before = state()
    with pytest.raises(Invalid) as caught:
        people_import(
            acting_user=actor(boss),
            table=read_table(b"username,name,roles\nzhao.rui,Zhao Rui,finance@*\n"),
            dry_run=False,
        )
    assert problems(caught) == [(2, "username")]
    assert state() == before


def test_others_import_nothing() -> None:
    lead = person("lead", ("lead", department("d")))
    with pytest.raises(Refused):
        people_import(acting_user=actor(lead), table=read_table(PEOPLE.encode()), dry_run=True)
    assert client_of(lead).get("/people/import/people/").status_code == 403


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "gb18030", "xlsx"])
def test_the_page_runs_what_it_showed(encoding: str) -> None:
    client = client_of(admin())
    text = "代码,名称,上级\nai,智能,\nvision,视觉,ai\n"
    if encoding == "xlsx":
        book = Workbook()
        for line in text.splitlines():
            book.active.append(line.split(","))
        out = io.BytesIO()
        book.save(out)
        data = out.getvalue()
    else:
        data = text.encode(encoding)
    upload = io.BytesIO(data)
    upload.name = "部门.csv"
    dry = client.post("/people/import/departments/", {"file": upload})
    assert dry.status_code == 200
    assert not Department.objects.exists()
    kept = dry.context["kept"]
    done = client.post("/people/import/departments/", {"kept": kept})
    assert done.status_code == 200
    assert sorted(Department.objects.values_list("name", flat=True)) == ["智能", "视觉"]
    again = client.post("/people/import/departments/", {"kept": kept})
    assert again.status_code == 400, "a kept file is run once"
    assert client_of(admin("other")).post("/people/import/departments/", {"kept": kept}).status_code == 400


def test_the_page_lists_errors_by_row_and_column() -> None:
    client = client_of(admin())
    upload = io.BytesIO(b"code,name,parent\na,A,nowhere\n")
    upload.name = "d.csv"
    answer = client.post("/people/import/departments/", {"file": upload})
    assert answer.status_code == 400
    assert [(r, c) for r, c, _t in answer.context["problems"]] == [(2, "parent")]
    assert client.post("/people/import/departments/", {}).status_code == 400
    assert client.get("/people/import/nothing/").status_code == 404
