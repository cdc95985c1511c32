"""Project folders: kept once for their request, out of reach of others, gone when the request is over."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
from datetime import timedelta
from typing import Any

import pytest
from django.test import Client

from pool.models import Allocation, AllocationMember, Node, WorkUpload, WorkUploadPiece
from pool.services import uploads
from pool.services.enrolment import enrolment_code_create, enrolment_redeem
from pool.services.uploads import uploads_tidy
from portal.kernel.clock import now
from portal.ops.actor import SYSTEM
from portal.ops.models import AuditEvent
from quotas.models import CapacityRequest
from tests.portal.builders import bearer, token_of
from tests.quotas import build

pytestmark = pytest.mark.django_db
TOKEN = "a" * 32


def folder(**files: bytes) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as out:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            out.addfile(info, io.BytesIO(data))
    return gzip.compress(raw.getvalue(), mtime=0)


def send(
    who: Any, data: bytes, token: str = TOKEN, scope: str = "request", kind: str = "application/gzip"
) -> Any:
    extra = bearer(token_of(who, "read", scope))
    return Client().generic("PUT", f"/api/v1/work-uploads/{token}/", data=data, content_type=kind, **extra)


@pytest.fixture
def lin() -> Any:
    return build.user("lin", home=build.department("vision"))


def test_a_folder_is_kept_once_and_replaced_until_its_request_stands(lin: Any) -> None:
    data = folder(a=b"1", b=b"22")
    first = send(lin, data)
    assert first.status_code == 200, first.content
    body = first.json()
    assert (body["files"], body["size"], body["unpacked"]) == (2, len(data), 3)
    assert body["sha256"] == hashlib.sha256(data).hexdigest()
    assert send(lin, data).json()["uid"] == body["uid"]
    other = send(lin, folder(a=b"changed"))
    assert other.json()["uid"] != body["uid"] and WorkUpload.objects.count() == 1
    assert b"".join(uploads.upload_bytes(WorkUpload.objects.get())) == folder(a=b"changed")
    CapacityRequest.objects.create(
        requester=lin, department=lin.home_department, client_token=TOKEN, state="queued", command="x"
    )
    late = send(lin, data)
    assert (late.status_code, late.json()["code"]) == (409, "upload_too_late")
    assert send(lin, folder(a=b"changed")).status_code == 200  # the same once more is no change
    assert AuditEvent.objects.filter(action="upload.kept").count() == 2


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (b"no archive", 400, "archive_unreadable"),
        (folder(**{"../x": b"1"}), 400, "path_outside"),
        (folder(**{"/etc/x": b"1"}), 400, "path_absolute"),
    ],
    ids=["no archive", "outside", "absolute"],
)
def test_what_is_not_taken_is_said_and_nothing_is_kept(lin: Any, data: bytes, status: int, code: str) -> None:
    answer = send(lin, data)
    assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert answer["Content-Type"] == "application/problem+json"
    assert not WorkUpload.objects.exists() and not AuditEvent.objects.filter(action="upload.kept").exists()


def test_limits_of_size_scope_and_kind(lin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert send(lin, folder(a=b"1"), scope="approve").status_code == 403
    assert send(lin, b"{}", kind="application/json").status_code == 415
    assert send(lin, folder(a=b"1"), token="short").status_code == 404
    monkeypatch.setattr("pool.api.upload_views.MOST_BYTES", 50)
    large = send(lin, folder(a=bytes(range(256)) * 10))
    assert (large.status_code, large.json()["code"]) == (413, "upload_too_large")
    monkeypatch.undo()
    monkeypatch.setattr(uploads, "MOST_OF_ONE_PERSON", 150)
    assert send(lin, folder(a=b"1")).status_code == 200
    full = send(lin, folder(a=b"1"), token="b" * 32)
    assert (full.status_code, full.json()["code"]) == (409, "uploads_full")
    assert full.json()["blocking"]["limit"] == 150 and WorkUpload.objects.count() == 1


def test_others_see_neither_the_folder_nor_its_bytes(lin: Any) -> None:
    uid = send(lin, folder(a=b"1")).json()["uid"]
    other = build.user("other", home=lin.home_department)
    path = f"/api/v1/work-uploads/{TOKEN}/"
    assert Client().get(path, **bearer(token_of(other, "read"))).status_code == 404
    assert Client().get(path, **bearer(token_of(lin, "read"))).json()["uid"] == uid
    assert Client().get(f"/agent/upload/{uid}/").status_code == 401
    assert (
        Client().get(f"/agent/upload/{uid}/", **bearer(token_of(lin, "read", "request"))).status_code == 401
    )


def test_only_the_node_that_is_to_run_it_may_fetch_it(lin: Any) -> None:
    data = folder(a=b"1" * 1000)
    uid = send(lin, data).json()["uid"]
    tokens = {}
    for name in ("mine", "other"):
        code = enrolment_code_create(acting_user=SYSTEM, node_name=name)
        tokens[name] = enrolment_redeem(code=code, hostname=name, machine_id=name, facts={}).token
    request = CapacityRequest.objects.create(
        requester=lin, department=lin.home_department, client_token=TOKEN, state="allocated", command="x"
    )
    made = Allocation.objects.create(
        request=request, holder=lin, department=lin.home_department, charge_milli=0, state="starting"
    )
    AllocationMember.objects.create(allocation=made, number=0, node=Node.objects.get(name="mine"))

    def fetch(name: str) -> Any:
        return Client().get(f"/agent/upload/{uid}/", HTTP_AUTHORIZATION=f"Bearer {tokens[name]}")

    answer = fetch("mine")
    assert answer.status_code == 200 and b"".join(answer.streaming_content) == data
    assert fetch("other").status_code == 404
    Allocation.objects.filter(pk=made.pk).update(state="ended")
    assert fetch("mine").status_code == 404


def test_a_folder_goes_when_its_request_is_over_or_never_came(lin: Any) -> None:
    for number, token in enumerate(("n" * 8, "o" * 8, "p" * 8)):
        assert send(lin, folder(a=b"%d" % number), token=token).status_code == 200
    team = lin.home_department
    over = CapacityRequest.objects.create(
        requester=lin, department=team, client_token="n" * 8, state="queued"
    )
    CapacityRequest.objects.create(requester=lin, department=team, client_token="o" * 8, state="allocated")
    assert uploads_tidy() == 0
    CapacityRequest.objects.filter(pk=over.pk).update(state="ended")
    WorkUpload.objects.filter(client_token="p" * 8).update(created_at=now() - timedelta(days=2))
    assert uploads_tidy() == 2
    assert list(WorkUpload.objects.values_list("client_token", flat=True)) == ["o" * 8]
    assert WorkUploadPiece.objects.count() == 1
