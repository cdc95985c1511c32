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
from unittest import mock

import openpyxl
import pytest
from django.db import connections
from django.test import Client
from django.urls import reverse

from monitoring.models import ExportJob
from monitoring.services import exports
from monitoring.services.exports import export_ask, export_make, exports_sweep, path_of
from portal.accounts.models import RoleBinding, User
from portal.kernel.clock import now, set_clock
from portal.kernel.errors import Invalid
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


def test_a_full_disk_leaves_nothing_and_says_so(w: World) -> None:
    fin = person("fin", ("finance", None))
    with set_clock(NOON):
        job = export_ask(acting_user=Actor(user=fin), kind="lines_machines", params={})
        full = mock.Mock(free=0)
        with (
            mock.patch.object(exports, "machine_csv", side_effect=OSError(28, "No space left")),
            mock.patch.object(exports.shutil, "disk_usage", return_value=full),
        ):
            assert not export_make(job_id=job.pk)
        job.refresh_from_db()
        assert (job.state, job.error_code) == ("failed", "no_space")
        assert list(exports.folder().iterdir()) == []
        client = Client()
        client.force_login(fin)
        client.cookies["django_language"] = "en"
        assert "The disk is full" in client.get(reverse("monitoring:exports")).content.decode()


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
        assert client.get(address).status_code == 404
        assert exports_sweep()["again"] == 0, "it may still live"
        assert not export_make(job_id=job.pk)
    with set_clock(NOON + timedelta(minutes=6)):
        with mock.patch.object(exports, "_send") as sent:
            assert exports_sweep() == {"again": 1, "expired": 0}
        sent.assert_called_once_with(job.pk)
        assert list(exports.folder().iterdir()) == []
        assert client.get(address).status_code == 404
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
