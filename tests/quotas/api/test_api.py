"""The API keeps the rules of the pages: scopes, preconditions, one write a key, problem+json with the sum."""

from __future__ import annotations

import io
import uuid
from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from rest_framework.test import APIClient

from portal.accounts.models import ApiToken
from portal.accounts.services import token_create
from portal.kernel.clock import now
from portal.ops.models import AuditEvent
from quotas.models import CapacityRequest, Delegation, QuotaChange, QuotaGrant, QuotaUsage
from quotas.services.approvals import open_step_of
from quotas.services.usage import quota_debit
from tests.quotas import build

pytestmark = pytest.mark.django_db
BIG = {"gpus_per_node": 8, "duration_s": 48 * 3600}


@pytest.fixture
def house():
    return build.House()


def api(who, *scopes):
    """A client with a token of these scopes (a session without any)."""
    client = APIClient()
    if scopes:
        _token, value = token_create(acting_user=build.actor(who), user=who, name="t", scopes=list(scopes))
        client.credentials(HTTP_AUTHORIZATION=f"Bearer {value}")
    else:
        client.force_login(who, backend="django.contrib.auth.backends.ModelBackend")
    client.cookies["django_language"] = "en"
    return client


def test_ask_look_change_withdraw(house):
    client = api(house.lin, "read", "request")
    made = client.post("/api/v1/requests/", house.ask(**BIG))
    assert made.status_code == 201, made.data
    uid, tag = made.data["uid"], made.headers["ETag"]
    assert (made.data["state"], made.data["charge_milli"], made.data["cost_at_most_micro"]) == (
        "in_approval", 8000, 8 * 48 * 16_000_000,
    )  # fmt: skip
    assert [s["role"] for s in made.data["steps"]] == ["lead", "finance"]
    url = f"/api/v1/requests/{uid}/"
    assert client.get(url).headers["ETag"] == tag
    stale = client.patch(url, {"gpus_per_node": 2}, headers={"If-Match": '"999"'})
    assert (stale.status_code, stale.data["code"]) == (412, "version_changed")
    changed = client.patch(url, {"gpus_per_node": 2, "duration_s": 3600}, headers={"If-Match": tag})
    assert (changed.status_code, changed.data["state"], changed.data["gpus_per_node"]) == (200, "queued", 2)
    events = client.get(url + "events/").data["results"]
    assert [e["kind"] for e in events] == ["queued", "changed", "submitted"]
    assert client.post(url + "withdraw/", {"reason": "no"}).data["state"] == "withdrawn"
    again = client.post(url + "withdraw/")
    assert (again.status_code, again.data["code"]) == (409, "wrong_state")
    assert again.headers["Content-Type"] == "application/problem+json"


def test_draft_submit_clone_and_fit(house):
    client = api(house.lin)
    draft = client.post("/api/v1/requests/", {"draft": True, "gpus_per_node": 2})
    assert (draft.status_code, draft.data["state"]) == (201, "draft")
    url = f"/api/v1/requests/{draft.data['uid']}/"
    refused = client.post(url + "submit/")
    assert {e["pointer"] for e in refused.data["errors"]} == {"flavour", "duration_s", "purpose", "command"}
    ready = client.patch(url, house.ask(gpus_per_node=2))
    assert ready.status_code == 200, ready.data
    assert client.post(url + "submit/").data["state"] == "queued"
    copy = client.post(url + "clone/")
    assert (copy.status_code, copy.data["state"], copy.data["cloned_from"]) == (
        201,
        "draft",
        draft.data["uid"],
    )
    fit = client.post("/api/v1/requests/fit/", house.ask(**BIG)).data
    assert fit["outcome"] == "steps"
    assert fit["options"][0]["charge_milli"] == 8000
    assert CapacityRequest.objects.count() == 2


