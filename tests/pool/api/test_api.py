"""API of pool: the same rules as the pages, with codes."""

from __future__ import annotations

import io
import json
from datetime import timedelta
from typing import Any

import pytest
from django.test import Client

from pool.models import AgentToken, Allocation, Node
from pool.services.cycle import schedule_cycle
from portal.ops.models import AuditEvent
from tests.pool import builders as pool
from tests.portal.builders import bearer, token_of
from tests.quotas import build

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def held() -> Allocation:
    team = build.department("vision", name="Vision")
    flavour = build.flavour("h800", installed=None)
    pool.node(flavour, name="sh-01")
    build.limits(team, flavour, 8)
    request = pool.queued(team, flavour, 2)
    schedule_cycle(cause="test")
    allocation = Allocation.objects.get(request=request)
    pool.report_running(allocation)
    allocation.refresh_from_db()
    return allocation


@pytest.fixture
def chief() -> Any:
    user = build.user("chief")
    build.role(user, "pool_admin", None)
    return user


def call(user: Any, method: str, path: str, body: Any = None, scope: str = "admin", **headers: str) -> Any:
    extra = {**bearer(token_of(user, "read", scope)), **headers}
    return Client().generic(
        method, path, data=b"" if body is None else json.dumps(body), content_type="application/json", **extra
    )


def test_nodes_are_read_by_all_and_decided_by_administrators(held: Allocation, chief: Any) -> None:
    node = Node.objects.get()
    plain = build.user("plain")
    rows = call(plain, "GET", "/api/v1/nodes/").json()
    assert [(r["name"], r["gpus"], r["gpus_held"], r["schedulable"]) for r in rows["results"]] == [
        ("sh-01", 8, 2, "open")
    ]
    refused = call(plain, "POST", f"/api/v1/nodes/{node.uid}/cordon/", {"reason": "x"})
    assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")
    empty = call(chief, "POST", f"/api/v1/nodes/{node.uid}/cordon/", {"reason": ""})
    assert empty.status_code == 400
    assert empty.json()["errors"][0]["pointer"] == "reason"
    old = call(chief, "POST", f"/api/v1/nodes/{node.uid}/cordon/", {"reason": "x"}, HTTP_IF_MATCH='"77"')
    assert (old.status_code, old.json()["code"]) == (412, "version_changed")
    node.refresh_from_db()
    assert node.schedulable == "open"
    done = call(
        chief,
        "POST",
        f"/api/v1/nodes/{node.uid}/cordon/",
        {"reason": "fan"},
        HTTP_IF_MATCH=f'"{node.version}"',
    )
    assert (done.status_code, done.json()["schedulable"]) == (200, "cordoned")
    assert done["ETag"] == f'"{node.version + 1}"'
    again = call(chief, "POST", f"/api/v1/nodes/{node.uid}/cordon/", {"reason": "fan"})
    assert (again.status_code, again.json()["code"]) == (409, "node_state")


def test_an_unknown_filter_is_refused(held: Allocation, chief: Any) -> None:
    answer = call(chief, "GET", "/api/v1/gpus/?modle=h800")
    assert (answer.status_code, answer.json()["code"]) == (400, "unknown_filter")
    assert answer.json()["errors"] == [{"pointer": "modle", "detail": "unknown filter"}]
    assert call(chief, "GET", "/api/v1/gpus/?node=sh-01").json()["count"] == 8


def test_allocations_of_others_do_not_exist(held: Allocation) -> None:
    stranger = build.user("stranger", home=build.department("other"))
    assert call(stranger, "GET", "/api/v1/allocations/").json()["count"] == 0
    for method, path in (("GET", ""), ("POST", "release/"), ("POST", "revoke/"), ("GET", "log/")):
        answer = call(stranger, method, f"/api/v1/allocations/{held.uid}/{path}", {}, scope="request")
        assert answer.status_code == 404, path
    held.refresh_from_db()
    assert held.state == "running"


