"""Pages of series hold their budget of queries, take their acts, and show what was asked."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from portal.kernel.clock import now
from quotas.models import AskRule, CapacityRequest
from quotas.services.lifecycle import request_allocated, request_ended
from quotas.services.series import series_follow
from tests.quotas import build

pytestmark = pytest.mark.django_db
BUDGET = 15


@pytest.fixture
def house():
    return build.House()


def client(who, language="en"):
    made = Client()
    made.force_login(who, backend="django.contrib.auth.backends.ModelBackend")
    made.cookies["django_language"] = language
    return made


def page(who, path, language="en"):
    reader = client(who, language)
    reader.get(path)  # what is kept for some seconds is read once
    with CaptureQueriesContext(connection) as queries:
        found = reader.get(path)
    assert found.status_code == 200
    assert len(found.content) < 60_000
    return found.content.decode(), len(queries)


def window(house):
    today = now().date()
    week = {
        "days": list(range(7)), "from": "09:00", "to": "10:00", "zone": "Asia/Shanghai",
        "first": today.isoformat(), "until": (today + timedelta(days=60)).isoformat(),
    }  # fmt: skip
    return house.submit(window=week, duration_s="")


def service(house):
    office = [[3 if 9 <= hour < 18 else 1 for hour in range(24)]] * 5 + [[1] * 24] * 2
    made = house.submit(
        is_service=True, duration_s="", review_at=(now() + timedelta(days=60)).isoformat(), scale_by="timetable",
        timetable={"zone": "Asia/Shanghai", "days": office},
    )  # fmt: skip
    CapacityRequest.objects.filter(pk=made.pk).update(state="series", decided_at=now(), queued_at=now())
    series_follow(head_id=made.pk)
    return made


@pytest.mark.parametrize("language", ["en", "zh-hans"])
def test_every_kind_of_series_has_a_page_within_budget(house, language):
    array = house.submit(array_count=60, array_at_once=3)
    waiting = house.submit(after=[array.ref])
    for row in (array, window(house), service(house), waiting, array.members.first()):
        text, queries = page(house.lin, f"/requests/{row.uid}/", language)
        assert queries <= BUDGET, (row.series or "single", queries)
        assert row.ref in text
    text, queries = page(house.lin, "/requests/", language)
    assert queries <= BUDGET
    assert array.ref in text and array.members.first().ref not in text


def test_a_page_says_what_it_waits_for_and_lets_go_of_it(house):
    first = house.submit()
    second = house.submit(after=[first.ref], after_failed="wait")
    text, _queries = page(house.lin, f"/requests/{second.uid}/")
    assert "It waits for other requests to end." in text and first.ref in text
    request_allocated(request_id=first.pk)
    request_ended(request_id=first.pk, reason="failed")
    answer = client(house.chen).post(f"/requests/{second.uid}/do/unhold/")
    assert answer.status_code in (302, 403)
    assert CapacityRequest.objects.get(pk=second.pk).held == "dependency"
    client(house.lin).post(f"/requests/{second.uid}/do/unhold/")
    assert CapacityRequest.objects.get(pk=second.pk).held == ""


def test_windows_are_left_out_and_moved_on_the_page(house):
    head = window(house)
    member = head.members.order_by("member_index")[3]
    text, _queries = page(house.lin, f"/requests/{head.uid}/")
    day = member.start_at.date()
    assert f'name="day" value="{day}"' in text
    start = member.start_at + timedelta(hours=3)
    form = {
        "day": str(day),
        "start_at": (start + timedelta(hours=8)).strftime("%Y-%m-%dT%H:%M"),  # Shanghai's clock
        "end_at": (start + timedelta(hours=9)).strftime("%Y-%m-%dT%H:%M"),
    }
    client(house.lin).post(f"/requests/{head.uid}/do/move/", form)
    member.refresh_from_db()
    assert member.start_at == start
    client(house.lin).post(f"/requests/{head.uid}/do/skip/", {"day": str(day)})
    member.refresh_from_db()
    assert (member.state, member.end_reason) == ("withdrawn", "skipped")
    client(house.lin).post(f"/requests/{head.uid}/do/skip/", {"day": "tomorrow"})
    assert head.members.filter(end_reason="skipped").count() == 1


def test_a_clone_of_a_series_shows_all_its_wishes_again(house):
    for row in (house.submit(array_count=4, array_at_once=2, priority=30), window(house), service(house)):
        answer = client(house.lin).get(f"/requests/new/?from={row.uid}")
        form = answer.context["form"]
        values = {name: form[name].value() for name in form.fields}
        if row.series == "array":
            assert (values["array_count"], values["array_at_once"], values["priority"]) == (4, 2, 30)
            assert answer.context["opened"]["order"]
        elif row.series == "window":
            assert (values["start"], values["week_from"], values["week_zone"]) == (
                "weekly",
                "09:00",
                "Asia/Shanghai",
            )
        else:
            assert (values["scale_by"], values["replicas"]) == ("timetable", 3)
            assert "3,3,3" in values["timetable"]


def test_the_highest_priority_of_a_department_is_set_on_the_policy_page(house):
    lead = client(house.chen)
    lead.post("/policy/priority/", {"department": str(house.video.uid), "priority_most": "40"})
    assert AskRule.objects.get().priority_most == 40
    assert "Highest priority" in lead.get("/policy/").content.decode()
    for wrong in ("101", "-1", "much"):
        lead.post("/policy/priority/", {"department": str(house.video.uid), "priority_most": wrong})
    assert AskRule.objects.get().priority_most == 40
    answer = client(house.lin).post(
        "/policy/priority/", {"department": str(house.video.uid), "priority_most": "1"}
    )
    assert answer.status_code == 403
    lead.post("/policy/priority/", {"department": str(house.video.uid), "priority_most": ""})
    assert AskRule.objects.count() == 0