@pytest.mark.parametrize(
    ("changes", "pointer"),
    [
        ({"gpus_per_node": 0}, "gpus_per_node"),
        ({"gpus_per_node": -1}, "gpus_per_node"),
        ({"gpus_per_node": 10**30}, "gpus_per_node"),
        ({"gpus_per_node": 1.5}, "gpus_per_node"),
        ({"gpus_per_node": "eight"}, "gpus_per_node"),
        ({"department": "nowhere"}, "department"),
        ({"environment": ["A"]}, "environment"),
        ({"requirement": "much", "flavour": ""}, "requirement"),
        ({"purpose": {"a": 1}}, "purpose"),
    ],
)
def test_bad_input_is_a_problem_with_its_field_and_nothing_is_written(house, changes, pointer):
    response = api(house.lin, "request").post("/api/v1/requests/", house.ask(**changes))
    assert response.status_code == 400
    assert response.headers["Content-Type"] == "application/problem+json"
    assert pointer in [e["pointer"] for e in response.data["errors"]]
    assert response.data["request_id"]
    assert not CapacityRequest.objects.exists()


@pytest.mark.parametrize("sent", ["[1]", '"x"', "{", "null"])
def test_what_is_no_object_is_400(house, sent):
    response = api(house.lin, "request").post("/api/v1/requests/", sent, content_type="application/json")
    assert response.status_code == 400


def test_a_refusal_carries_the_sum(house):
    quota_debit(
        department_id=house.video.pk, flavour_id=house.h800.pk, charge_milli=22_000, interruptible=True
    )
    response = api(house.lin, "request").post("/api/v1/requests/", house.ask(gpus_per_node=8, nodes=2))
    assert response.status_code == 409
    assert response.data["code"] == "over_cap"
    assert response.data["blocking"] == {
        "level": "Video",
        "limit": 32_000,
        "used": 22_000,
        "requested": 16_000,
    }


def test_one_key_one_request(house):
    client = api(house.lin, "request")
    key = {"Idempotency-Key": str(uuid.uuid4())}
    first = client.post("/api/v1/requests/", house.ask(**BIG), headers=key)
    again = client.post("/api/v1/requests/", house.ask(**BIG), headers=key)
    assert (first.status_code, again.status_code) == (201, 201)
    assert first.json()["steps"][0]["due_at"] is not None
    assert first.json() == again.json()
    other = client.post("/api/v1/requests/", house.ask(gpus_per_node=2), headers=key)
    assert (other.status_code, other.data["code"]) == (409, "idempotency_key_reused")
    token = {**house.ask(), "client_token": "cli-1"}
    pair = {client.post("/api/v1/requests/", token).data["uid"] for _ in range(2)}
    assert len(pair) == 1
    assert CapacityRequest.objects.count() == 2


def test_token_scopes(house):
    made = house.submit(**BIG)
    step = open_step_of(made)
    decide = f"/api/v1/approvals/{step.uid}/decide/"
    for scopes in (("read",), ("read", "request")):
        assert api(house.chen, *scopes).post(decide, {"decision": "approve"}).status_code == 403
    assert api(house.lin, "read").post("/api/v1/requests/", house.ask()).status_code == 403
    assert api(house.zhao, "read", "request").post("/api/v1/quotas/", {}).status_code == 403
    assert APIClient().get("/api/v1/requests/").status_code in (401, 403)
    client = api(house.chen, "read", "approve")
    ApiToken.objects.update(revoked_at="2020-01-01T00:00:00Z")
    assert client.post(decide, {"decision": "approve"}).status_code == 401
    step.refresh_from_db()
    assert step.state == "open"


