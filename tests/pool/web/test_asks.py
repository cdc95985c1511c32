"""Pages and API of data sets and of what-if: budgets, roles, and that asking writes nothing."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from pool.models import Dataset
from pool.selectors import fit
from portal.kernel.clock import set_clock
from quotas.models import CapacityRequest
from tests.pool import builders as pool
from tests.portal.builders import bearer, token_of
from tests.quotas import build

pytestmark = pytest.mark.django_db
T = datetime(2026, 6, 16, 6, 3, tzinfo=UTC)
BUDGET = 15


@pytest.fixture
def house(monkeypatch):
    monkeypatch.setattr(fit, "_watcher", fit.Watcher())
    with set_clock(T):
        made = build.House()
        pool.node(made.h800, name="sh-1")
        yield made


def client(who):
    made = Client()
    made.force_login(who, backend="django.contrib.auth.backends.ModelBackend")
    made.cookies["django_language"] = "en"
    return made


def call(user: Any, method: str, path: str, body: Any = None, scope: str = "admin") -> Any:
    data = b"" if body is None else json.dumps(body)
    headers = bearer(token_of(user, "read", scope))
    return Client().generic(method, path, data=data, content_type="application/json", **headers)


def typed(**changes: str) -> dict[str, str]:
    """The form as it is sent for a simple request."""
    return {
        "ask_by": "flavour", "flavour": "h800", "shape": "whole", "gpus_per_node": "2", "nodes": "1", "start": "asap",
        "hours": "6", "work_class": "training", "interruptible": "yes", "run_kind": "command", **changes,
    }  # fmt: skip


def test_the_panel_says_whether_it_would_start_and_writes_nothing(house):
    reader = client(house.lin)
    form = typed(department=str(house.video.uid))
    reader.post("/pool/what-if/", form)
    with CaptureQueriesContext(connection) as queries:
        answer = reader.post("/pool/what-if/", form)
    text = answer.content.decode()
    assert "sh-1" in text and len(queries) <= BUDGET, len(queries)
    late = reader.post("/pool/what-if/", {**form, "deadline_at": "2026-06-16T21:00"}).content.decode()
    assert "It would be finished by" in late
    assert reader.post("/pool/what-if/", {**form, "gpus_per_node": "many"}).content.decode().strip() == ""
    assert CapacityRequest.objects.count() == 0
    assert Client().post("/pool/what-if/", form).status_code == 302


def test_what_if_by_api(house):
    wish = {"flavour": "h800", "gpus_per_node": 4, "duration_s": 6 * 3600, "department": "video"}
    answer = call(house.lin, "POST", "/api/v1/what-if/", wish, scope="request")
    assert answer.status_code == 200, answer.content
    found = answer.json()
    assert (found["outcome"], found["starts_now"], found["nodes"], found["reason"]) == (
        "auto",
        True,
        ["sh-1"],
        None,
    )
    assert (found["gpu_ms"], found["cost_micro"]) == (4 * 6 * 3_600_000, 4 * 6 * 16_000_000)
    assert found["options"][0]["available_milli"] == 8_000  # all that is installed
    many = call(house.lin, "POST", "/api/v1/what-if/", {**wish, "array_count": 10, "array_at_once": 3}).json()
    assert (many["at_once"], many["cost_micro"]) == (3, 10 * 4 * 6 * 16_000_000)
    wrong = call(house.lin, "POST", "/api/v1/what-if/", {**wish, "fabric": "infiniband"})
    assert (wrong.status_code, wrong.json()["errors"][0]["pointer"]) == (400, "fabric")
    assert CapacityRequest.objects.count() == 0


def test_data_sets_on_their_pages(house):
    boss = client(house.zhao)
    form = {"code": "laion", "name": "LAION", "size_gib": "10", "site": "bj", "nodes": "", "department": ""}
    bad = boss.post("/datasets/new/", {**form, "size_gib": "ten"})
    assert bad.status_code == 400
    assert 'value="ten"' in bad.content.decode() and Dataset.objects.count() == 0
    assert boss.post("/datasets/new/", form).status_code == 302
    made = Dataset.objects.get()
    assert boss.post(f"/datasets/{made.uid}/", {**form, "name": "New", "version": "1"}).status_code == 302
    stale = boss.post(f"/datasets/{made.uid}/", {**form, "name": "Old", "version": "1"})
    assert stale.status_code == 409 and Dataset.objects.get().name == "New"
    reader = client(house.lin)
    reader.get("/datasets/")
    with CaptureQueriesContext(connection) as queries:
        page = reader.get("/datasets/").content.decode()
    assert "laion" in page and "New data set" not in page and len(queries) <= BUDGET
    assert reader.post("/datasets/new/", form).status_code == 403
    assert reader.post(f"/datasets/{made.uid}/retire/").status_code == 403
    assert boss.post(f"/datasets/{made.uid}/retire/").status_code == 302
    assert "laion" not in reader.get("/datasets/").content.decode()
    assert "laion" in reader.get("/datasets/?retired=1").content.decode()
    node = boss.get(f"/nodes/{pool.Node.objects.get(name='sh-1').uid}/")
    assert "Place, network, storage" in node.content.decode()


def test_data_sets_by_api(house):
    body = {"code": "laion", "name": "LAION", "site": "bj"}
    assert call(house.lin, "POST", "/api/v1/datasets/", body).status_code == 403
    made = call(house.zhao, "POST", "/api/v1/datasets/", body)
    assert (made.status_code, made.json()["nodes"]) == (201, [])
    url = f"/api/v1/datasets/{made.json()['uid']}/"
    changed = call(house.zhao, "PATCH", url, {"nodes": ["sh-1"], "size_gib": 7})
    assert (changed.status_code, changed.json()["nodes"], changed.json()["name"]) == (200, ["sh-1"], "LAION")
    assert call(house.zhao, "PATCH", url, {"nodes": ["sh-9"]}).status_code == 400
    assert [d["code"] for d in call(house.lin, "GET", "/api/v1/datasets/").json()["results"]] == ["laion"]
    gone = call(house.zhao, "POST", f"{url}retire/", {"reason": "old"})
    assert gone.status_code == 200 and gone.json()["retired_at"] is not None
    assert call(house.lin, "GET", "/api/v1/datasets/").json()["results"] == []
