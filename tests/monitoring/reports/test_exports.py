"""Large files: whole or not there, with progress, for whoever may still see what is in them, and gone in time."""

from __future__ import annotations

import csv
import io
import os
import re
import signal
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import openpyxl
import pytest
from django.db import OperationalError, connections
from django.test import Client
from django.urls import reverse

from monitoring.models import ExportJob
from monitoring.services import exports
from monitoring.services.exports import export_ask, export_make, exports_sweep, path_of
from portal.accounts.models import RoleBinding, User
from portal.accounts.services.tokens import token_create
from portal.kernel.clock import now, set_clock
from portal.kernel.errors import Conflict, Invalid
from portal.notify.models import Notification
from portal.ops.actor import Actor
from quotas.engine.focus import problems
from quotas.models import LedgerEntry
from quotas.services.ledger import ledger_accrue
from tests.quotas.money.build import World, at, person, world

pytestmark = pytest.mark.django_db
NOON = at("2026-06-03T12:00")


@pytest.fixture(autouse=True)
def data(settings: object, tmp_path: Path) -> Path:
    settings.GPUPOOL_DATA_DIR = tmp_path  # type: ignore[attr-defined]
    return tmp_path


@pytest.fixture
def w() -> World:
    made = world()
    made.price("10", at("2026-06-01T00:00"))
    made.lease(at("2026-06-01T01:00"), at("2026-06-02T01:00"))
    made.lease(at("2026-06-02T08:00"), None, department=made.search)
    with set_clock(at("2026-06-03T01:00")):
        ledger_accrue()
    return made


def make(person_: User, kind: str, **params: str) -> ExportJob:
    with set_clock(NOON):
        job = export_ask(acting_user=Actor(user=person_), kind=kind, params=params)
        assert export_make(job_id=job.pk)
        assert not export_make(job_id=job.pk)
    job.refresh_from_db()
    return job


def test_each_kind_has_every_line_and_its_sum(w: World) -> None:
    fin = person("fin", ("finance", None))
    booked = list(LedgerEntry.objects.all())
    assert len(booked) == 3
    focus = make(fin, "focus", month="2026-06")
    rows = list(csv.DictReader(io.StringIO(path_of(focus).read_text())))
    assert len(rows) == 3 and problems(rows[0], rows) == []
    machines = list(csv.DictReader(io.StringIO(path_of(make(fin, "lines_machines")).read_text())))
    assert [row["kind"] for row in machines] == ["running", "usage", "usage", "usage"]
    money = sum(int(row["amount_micro"]) for row in machines)
    assert money == 240_000_000 + 280_000_000
    people = path_of(make(fin, "lines_people")).read_text("utf-8-sig")
    assert people.startswith("# ")
    sheet = openpyxl.load_workbook(path_of(make(fin, "lines_xlsx")), data_only=True).worksheets[1]
    heads = [cell.value for cell in sheet[1]]
    assert sheet.max_row == 6
    assert sheet[6][heads.index("Cost")].value == 520
    told = Notification.objects.filter(kind="export_ready", user=fin)
    assert told.count() == 4
    assert (path_of(focus).stat().st_mode & 0o777, focus.total, focus.size) == (
        0o600,
        3,
        path_of(focus).stat().st_size,
    )


def test_a_file_is_its_owners_while_they_see_what_is_in_it(w: World) -> None:
    lead = person("lead", ("lead", w.vision))
    job = make(lead, "lines_machines")
    assert len(path_of(job).read_text().splitlines()) == 3
    address = reverse("monitoring:export-file", args=[job.uid])
    client = Client()
    with set_clock(NOON):
        for other in (person("fin", ("finance", None)), w.user):
            client.force_login(other)
            assert client.get(address).status_code == 404
        client.force_login(lead)
        answer = client.get(address)
        assert answer.status_code == 200 and b"".join(answer.streaming_content).count(b"\r\n") == 3
        RoleBinding.objects.filter(user=lead).delete()
        assert client.get(address).status_code == 404