@pytest.mark.parametrize("decision", ["approve", "change", "return", "reject"])
def test_P036_self_approval_by_token_is_403_and_nothing_changes(house, decision):
    build.role(house.lin, "pool_admin")
    build.role(house.lin, "lead")
    made = house.submit(**BIG)
    step = open_step_of(made)
    before = AuditEvent.objects.count()
    for client in (api(house.lin), api(house.lin, "read", "request", "approve", "admin")):
        response = client.post(
            f"/api/v1/approvals/{step.uid}/decide/",
            {"decision": decision, "comment": "x", "changed": {"gpus_per_node": 1}},
        )
        assert (response.status_code, response.data["code"]) == (403, "self_approval")
    bulk = client.post("/api/v1/approvals/bulk/", {"steps": [str(step.uid)]})
    assert bulk.status_code in (200, 400)
    assert not any(r["ok"] for r in bulk.data.get("results", []))
    step.refresh_from_db()
    made.refresh_from_db()
    assert (step.state, made.state) == ("open", "in_approval")
    assert AuditEvent.objects.count() == before + 1  # the token itself


def test_decide_by_api_and_the_second_is_409(house):
    made = house.submit(gpus_per_node=8, duration_s=24 * 3600)
    step = open_step_of(made)
    url = f"/api/v1/approvals/{step.uid}/"
    client = api(house.chen, "read", "approve")
    assert [s["uid"] for s in client.get("/api/v1/approvals/").data["results"]] == [str(step.uid)]
    assert client.get(url + "decide/").status_code == 405
    bad = client.post(url + "decide/", {"decision": "reject"})
    assert (bad.status_code, bad.data["errors"][0]["pointer"]) == (400, "comment")
    assert client.post(url + "decide/", {"decision": "maybe"}).status_code == 400
    stale = client.post(url + "decide/", {"decision": "approve"}, headers={"If-Match": '"77"'})
    assert stale.status_code == 412
    done = client.post(
        url + "decide/", {"decision": "approve"}, headers={"If-Match": client.get(url).headers["ETag"]}
    )
    assert (done.status_code, done.data["state"], done.data["decided_by"]) == (200, "approved", "chen")
    second = api(house.wu, "read", "approve").post(url + "decide/", {"decision": "reject", "comment": "x"})
    assert (second.status_code, second.data["code"], second.data["decided_by"]) == (
        409,
        "already_decided",
        "Chen Hao",
    )
    made.refresh_from_db()
    assert made.state == "queued"


def test_consent_by_api(house):
    made = house.submit(**BIG)
    step = open_step_of(made)
    api(house.chen, "approve").post(
        f"/api/v1/approvals/{step.uid}/decide/",
        {"decision": "change", "comment": "less", "changed": {"gpus_per_node": 4}},
    )
    url = f"/api/v1/requests/{made.uid}/consent/"
    assert api(house.lin, "request").post(url, {"agree": "perhaps"}).status_code == 400
    assert api(house.chen, "request").post(url, {"agree": True}).status_code == 403
    done = api(house.lin, "request").post(url, {"agree": True})
    assert (done.data["state"], done.data["gpus_per_node"]) == ("queued", 4)


def test_P020_P021_strangers_see_404_and_leads_their_subtree(house):
    made = house.submit(**BIG)
    step = open_step_of(made)
    client = api(house.stranger, "read", "request", "approve", "admin")
    for url in (f"/api/v1/requests/{made.uid}/", f"/api/v1/approvals/{step.uid}/"):
        assert client.get(url).status_code == 404
    assert client.post(f"/api/v1/requests/{made.uid}/withdraw/", {"reason": "mine"}).status_code == 404
    assert client.post(f"/api/v1/approvals/{step.uid}/decide/", {"decision": "approve"}).status_code == 404
    assert client.get("/api/v1/requests/").data["count"] == 0
    assert {r["department"] for r in client.get("/api/v1/quotas/").data["results"]} == {"other"}
    assert api(house.chen, "read").get("/api/v1/requests/").data["count"] == 1
    assert api(house.he, "read").get("/api/v1/requests/").data["count"] == 1
    assert (
        api(house.he, "read", "approve")
        .post(f"/api/v1/approvals/{step.uid}/decide/", {"decision": "approve"})
        .status_code
        == 403
    )


