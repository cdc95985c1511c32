"""Pages of the audit trail and of incidents."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from django.db import IntegrityError, connection, transaction
from django.db.utils import DatabaseError
from django.utils.translation import override

from portal.accounts.services import department_rename, user_update
from portal.kernel.clock import set_clock
from portal.kernel.tabular import read_table
from portal.ops.facts import fact_rows
from portal.ops.models import AuditEvent, Incident
from portal.ops.services import incident_open
from portal.ops.web.audit import changes_of
from tests.portal.builders import actor, admin, client_of, department, person

pytestmark = pytest.mark.django_db
T0 = datetime(2026, 6, 16, 6, 3, tzinfo=UTC)


def labels(answer: object) -> list[str]:
    return [e.object_label for e, _changes in answer.context["events"]]  # type: ignore[attr-defined]


def test_the_trail_takes_inserts_only() -> None:
    person("x")
    for sql in ("UPDATE ops_auditevent SET reason = 'mine'", "DELETE FROM ops_auditevent"):
        with (
            pytest.raises((DatabaseError, IntegrityError)),
            transaction.atomic(),
            connection.cursor() as cursor,
        ):
            cursor.execute(sql)
    assert AuditEvent.objects.filter(action="user.created").count() == 1


def test_filters_live_in_the_address() -> None:
    boss, row = admin(), department("vision", name="Vision")
    user = person("x", display_name="X Y")
    with set_clock(T0):
        user_update(acting_user=actor(boss), user=user, email="x@qinghe.lan")
        department_rename(acting_user=actor(boss), department=row, name="Vision & more")
    client = client_of(person("he", ("auditor", None), time_zone="Asia/Shanghai"))
    assert labels(client.get("/audit/?act=department")) == ["Vision & more", "Vision"]
    assert labels(client.get("/audit/?act=user.changed")) == ["X Y"]
    assert labels(client.get("/audit/?q=X+Y&via=page")) == ["X Y"]
    assert labels(client.get("/audit/?q=ser.chang")) == ["X Y"]  # an act, by any part of its name
    assert labels(client.get(f"/audit/?q={row.uid}")) == ["Vision & more", "Vision"]
    assert labels(client.get(f"/audit/?actor={boss.pk}")) == ["Vision & more", "X Y"]
    assert labels(client.get("/audit/?from=2026-06-16&to=2026-06-16")) == ["Vision & more", "X Y"]
    assert labels(client.get("/audit/?from=2026-06-17&to=2026-06-18")) == []
    for odd in (
        "from=never",
        "before=x",
        "show=999999999",
        "actor=me",
        "from=2026-13-45",
        "after=99999999999999999999",
    ):
        assert client.get(f"/audit/?{odd}").status_code == 200
    changed = AuditEvent.objects.get(action="user.changed")
    opened = client.get(f"/audit/?show={changed.pk}")
    assert opened.context["opened"].pk == changed.pk
    assert changes_of(changed) == [("email", "", "x@qinghe.lan")]


def test_pages_go_by_cursor_both_ways() -> None:
    for n in range(120):
        person(f"p{n:03d}")
    client = client_of(person("he", ("auditor", None)))
    first = client.get("/audit/?act=user")
    assert (labels(first)[0], len(labels(first)), first.context["newer"]) == ("He", 50, None)
    second = client.get(f"/audit/?act=user&before={first.context['older']}")
    third = client.get(f"/audit/?act=user&before={second.context['older']}")
    assert (len(labels(third)), third.context["older"]) == (21, None)
    back = client.get(f"/audit/?act=user&after={third.context['newer']}")
    assert labels(back) == labels(second)
    seen = labels(first) + labels(second) + labels(third)
    assert len(seen) == len(set(seen)) == 121


def test_the_export_repeats_the_filter_and_runs_no_formula() -> None:
    boss = admin()
    person("x", display_name='=HYPERLINK("http://x","y")')
    answer = client_of(boss).get("/audit/export.csv?act=user")
    body = answer.content.decode("utf-8")
    assert body.startswith('\ufeff"# Audit: ')
    assert len(read_table(answer.content).rows) == 2, "our own files come back in"
    assert "act=user" in body
    assert "\"'=HYPERLINK" in body
    assert "role.granted" not in body


def test_a_department_auditor_sees_the_subtree_only() -> None:
    mine, other = department("mine"), department("other")
    auditor = person("he", ("auditor", mine))
    person("a", home_department=mine)
    person("b", home_department=other)
    assert set(labels(client_of(auditor).get("/audit/?act=user"))) == {"A"}
    assert client_of(auditor).get("/incidents/").status_code == 403


def test_incidents_are_taken_noted_and_closed_by_page() -> None:
    boss, auditor = admin(), person("he", ("auditor", None))
    with set_clock(T0):
        incident = incident_open(
            kind="node_lost", dedupe_key="n", severity="critical", facts={"node": "sh-05"}
        )
    with set_clock(T0 + timedelta(minutes=1)):
        incident_open(kind="node_lost", dedupe_key="n")
    client = client_of(boss)
    page = client.get(f"/incidents/{incident.uid}/").content.decode()
    assert "sh-05" in page
    assert client_of(auditor).get("/incidents/").status_code == 200
    assert client_of(auditor).post(f"/incidents/{incident.uid}/close/", {"text": "x"}).status_code == 403
    assert client.post(f"/incidents/{incident.uid}/take/").status_code == 302
    assert client.post(f"/incidents/{incident.uid}/note/", {"text": "cable"}).status_code == 302
    empty = client.post(f"/incidents/{incident.uid}/close/", {"text": " "})
    assert empty.status_code == 400
    assert Incident.objects.get().state == "acknowledged"
    assert client.post(f"/incidents/{incident.uid}/close/", {"text": "cable replaced"}).status_code == 302
    row = Incident.objects.get()
    assert (row.state, row.note, row.closed_by_name, row.occurrences) == (
        "closed",
        "cable replaced",
        "Zhao Rui",
        2,
    )
    assert list(row.entries.order_by("id").values_list("kind", flat=True)) == [
        "acknowledged",
        "note",
        "closed",
    ]
    twice = client.post(f"/incidents/{incident.uid}/close/", {"text": "again"})
    assert twice.status_code == 400
    assert incident_open(kind="node_lost", dedupe_key="n").pk != row.pk, "seen again: a new one"


def test_facts_of_incidents_have_names_and_moments_of_the_reader() -> None:
    """What the code wrote is named in the reader's language; a moment is one; what nobody named keeps its key."""
    with override("zh-hans"):
        assert fact_rows({"which": ["n1 GPU 0", "n2 GPU 3"]})[0]["value"] == "n1 GPU 0，n2 GPU 3"
        assert fact_rows({"metric": "pool_no_data_gpus"})[0]["value"] == "池中无数据 GPU"
    rows = fact_rows(
        {
            "node": "gpu-1",
            "at": "2026-12-01T07:05:14.599000+00:00",
            "odd_key": 3,
            "reason": "",
            "worst": 0,
            "first": "2026-13-01T99:00:00+00:00",
        }
    )
    with override("zh-hans"):
        told = [(row["key"], str(row["name"] or row["key"]), row["value"]) for row in rows]
    assert told == [
        ("at", "发现时间", None),
        ("first", "首次", "2026-13-01T99:00:00+00:00"),
        ("node", "节点", "gpu-1"),
        ("odd_key", "odd_key", 3),
        ("worst", "最差值", 0),
    ]
    assert rows[0]["moment"] == datetime(2026, 12, 1, 7, 5, 14, 599000, tzinfo=UTC)
