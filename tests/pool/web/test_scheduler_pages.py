"""Pages and API of decisions and of the policy: who sees them, what they say, and that acts do what they say."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from django.test import Client

from pool.models import SchedulerCycle, SchedulingPolicy
from pool.services.cycle import planner_reset, schedule_cycle
from portal.kernel.clock import set_clock
from tests.pool import builders as pool
from tests.quotas import build

pytestmark = pytest.mark.django_db(transaction=True)
T = datetime(2026, 6, 16, 6, 0, tzinfo=UTC)


@pytest.fixture
def house():
    planner_reset()
    with set_clock(T):
        house = build.House(installed=None)
        pool.node(house.h800)
        pool.queued(house.video, house.h800, 4, house.lin)
        pool.queued(house.video, house.h800, 8, house.lin)
        planner_reset()  # everybody is judged
        schedule_cycle(cause="test")
        yield house
    planner_reset()


def signed_in(who) -> Client:
    who.language = "en"
    who.save()
    client = Client()
    client.force_login(who)
    return client


def test_a_decision_is_shown_with_its_steps_and_replayed(house, django_assert_max_num_queries):
    client = signed_in(house.zhao)
    cycle = SchedulerCycle.objects.get()
    with django_assert_max_num_queries(15):
        listed = client.get("/scheduler/decisions/").content.decode()
    assert f"#{cycle.pk}" in listed
    assert "everybody in line" in listed
    assert client.get("/scheduler/decisions/?kind=evicted").content.decode().count(f"#{cycle.pk}") == 0
    place = next(op for op in cycle.ops if op["op"] == "place")
    assert (
        f"#{cycle.pk}" in client.get(f"/scheduler/decisions/?request=R-{place['request']}").content.decode()
    )
    with django_assert_max_num_queries(15):
        page = client.get(f"/scheduler/decisions/{cycle.uid}/").content.decode()
    assert "4 × H800 80GB fit under every limit" in page
    assert "promised from" in page
    assert cycle.snapshot_hash[:16] in page
    assert len(page) < 60_000
    replayed = client.post(f"/scheduler/decisions/{cycle.uid}/replay/").content.decode()
    assert "Identical." in replayed
    for stranger in (house.lin, house.chen):
        assert signed_in(stranger).get("/scheduler/decisions/").status_code == 403
        assert signed_in(stranger).get(f"/scheduler/decisions/{cycle.uid}/").status_code == 403
    assert signed_in(house.he).get(f"/scheduler/decisions/{cycle.uid}/").status_code == 200


def test_the_policy_goes_from_form_to_force_on_pages(house, django_assert_max_num_queries):
    client = signed_in(house.zhao)
    form = client.get("/scheduler/policy/new/").content.decode()
    assert 'name="max_reservations"' in form
    values = {
        "name": "Careful", "note": "a test", "order": "guarantee", "queueing": "strict", "scarcity": "on",
        "reclaim": "on", "preempt": "on", "preference": "borrowing_over_preemption", "when_can_borrow": "next",
        "when_can_preempt": "next", "max_reservations": "7", "overdue_ms": "60", "windows_ahead_ms": "1209600",
        "min_run_preempt_ms": "0", "min_run_reclaim_ms": "1.5", "max_victims": "64", "max_preemptors": "32",
        "max_searches": "512", "keep_for_preemptor_ms": "900",
        "displace_margin_permille": "10", "evictions_back_off": "3", "back_off_ms": "3600",
        "estimate_slack_permille": "25", "estimate_min_slack_ms": "600", "nodes_told": "8",
        "class_weights_training": "2", "window_lead_ms": "600", "reclaim_patience_ms": "0",
    }  # fmt: skip
    wrong = client.post("/scheduler/policy/new/", {**values, "max_reservations": "many"})
    assert wrong.status_code == 400
    assert "A whole number." in wrong.content.decode()
    assert 'value="many"' in wrong.content.decode()
    assert SchedulingPolicy.objects.count() == 0
    made = client.post("/scheduler/policy/new/", values)
    draft = SchedulingPolicy.objects.get()
    assert made.headers["Location"] == f"/scheduler/policy/{draft.uid}/"
    assert draft.values == {
        "queueing": "strict", "max_reservations": 7, "min_run_reclaim_ms": 1500, "class_weights": {"training": 2},
    }  # fmt: skip
    client.post(f"/scheduler/policy/{draft.uid}/do/preview/")
    with django_assert_max_num_queries(15):
        page = client.get(f"/scheduler/policy/{draft.uid}/").content.decode()
    assert "under the policy of then" in page
    assert len(page) < 60_000
    client.post(f"/scheduler/policy/{draft.uid}/do/publish/", {"reason": ""})
    assert not SchedulingPolicy.objects.get().active
    client.post(f"/scheduler/policy/{draft.uid}/do/publish/", {"reason": "as agreed"})
    assert SchedulingPolicy.objects.get().active
    listed = client.get("/scheduler/policy/").content.decode()
    assert "In force" in listed
    auditor = signed_in(house.he)
    assert auditor.get("/scheduler/policy/").status_code == 200
    assert auditor.get("/scheduler/policy/new/").status_code == 403
    assert auditor.post(f"/scheduler/policy/{draft.uid}/do/publish/", {"reason": "x"}).status_code == 403


def test_api_of_decisions_and_policies(house):
    client = signed_in(house.zhao)
    cycle = SchedulerCycle.objects.get()
    listed = client.get("/api/v1/decisions/?kind=placed").json()["results"]
    assert [(one["number"], one["placed"], one["replayable"], one["whole"]) for one in listed] == [
        (cycle.pk, 1, True, True)
    ]
    assert client.get("/api/v1/decisions/?kind=magic").status_code == 400
    detail = client.get(f"/api/v1/decisions/{cycle.uid}/").json()
    assert [op["op"] for op in detail["ops"]] == ["place", "reserve"]
    assert client.post(f"/api/v1/decisions/{cycle.uid}/replay/").json()["identical"] is True
    send = {"content_type": "application/json"}
    wrong = client.post("/api/v1/policies/", {"name": "p", "values": {"sorcery": 1}}, **send)
    assert (wrong.status_code, wrong.json()["code"]) == (400, "policy_unknown_switch")
    made = client.post("/api/v1/policies/", {"name": "p", "values": {"max_reservations": 2}}, **send)
    assert (made.status_code, made.json()["state"]) == (201, "draft")
    url = f"/api/v1/policies/{made.json()['uid']}/"
    changed = client.patch(url, {"values": {"max_reservations": 3}}, **send, headers={"If-Match": '"1"'})
    assert changed.json()["values"] == {"max_reservations": 3}
    assert client.patch(url, {"values": {}}, **send, headers={"If-Match": '"1"'}).status_code == 412
    assert client.post(f"{url}publish/", {"reason": "go"}, **send).json()["state"] == "active"
    assert client.post("/api/v1/policies/roll-back/", {"reason": "no"}, **send).status_code == 409
    assert client.delete(url).status_code == 409
    assert signed_in(house.lin).get("/api/v1/policies/").status_code == 403
    assert (
        signed_in(house.he).post("/api/v1/policies/", {"name": "q", "values": {}}, **send).status_code == 403
    )