def test_filters_are_strict(house):
    house.submit(**BIG)
    client = api(house.lin, "read")
    assert client.get("/api/v1/requests/?colour=red").status_code == 400
    assert client.get("/api/v1/requests/?state=lost").status_code == 400
    assert (
        client.get("/api/v1/requests/?state=in_approval&department=vision&flavour=h800&requester=me").data[
            "count"
        ]
        == 1
    )
    ref = CapacityRequest.objects.get().ref
    assert client.get(f"/api/v1/requests/?ref={ref}").data["count"] == 1
    assert client.get("/api/v1/requests/?ref=x").data["count"] == 0


def test_P011_quotas_null_is_unlimited_and_set_by_api(house):
    rows = api(house.zhao, "read").get("/api/v1/quotas/?flavour=h800").data["results"]
    by_code = {r["department"]: r for r in rows}
    assert (by_code["video"]["guaranteed_milli"], by_code["video"]["borrow_limit_milli"]) == (24_000, None)
    client = api(house.zhao, "admin")
    sent = {
        "department": "video",
        "flavour": "h800",
        "guaranteed_milli": 20_000,
        "hard_cap_milli": 0,
        "reason": "x",
    }
    assert client.post("/api/v1/quotas/", sent).status_code == 400
    done = client.post("/api/v1/quotas/", {**sent, "hard_cap_milli": None, "borrow_limit_milli": 0})
    assert done.status_code == 201, done.data
    assert (done.data["hard_cap_milli"], done.data["borrow_limit_milli"]) == (None, 0)
    assert QuotaGrant.objects.get().borrow_limit == 0
    assert api(house.chen, "admin").post("/api/v1/quotas/", sent).status_code == 403
    refused = client.post("/api/v1/quotas/", {**sent, "guaranteed_milli": 500_000, "hard_cap_milli": None})
    assert (refused.status_code, refused.data["code"]) == (409, "quota_sum")


def test_quota_changes_delegations_policy_flavours(house):
    client = api(house.chen, "read", "request", "approve")
    sent = {"department": "video", "flavour": "h800", "guaranteed_milli": 32_000, "purpose": "July"}
    made = client.post("/api/v1/quota-changes/", sent)
    assert made.status_code == 201, made.data
    assert client.get("/api/v1/quota-changes/").data["count"] == 1
    assert client.post(f"/api/v1/quota-changes/{made.data['uid']}/withdraw/").data["state"] == "withdrawn"
    assert client.post("/api/v1/quota-changes/", {**sent, "purpose": ""}).status_code == 400
    lend = {
        "department": "video",
        "flavour": "h800",
        "lender": "perception",
        "amount_milli": 4000,
        "purpose": "x",
    }
    assert client.post("/api/v1/quota-changes/", lend).data["errors"][0]["pointer"] == "ends_at"
    assert QuotaChange.objects.count() == 1
    until = (now() + timedelta(days=30)).isoformat()
    given = client.post("/api/v1/delegations/", {"deputy": "wu", "ends_at": until})
    assert given.status_code == 201, given.data
    assert client.post(f"/api/v1/delegations/{given.data['uid']}/revoke/").status_code == 200
    assert Delegation.objects.get().revoked_at is not None
    policy = client.get("/api/v1/approval-policy/")
    assert policy.data["rules"][0]["code"] == "over-cap"
    assert client.post("/api/v1/approval-policy/", {"rules": []}).status_code == 403
    flavours = client.get("/api/v1/flavours/").data["results"]
    assert (flavours[0]["code"], flavours[0]["installed_milli"], flavours[0]["micro_per_gpu_hour"]) == (
        "h800", 192_000, 16_000_000,
    )  # fmt: skip


def test_lists_of_50_take_few_queries(house, django_assert_max_num_queries):
    for _ in range(60):
        house.submit(gpus_per_node=1, duration_s=24 * 3600)
    for who, url in (
        (house.lin, "/api/v1/requests/"),
        (house.chen, "/api/v1/approvals/"),
        (house.zhao, "/api/v1/quotas/"),
    ):
        client = api(who)
        with django_assert_max_num_queries(15):
            assert len(client.get(url).data["results"]) > 3