def test_the_page_asks_for_each_kind_of_file_and_shows_it(w: World) -> None:
    client = Client()
    client.force_login(person("fin", ("finance", None)))
    address = reverse("monitoring:exports")
    kinds = ["lines_xlsx", "lines_people", "lines_machines", "focus"]
    with set_clock(NOON):
        offered = re.findall(r'<option value="(\w+)">', client.get(address).content.decode())
        assert offered[:4] == kinds
        for kind in kinds:
            client.post(
                address, {"file": kind, "month": "2026-06", "kind": "usage" if kind == "focus" else ""}
            )
        assert [export_make(job_id=job.pk) for job in ExportJob.objects.order_by("id")] == [True] * 4
        page = client.get(address).content.decode()
    jobs = list(ExportJob.objects.order_by("id"))
    assert [(job.kind, job.state) for job in jobs] == [(kind, "ready") for kind in kinds]
    assert [job.params["month"] for job in jobs] == ["2026-06"] * 4
    assert jobs[3].params["kind"] == "usage"
    assert all(reverse("monitoring:export-file", args=[job.uid]) in page for job in jobs)
    client.post(address, {"file": "parquet"})
    assert ExportJob.objects.count() == 4


def test_a_full_disk_leaves_nothing_and_says_so(w: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both kinds of writers, against the kernel's own full device."""
    fin = person("fin", ("finance", None))
    usual = Path.open

    def full(path: Path, *given: Any, **more: Any) -> Any:
        if path.suffix != ".part":
            return usual(path, *given, **more)
        path.touch()
        return usual(Path("/dev/full"), *given, **more)

    with set_clock(NOON):
        jobs = [
            export_ask(acting_user=Actor(user=fin), kind=kind, params={})
            for kind in ("lines_machines", "lines_xlsx")
        ]
        monkeypatch.setattr(Path, "open", full)
        assert [export_make(job_id=job.pk) for job in jobs] == [False, False]
        monkeypatch.undo()
        found = ExportJob.objects.order_by("id").values_list("state", "error_code", "size", "ready_at")
        assert list(found) == [("failed", "no_space", 0, None)] * 2
        assert list(exports.folder().iterdir()) == []
        client = Client()
        client.force_login(fin)
        client.cookies["django_language"] = "en"
        assert "The disk is full" in client.get(reverse("monitoring:exports")).content.decode()
        answer = client.get(f"/api/v1/exports/{jobs[0].uid}/file/")
        assert (answer.status_code, answer.json()["code"]) == (409, "file_failed")
        assert client.get(f"/api/v1/exports/{jobs[0].uid}/").json()["error_code"] == "no_space"
        again = export_ask(acting_user=Actor(user=fin), kind="lines_machines", params={})
        assert export_make(job_id=again.pk)


def test_the_export_menu_hands_its_filter_on_and_the_form_asks_for_it(w: World) -> None:
    client = Client()
    client.force_login(person("fin", ("finance", None)))
    client.cookies["django_language"] = "en"
    asked = {"month": "2026-06", "department": str(w.search.uid), "kind": "usage", "site": "sh"}
    with set_clock(NOON):
        for name, query in (("ledger", asked), ("month", {k: v for k, v in asked.items() if k != "month"})):
            page = client.get(reverse(f"quotas:{name}"), query).content.decode()
            [link] = re.findall(rf'href="({reverse("monitoring:exports")}\?[^"]*)#new"', page)
            form = client.get(link.replace("&amp;", "&")).content.decode()
            assert (
                "Lab / Search" in form
                and "Site sh" in form
                and f"Kind: {LedgerEntry.Kind.USAGE.label}" in form
            )
            assert '<option value="2026-06" selected>' in form
            hidden = dict(re.findall(r'type="hidden" name="(department|kind|site)" value="([^"]*)"', form))
            assert hidden == {name: asked[name] for name in ("department", "kind", "site")}
            client.post(
                reverse("monitoring:exports"), {"file": "lines_machines", "month": "2026-06", **hidden}
            )
            job = ExportJob.objects.latest("id")
            assert export_make(job_id=job.pk)
            rows = list(csv.DictReader(io.StringIO(path_of(job).read_text())))
            assert [row["department"] for row in rows] == ["Lab / Search"] == [rows[0]["department"]]
        page = client.get(reverse("monitoring:exports")).content.decode()
    assert "June 2026 · Lab / Search · Site sh · Kind: " in page


def test_a_program_asks_looks_and_downloads_until_it_expires(w: World) -> None:
    client, other = Client(), Client()
    fin, lead = person("fin", ("finance", None)), person("lead", ("lead", w.vision))
    client.force_login(fin)
    other.force_login(lead)
    with set_clock(NOON):
        _token, value = token_create(
            acting_user=Actor(user=fin), user=fin, name="books", scopes=["read"],
        )  # fmt: skip
        program = Client(headers={"authorization": f"Bearer {value}", "accept": "application/json"})
        asked = program.post(
            "/api/v1/exports/", {"file": "focus", "month": "2026-06"}, content_type="application/json"
        )
        assert asked.status_code == 201, asked.content
        row = asked.json()
        address = f"/api/v1/exports/{row['uid']}/"
        assert (row["state"], row["url"], row["params"]) == ("queued", None, {"month": "2026-06"})
        early = client.get(f"{address}file/")
        assert (early.status_code, early.json()["code"]) == (409, "file_not_ready")
        assert export_make(job_id=ExportJob.objects.get().pk)
        row = client.get(address).json()
        assert (row["state"], row["done"], row["total"], row["file_name"]) == (
            "ready", 3, 3, "gpu-focus-2026-06.csv",
        )  # fmt: skip
        file = program.get(row["url"], headers={"accept": "text/csv"})
        assert (file.status_code, file["Content-Type"]) == (200, "text/csv")
        found = b"".join(file.streaming_content)
        assert (
            len(found) == row["size"]
            and problems((rows := list(csv.DictReader(io.StringIO(found.decode()))))[0], rows) == []
        )
        assert client.get("/api/v1/exports/").json()["results"][0]["uid"] == row["uid"]
        assert other.get("/api/v1/exports/").json()["results"] == []
        for ending in ("", "file/"):
            assert other.get(f"{address}{ending}").status_code == 404
        for body, pointer in (
            ({"file": "parquet"}, "file"),
            ({"file": "focus"}, "month"),
            ({"file": "lines_xlsx", "month": "2026-13"}, "month"),
            ({"file": "lines_xlsx", "colour": "red"}, "colour"),
        ):
            wrong = client.post("/api/v1/exports/", body, content_type="application/json")
            assert (wrong.status_code, wrong.json()["errors"][0]["pointer"]) == (400, pointer)
        foreign = {"file": "lines_machines", "department": str(w.search.uid)}
        assert other.post("/api/v1/exports/", foreign, content_type="application/json").status_code == 404
        assert ExportJob.objects.count() == 1
        RoleBinding.objects.filter(user=fin).delete()
        assert client.get(f"{address}file/").status_code == 404, "what they may no longer see"
    with set_clock(NOON + timedelta(days=7)):
        RoleBinding.objects.create(user=fin, role="finance", valid_from=NOON)
        assert client.get(f"{address}file/").status_code == 404, "also before the sweep"
        exports_sweep()
        assert client.get(address).json()["state"] == "expired"


def test_one_person_has_five_files_in_the_making_at_most(w: World) -> None:
    fin = Actor(user=person("fin", ("finance", None)))
    with set_clock(NOON):
        jobs = [export_ask(acting_user=fin, kind="lines_machines", params={}) for _n in range(5)]
        with pytest.raises(Conflict) as refused:
            export_ask(acting_user=fin, kind="lines_machines", params={})
        assert (refused.value.code, ExportJob.objects.count()) == ("too_many_files", 5)
        assert export_make(job_id=jobs[0].pk)
        export_ask(acting_user=fin, kind="lines_machines", params={})


def test_what_a_dead_worker_left_is_taken_up_and_old_files_go(w: World) -> None:
    fin = person("fin", ("finance", None))
    job = make(fin, "focus", month="2026-06")
    with set_clock(NOON):
        left = export_ask(acting_user=Actor(user=fin), kind="focus", params={"month": "2026-06"})
        ExportJob.objects.filter(pk=left.pk).update(state="running", beat_at=now() - timedelta(minutes=6))
        with mock.patch.object(exports, "_send") as sent:
            assert exports_sweep() == {"again": 1, "expired": 0}
            left.refresh_from_db()
            assert left.state == "queued"
            assert export_make(job_id=left.pk)
            assert not sent.called or sent.call_args.args == (left.pk,)
    with set_clock(NOON + timedelta(days=7)):
        assert exports_sweep()["expired"] == 2
        assert not path_of(job).exists()
    job.refresh_from_db()
    assert job.state == "expired"


@pytest.mark.django_db(transaction=True)
def test_a_worker_killed_while_it_writes_leaves_nothing_to_download_and_another_makes_the_file(
    w: World,
) -> None:
    fin = person("fin", ("finance", None))
    client = Client()
    client.force_login(fin)
    client.cookies["django_language"] = "en"
    with set_clock(NOON):
        job = export_ask(acting_user=Actor(user=fin), kind="lines_machines", params={})
    connections.close_all()  # neither process may use the other's
    if (child := os.fork()) == 0:
        whole = exports.machine_csv

        def half(**given: object) -> Iterator[bytes]:
            yield next(iter(whole(**given)))  # type: ignore[arg-type]
            os.kill(os.getpid(), signal.SIGKILL)

        try:
            with set_clock(NOON), mock.patch.object(exports, "machine_csv", half):
                export_make(job_id=job.pk)
        finally:
            os._exit(1)
    _pid, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    job.refresh_from_db()
    assert (job.state, [path.suffix for path in exports.folder().iterdir()]) == ("running", [".part"])
    address = reverse("monitoring:export-file", args=[job.uid])
    with set_clock(NOON + timedelta(minutes=4)):
        assert client.get(address).status_code == 409
        assert exports_sweep()["again"] == 0, "it may still live"
        assert not export_make(job_id=job.pk)
    with set_clock(NOON + timedelta(minutes=6)):
        with mock.patch.object(exports, "_send") as sent:
            assert exports_sweep() == {"again": 1, "expired": 0}
        sent.assert_called_once_with(job.pk)
        assert list(exports.folder().iterdir()) == []
        assert client.get(address).status_code == 409
        assert export_make(job_id=job.pk)
        found = b"".join(client.get(address).streaming_content)
    job.refresh_from_db()
    assert (job.state, job.size, found.count(b"\r\n")) == ("ready", len(found), 1 + job.total)
    assert [path.name for path in exports.folder().iterdir()] == [path_of(job).name]


def test_nonsense_is_refused(w: World) -> None:
    fin = Actor(user=person("fin", ("finance", None)))
    for kind, params in (("parquet", {}), ("focus", {}), ("lines_xlsx", {"month": "2026-13"})):
        with pytest.raises(Invalid):
            export_ask(acting_user=fin, kind=kind, params=params)
    assert ExportJob.objects.count() == 0


@pytest.mark.parametrize(
    ("fault", "state", "code"),
    [(ValueError("ours"), "failed", "not_written"), (OperationalError("away"), "running", "")],
)
def test_a_fault_of_ours_ends_a_file_and_an_absent_database_does_not(
    w: World, monkeypatch: pytest.MonkeyPatch, fault: Exception, state: str, code: str
) -> None:
    fin = person("fin", ("finance", None))
    with set_clock(NOON):
        job = export_ask(acting_user=Actor(user=fin), kind="lines_machines", params={})

        def broken(*_args: object) -> int:
            raise fault

        monkeypatch.setattr(exports, "_write", broken)
        with pytest.raises(type(fault)):
            export_make(job_id=job.pk)
    job.refresh_from_db()
    assert (job.state, job.error_code) == (state, code)
