"""API of series: what the pages can, with the same refusals, and refusals that change nothing."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest

from portal.kernel.clock import now
from quotas.models import AskRule, CapacityRequest, RequestDependency
from quotas.services.series import series_follow
from tests.quotas import build
from tests.quotas.api.test_api import api

pytestmark = pytest.mark.django_db


@pytest.fixture
def house():
    return build.House()


@pytest.fixture
def client(house):
    return api(house.lin, "read", "request")


def ask(client, house, **changes):
    made = client.post("/api/v1/requests/", house.ask(**changes))
    assert made.status_code == 201, made.data
    return made.data


def test_an_array_and_its_members(client, house):
    head = ask(client, house, array_count=3, array_at_once=2)
    assert (head["state"], head["series"], head["array_count"], head["array_at_once"]) == (
        "series",
        "array",
        3,
        2,
    )
    assert head["members"] == {
        "held": 1, "waiting": 2, "running": 0, "well": 0, "badly": 0, "withdrawn": 0,
    }  # fmt: skip
    found = client.get(f"/api/v1/requests/?head={head['uid']}").data["results"]
    assert [(m["member_index"], m["held"], m["head"]) for m in found] == [
        (2, "array", head["uid"]), (1, "", head["uid"]), (0, "", head["uid"]),
    ]  # fmt: skip
    assert [r["uid"] for r in client.get("/api/v1/requests/?series=array").data["results"]] == [head["uid"]]
    assert client.get("/api/v1/requests/?series=sometimes").status_code == 400
    done = client.post(f"/api/v1/requests/{head['uid']}/withdraw/", {"reason": "no", "stop_running": False})
    assert (done.status_code, done.data["state"]) == (200, "withdrawn")
    assert set(CapacityRequest.objects.filter(head__uid=head["uid"]).values_list("state", flat=True)) == {
        "withdrawn"
    }


def test_what_a_request_waits_for_is_changed_while_it_waits(client, house):
    first = ask(client, house)
    second = ask(client, house, after=[{"request": first["uid"], "when": "any"}])
    assert second["held"] == "dependency"
    assert [(a["ref"], a["when"], a["met_at"]) for a in second["after"]] == [(first["ref"], "any", None)]
    url = f"/api/v1/requests/{second['uid']}/after/"
    wrong = client.post(url, {"after": [second["ref"]]})
    assert (wrong.status_code, wrong.data["errors"][0]["pointer"]) == (400, "after")
    assert RequestDependency.objects.count() == 1
    stale = client.post(url, {"after": []}, headers={"If-Match": '"999"'})
    assert stale.status_code == 412
    done = client.post(url, {"after": []})
    assert (done.status_code, done.data["held"], done.data["after"]) == (200, "", [])


def test_occurrences_signal_and_renewal(client, house):
    today = now().date()
    week = {
        "days": list(range(7)), "from": "09:00", "to": "10:00", "zone": "UTC",
        "first": today.isoformat(), "until": (today + timedelta(days=20)).isoformat(),
    }  # fmt: skip
    body = house.ask(window=week)
    del body["duration_s"]
    head = client.post("/api/v1/requests/", body).data
    assert (head["series"], head["window"]["zone"], head["duration_s"]) == ("window", "UTC", 3600)
    url = f"/api/v1/requests/{head['uid']}/occurrence/"
    day = today + timedelta(days=3)
    start = datetime.fromisoformat(f"{day}T12:00:00+00:00")
    moved = client.post(
        url,
        {"day": str(day), "start_at": start.isoformat(), "end_at": (start + timedelta(hours=1)).isoformat()},
    )
    assert moved.status_code == 200, moved.data
    assert CapacityRequest.objects.get(head__uid=head["uid"], member_index=day.toordinal()).start_at == start
    nothing = client.post(url, {"day": str(day)})
    assert (nothing.status_code, nothing.data["errors"][0]["pointer"]) == (400, "start_at")
    assert client.post(url, {"day": str(day), "skip": True}).status_code == 200
    assert client.post(url, {"day": str(day), "skip": True}).status_code == 409

    review = (now() + timedelta(days=30)).isoformat()
    service = ask(
        client, house, is_service=True, review_at=review, duration_s=None, scale_by="signal", replicas_min=1,
        replicas_max=3, signal_per_replica=10,
    )  # fmt: skip
    signal = f"/api/v1/requests/{service['uid']}/signal/"
    early = client.post(signal, {"value": 25})
    assert (early.status_code, early.data["code"]) == (409, "wrong_state")
    CapacityRequest.objects.filter(uid=service["uid"]).update(
        state="series", queued_at=now(), decided_at=now()
    )
    series_follow(head_id=CapacityRequest.objects.get(uid=service["uid"]).pk)
    assert client.post(signal, {"value": "many"}).status_code == 400
    told = client.post(signal, {"value": 25})
    assert (told.status_code, told.data["replicas_wanted"], told.data["members"]["waiting"]) == (200, 3, 3)
    renew = f"/api/v1/requests/{service['uid']}/renew/"
    late = client.post(renew, {"review_at": (now() + timedelta(days=90)).isoformat()})
    assert (late.status_code, late.data["errors"][0]["pointer"]) == (400, "review_at")
    good = client.post(renew, {"review_at": (now() + timedelta(days=29)).isoformat()})
    assert good.status_code == 200, good.data
    other = api(house.chen, "read", "request").post(signal, {"value": 1})
    assert other.status_code == 403


def test_rules_on_priority(house):
    chief, lead = api(house.zhao, "read", "admin"), api(house.chen, "read", "admin")
    assert chief.post("/api/v1/ask-rules/", {"department": "vision", "priority_most": 60}).status_code == 200
    too_high = lead.post("/api/v1/ask-rules/", {"department": "video", "priority_most": 70})
    assert (too_high.status_code, too_high.data["errors"][0]["pointer"]) == (400, "priority_most")
    assert (
        lead.post("/api/v1/ask-rules/", {"department": "perception", "priority_most": 10}).status_code == 403
    )
    assert lead.post("/api/v1/ask-rules/", {"department": "video", "priority_most": 40}).status_code == 200
    assert dict(AskRule.objects.values_list("department__code", "priority_most")) == {
        "vision": 60,
        "video": 40,
    }
    assert chief.post("/api/v1/ask-rules/", {"department": "video", "priority_most": None}).status_code == 200
    assert [r["department"] for r in chief.get("/api/v1/ask-rules/").data["results"]] == ["vision"]