def test_limits_of_people(house):
    client = api(house.zhao, "read", "admin")
    done = client.post("/api/v1/user-limits/", {"user": "lin", "gpus_at_once_milli": 2000})
    assert (done.status_code, done.data["gpus_at_once_milli"], done.data["longest_lease_s"]) == (
        200,
        2000,
        None,
    )
    assert client.post("/api/v1/user-limits/", {"user": None, "longest_lease_s": 7200}).data["user"] is None
    assert client.get("/api/v1/user-limits/").data["count"] == 2
    for bad in (
        {"user": "nobody"},
        {"user": "lin", "gpus_at_once_milli": -1},
        {"user": "lin", "gpus_at_once_milli": "x"},
    ):
        assert client.post("/api/v1/user-limits/", bad).status_code == 400
    assert api(house.lin, "read", "admin").get("/api/v1/user-limits/").status_code == 403
    refused = api(house.lin, "request").post("/api/v1/requests/", house.ask(gpus_per_node=3))
    assert refused.data["errors"][0]["detail"] == "Your limit is 2 GPUs at once."


def test_a_number_left_out_of_a_quota_stays_as_it_is() -> None:
    """Only a sent null means unlimited."""
    from portal.accounts.api.auth import token_hash

    chief = build.user("chief-of-numbers")
    build.role(chief, "pool_admin", None)
    ApiToken.objects.create(
        user=chief, name="t", prefix="gpp", hash=token_hash("gpp_numbers"), scopes=["read", "admin"]
    )
    team, card = build.department("numbers"), build.flavour("numbers-card")

    def put(**values: Any) -> Any:
        return Client().post(
            "/api/v1/quotas/",
            {"department": team.code, "flavour": card.code, "reason": "test", **values},
            content_type="application/json",
            HTTP_AUTHORIZATION="Bearer gpp_numbers",
        )

    first = put(guaranteed_milli=4000, borrow_limit_milli=8000, hard_cap_milli=12000, weight=3)
    assert first.status_code == 201, first.content
    assert put(guaranteed_milli=2000).status_code == 201
    row = QuotaUsage.objects.get(department=team, flavour=card)
    assert (row.guaranteed, row.borrow_limit, row.hard_cap, row.weight) == (2000, 8000, 12000, 3)
    assert put(guaranteed_milli=2000, borrow_limit_milli=None).status_code == 201
    row.refresh_from_db()
    assert (row.borrow_limit, row.hard_cap) == (None, 12000)


def test_quotas_come_in_as_a_file(house):
    def send(who, text, **more):
        file = io.BytesIO(text.encode())
        file.name = "quotas.csv"
        return api(who, "admin").post("/api/v1/quotas/import/", {"file": file, **more}, format="multipart")

    before = set(QuotaGrant.objects.values_list("department__code", "guaranteed"))
    good = f"department,flavour,guaranteed,borrow_limit\n{house.video.code},{house.h800.code},4,2\n"
    dry = send(house.zhao, good)
    assert dry.status_code == 200, dry.data
    assert (dry.data["dry_run"], dry.data["count"]) == (True, 1)
    assert dry.data["results"][0]["after"] == {
        "guaranteed_milli": 4000, "borrow_limit_milli": 2000, "lend_limit_milli": None, "hard_cap_milli": None,
        "weight": 1,
    }  # fmt: skip
    assert send(house.lin, good, dry_run="false").status_code == 403
    wrong = send(house.zhao, good + "nowhere,h800,1,\n", dry_run="false")
    assert (wrong.status_code, wrong.data["code"]) == (400, "table_invalid")
    assert set(QuotaGrant.objects.values_list("department__code", "guaranteed")) == before
    assert send(house.zhao, good, dry_run="false").data["results"][0]["changes"] is True
    usage = QuotaUsage.objects.get(department=house.video, flavour=house.h800)
    assert (usage.guaranteed, usage.borrow_limit) == (4000, 2000)