def test_a_token_needs_the_scope(held: Allocation) -> None:
    path = f"/api/v1/allocations/{held.uid}/release/"
    answer = call(held.holder, "POST", path, {}, scope="approve")
    assert answer.status_code == 403
    held.refresh_from_db()
    assert held.state == "running"
    answer = call(held.holder, "POST", path, {"reason": "done"}, scope="request")
    assert (answer.status_code, answer.json()["state"]) == (200, "stopping")


def test_a_release_sent_twice_with_one_key_is_done_once(held: Allocation) -> None:
    path = f"/api/v1/allocations/{held.uid}/release/"
    first = call(held.holder, "POST", path, {}, scope="request", HTTP_IDEMPOTENCY_KEY="k-1")
    second = call(held.holder, "POST", path, {}, scope="request", HTTP_IDEMPOTENCY_KEY="k-1")
    assert (first.status_code, second.status_code) == (200, 200)
    assert second["Idempotent-Replay"] == "true"
    assert second.json()["uid"] == first.json()["uid"]
    assert held.events.filter(kind="stopping").count() == 1
    other = call(held.holder, "POST", path, {"reason": "x"}, scope="request", HTTP_IDEMPOTENCY_KEY="k-1")
    assert (other.status_code, other.json()["code"]) == (409, "idempotency_key_reused")


def test_an_administrator_revokes_a_nodes_token_at_once(held: Allocation, chief: Any) -> None:
    node = Node.objects.get()
    AgentToken.objects.create(node=node, hash="h" * 64)
    path = f"/api/v1/nodes/{node.uid}/revoke-agent/"
    assert call(held.holder, "POST", path, {"reason": "x"}).status_code == 403
    assert AgentToken.objects.get().revoked_at is None
    assert call(chief, "POST", path, {"reason": "taken over"}).status_code == 200
    assert AgentToken.objects.get().revoked_at is not None
    assert AuditEvent.objects.get(action="agent.token_revoked").reason == "taken over"


def test_an_extension_beyond_what_passes_by_itself_needs_approval(held: Allocation) -> None:
    """The default rules let 12 hours within the guarantee pass; many small steps are one large one."""
    path = f"/api/v1/allocations/{held.uid}/extend/"
    before = held.expires_at
    assert before is not None
    refused = call(held.holder, "POST", path, {"extra_s": 13 * 3600}, scope="request")
    assert (refused.status_code, refused.json()["code"]) == (403, "extension_needs_approval")
    held.refresh_from_db()
    assert held.expires_at == before
    assert call(held.holder, "POST", path, {"extra_s": 8 * 3600}, scope="request").status_code == 200
    again = call(held.holder, "POST", path, {"extra_s": 8 * 3600}, scope="request")
    assert (again.status_code, again.json()["code"]) == (403, "extension_needs_approval")
    held.refresh_from_db()
    assert held.expires_at == before + timedelta(hours=8)


def test_a_fleet_comes_in_as_a_file(chief: Any) -> None:
    def send(user: Any, text: str, **more: str) -> Any:
        file = io.BytesIO(text.encode())
        file.name = "nodes.csv"
        extra = bearer(token_of(user, "read", "admin"))
        return Client().post("/api/v1/nodes/import/", {"file": file, **more}, **extra)

    head = "node_id,cpu_milli,memory_mib,gpu,model\n"
    good = head + "n1,64000,262144,2,T4\nn2,64000,262144,8,A10\n"
    dry = send(chief, good, site="openb")
    assert (dry.status_code, dry.json()) == (
        200,
        {"dry_run": True, "nodes_new": 2, "nodes_known": 0, "gpus": 10, "models": {"T4": 2, "A10": 8}},
    )
    assert send(build.user("plain"), good, dry_run="false").status_code == 403
    wrong = send(chief, good + "n3,many,262144,2,T4\n", dry_run="false")
    assert (wrong.status_code, wrong.json()["code"]) == (400, "import_refused")
    assert [one["pointer"] for one in wrong.json()["errors"]] == ["row 4, cpu_milli"]
    assert not Node.objects.exists()
    assert send(chief, good, site="openb", dry_run="false").status_code == 200
    assert set(Node.objects.values_list("name", "cluster__site__code")) == {("n1", "openb"), ("n2", "openb")}
