"""What-ifs: the pool's own past and recorded workloads, asked on the page and over the API, shared, refused, kept."""

from __future__ import annotations

import json
import uuid
from datetime import date, timedelta
from typing import Any

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from monitoring.models import Scenario, UseDay
from monitoring.selectors.what_if import comparison, scenarios_for
from monitoring.services import what_if_run, what_if_sides
from monitoring.services.what_if import (
    scenario_ask,
    scenario_forget,
    scenario_play,
    scenario_share,
    scenarios_sweep,
)
from monitoring.services.what_if_run import PlayFailed
from pool.engine.past import play
from pool.engine.past_measures import measure
from pool.models import Allocation
from portal.accounts.policy import policy_of
from portal.kernel.clock import set_clock
from portal.kernel.errors import Conflict, Invalid, NotFound, Refused
from portal.notify.models import Notification
from portal.ops.actor import Actor
from portal.ops.models import AuditEvent
from quotas.models import CapacityRequest, QuotaGrant, UsageSpan
from quotas.services.prices import rate_set
from tests.pool.builders import node
from tests.quotas.money.build import World, at, person, world

pytestmark = pytest.mark.django_db
H = 3_600_000
NOW = at("2026-05-12T00:00")
DAYS = {"from": "2026-05-10", "to": "2026-05-11"}


def inside(pieces: Any, setting: Any, *, since: int, until: int, stop: Any, told: Any) -> Any:
    """The play without its process, for tests that are about something else."""
    done = play(pieces, setting, stop)
    return done, measure(pieces, setting, done, since, until)


REAL = {"test_a_recorded_workload_over_the_api", "test_what_a_dead_worker_left_is_taken_up_and_a_forgotten_one_ends",
        "test_a_play_that_breaks_says_so"}  # fmt: skip


@pytest.fixture(autouse=True)
def _inside(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.name not in REAL:
        monkeypatch.setattr(what_if_sides, "run_play", inside)


@pytest.fixture
def w() -> World:
    """Two cards, one guaranteed to Vision and one to Search; 10.00 a GPU-hour.

    Vision took both on 10 May: the first from 0:00 to 10:00, the second from 1:00 to 11:00. Search came at 4:00 and
    got one at 10:00 only, until 12:00.
    """
    made = world()
    made.price("10", at("2026-01-01T00:00"))
    node(made.flavour, gpus=2)
    always = (at("2026-01-01T00:00"), None)
    QuotaGrant.objects.create(department=made.root, flavour=made.flavour, guaranteed=2000, during=always)
    for department in (made.vision, made.search):
        QuotaGrant.objects.create(department=department, flavour=made.flavour, guaranteed=1000, during=always)
    asked(made, "2026-05-10T00:00", "2026-05-10T00:00", "2026-05-10T10:00")
    asked(made, "2026-05-10T01:00", "2026-05-10T01:00", "2026-05-10T11:00")
    asked(made, "2026-05-10T04:00", "2026-05-10T10:00", "2026-05-10T12:00", search=True)
    return made


def asked(w: World, queued: str, start: str, end: str, *, search: bool = False) -> CapacityRequest:
    """A request of one card that ran and is over."""
    request = w.request(w.search if search else w.vision)
    length = int((at(end) - at(start)).total_seconds())
    CapacityRequest.objects.filter(pk=request.pk).update(
        state="ended", state_since=at(end), queued_at=at(queued), duration_s=length, ended_at=at(end)
    )
    Allocation.objects.create(
        request=request,
        holder=w.user,
        department=request.department,
        flavour=w.flavour,
        charge_milli=1000,
        state="ended",
        end_reason="finished",
        reserved_at=at(start),
        started_at=at(start),
        ended_at=at(end),
    )
    return request


def saw_idle(w: World, request: CapacityRequest, held: int, idle: int) -> None:
    """What telemetry saw of a request's day."""
    start = at("2026-05-10T00:00")
    span = UsageSpan.objects.create(
        key=uuid.uuid4(), request=request, department=request.department, user=w.user, flavour=w.flavour,
        charge_milli=1000, started_at=start, ended_at=start, accrued_to=start,
    )  # fmt: skip
    UseDay.objects.create(
        local_day=date(2026, 5, 10), span=span, request_id_ref=request.pk, flavour=w.flavour,
        department_id_ref=request.department_id, allocated_ms=held, idle_ms=idle,
    )  # fmt: skip


def ask(who: Actor, **more: object) -> Scenario:
    with set_clock(NOW):
        return scenario_ask(acting_user=who, name="Later", params={**DAYS, **more})


def played(scenario: Scenario) -> Scenario:
    with set_clock(NOW):
        assert scenario_play(scenario_id=scenario.pk)
    scenario.refresh_from_db()
    assert scenario.state == "ready"
    return scenario


def test_the_past_by_hand(w: World) -> None:
    """Recorded: Search waits six hours. A: it gets its card at once, the newer of Vision's is taken back and resumes
    at 6:00, until 13:00. B, with a node more (four cards): nobody waits, nothing is taken back.
    """
    fin = person("fin", ("finance", None))
    for number, held in (
        (1, 10),
        (3, 2),
    ):  # the first of Vision's idles a quarter of its hours, Search's one half
        saw_idle(w, CapacityRequest.objects.order_by("id")[number - 1], held * H, held * H // (5 - number))
    changes = {"nodes": {w.flavour.code: 1}, "prices": {w.flavour.code: 20_000_000}}
    found = played(ask(Actor(user=fin), changes=changes)).result
    recorded, a, b = found["recorded"], found["a"], found["b"]
    assert [side["started"] for side in (recorded, a, b)] == [3, 3, 3]
    assert [side["longest"] for side in (recorded, a, b)] == [6 * H, 0, 0]
    code = w.flavour.code
    assert recorded["flavours"][code] == {
        "installed": 96 * H, "held": 22 * H, "idle_wanted": 0, "shortfall": 6 * H, "borrowed": 9 * H,
    }  # fmt: skip
    assert a["flavours"][code] == {
        "installed": 96 * H, "held": 22 * H, "idle_wanted": 0, "shortfall": 0, "borrowed": 7 * H,
    }  # fmt: skip
    assert a["taken"] == {"reclaim": 1} and a["lost"] == 3 * H and b["taken"] == {}
    assert b["flavours"][code]["installed"] == 192 * H and b["flavours"][code]["held"] == 22 * H
    assert (a["cost"], b["cost"]) == (220_000_000, 440_000_000)
    assert [side["idle"] for side in (recorded, a, b)] == [5 * H // 2 + H] * 3
    assert recorded["cost"] == 0  # nothing of it stands in the ledger here
    assert a["days"] == {"2026-05-10": 22 * H}
    rows = {row.key: row for row in comparison(found)}
    assert (rows["reclaimed"].values, rows["reclaimed"].difference, rows["reclaimed"].tone) == (
        (0, 1, 0), -1, "good",
    )  # fmt: skip
    assert Notification.objects.get(kind="report_ready").user == fin


def test_prices_alone_play_once_and_quotas_and_policy_reach_the_engine(w: World) -> None:
    fin = Actor(user=person("fin", ("finance", None)))
    prices = played(ask(fin, changes={"prices": {w.flavour.code: 0}})).result
    assert prices["b"]["cost"] == 0 and prices["a"]["decisions"] == prices["b"]["decisions"]
    keep = played(ask(fin, changes={"switches": {"reclaim": False}})).result
    assert keep["a"]["longest"] == 0 and keep["b"]["longest"] == 6 * H
    more = [{"department": "vision", "flavour": w.flavour.code, "guaranteed": 2000},
            {"department": "search", "flavour": w.flavour.code, "guaranteed": 0}]  # fmt: skip
    quotas = played(ask(fin, changes={"quotas": more})).result
    assert quotas["b"]["taken"] == {} and quotas["b"]["longest"] == 6 * H
    hard = played(ask(fin, changes={"borrowing": False})).result
    assert hard["b"]["flavours"][w.flavour.code]["idle_wanted"] == 7 * H


def test_the_running_part_and_a_later_start_are_in_it(w: World) -> None:
    """Work that still runs at the period's end is cut there; who waits then is still in line."""
    fin = Actor(user=person("fin", ("finance", None)))
    found = played(
        ask(fin, **{"from": "2026-05-10", "to": "2026-05-10", "changes": {"switches": {"reclaim": False}}})
    ).result
    assert found["a"]["flavours"][w.flavour.code]["installed"] == 48 * H
    assert found["a"]["waiting"] == 0
    only = played(ask(fin, flavour=w.flavour.code)).result
    assert only["a"]["asked"] == 3


JOBS = "job_id,submit_time,duration,gpu_num,vc\na,0,36000,2,x\nb,1.5,100,1,y\n"
QUOTAS = "vc,nominal_gpus\nx,1\ny,1\n"


def test_a_recorded_workload_over_the_api(w: World) -> None:
    client = Client()
    client.force_login(person("fin", ("finance", None)))
    body = {
        "name": "Philly", "source": "trace", "price": 10_000_000, "jobs": JOBS, "quotas": QUOTAS,
        "changes": {"nodes": {"gpu": 1}},
    }  # fmt: skip
    with set_clock(NOW):
        made = client.post("/api/v1/what-ifs/", json.dumps(body), content_type="application/json")
        assert made.status_code == 201, made.content
        assert made.json()["state"] == "queued" and "result" not in made.json()
        assert scenario_play(scenario_id=Scenario.objects.get().pk)
        found = client.get(f"/api/v1/what-ifs/{made.json()['uid']}/").json()
    a, b = found["result"]["a"], found["result"]["b"]
    assert "recorded" not in found["result"]
    assert a["taken"] == {"reclaim": 1} and b["taken"] == {}
    assert a["flavours"]["gpu"]["installed"] == 2 * 1501 and b["flavours"]["gpu"]["installed"] == 3 * 1501
    shared = client.patch(
        f"/api/v1/what-ifs/{found['uid']}/", json.dumps({"shared": True}), content_type="application/json"
    )
    assert shared.json()["shared"] is True
    listed = client.get("/api/v1/what-ifs/").json()
    assert [row["uid"] for row in listed["results"]] == [found["uid"]]
    assert client.delete(f"/api/v1/what-ifs/{found['uid']}/").status_code == 204
    assert client.get(f"/api/v1/what-ifs/{found['uid']}/").status_code == 404


def test_nonsense_is_refused_and_nothing_is_kept(w: World) -> None:
    fin = Actor(user=person("fin", ("finance", None)))
    for wrong in (
        {"from": "2026-05-11", "to": "2026-05-10"},
        {"from": "2026-01-01"},
        {"from": "2026-06-01", "to": "2026-06-02"},
        {"source": "dream"},
        {"surprise": 1},
        {"changes": {"surprise": 1}},
        {"changes": {"nodes": {"H999": 1}}},
        {"changes": {"nodes": {w.flavour.code: 1.5}}},
        {"changes": {"prices": {w.flavour.code: -1}}},
        {"changes": {"policy": "no"}},
        {"changes": {"switches": {"reclaim": "maybe"}}},
        {"changes": {"borrowing": "some"}},
        {"changes": {"quotas": [{"department": "none", "flavour": w.flavour.code}]}},
        {"changes": {"quotas": [{"department": "vision", "flavour": w.flavour.code, "guaranteed": None}]}},
        {"changes": {"quotas": [{"department": "vision", "flavour": w.flavour.code}] * 2}},
    ):
        with pytest.raises(Invalid):
            ask(fin, **wrong)
    for jobs, quotas in (
        (JOBS, None), (JOBS, "vc\nx\n"), (JOBS.replace("36000", "x"), QUOTAS), (JOBS, QUOTAS + "z,-1\n"),
        (JOBS.replace("b,", "a,"), QUOTAS), ("", QUOTAS),
    ):  # fmt: skip
        with pytest.raises(Invalid):
            scenario_ask(
                acting_user=fin, name="x", params={"source": "trace"}, jobs=jobs.encode(),
                quotas=quotas.encode() if quotas else None,
            )  # fmt: skip
    with pytest.raises(Invalid):
        scenario_ask(acting_user=fin, name="x", params={"source": "trace"}, jobs=b"\xff\xfe", quotas=b"x")
    with pytest.raises(Invalid), set_clock(NOW):
        scenario_ask(acting_user=fin, name=" ", params=DAYS)
    with pytest.raises(NotFound):
        ask(fin, flavour="H999")
    assert not Scenario.objects.exists() and not AuditEvent.objects.filter(action="what_if.asked").exists()


def test_who_may_ask_look_share_and_forget(w: World) -> None:
    fin, other = person("fin", ("finance", None)), person("other", ("finance", None))
    auditor, lead = person("aud", ("auditor", None)), person("lead", ("lead", w.vision))
    for person_ in (auditor, lead, w.user):
        with pytest.raises(Refused):
            ask(Actor(user=person_))
    scenario = ask(Actor(user=fin))
    assert list(scenarios_for(policy_of(other))) == []
    with pytest.raises(NotFound):
        scenario_share(acting_user=Actor(user=other), scenario=scenario, shared=True)
    scenario_share(acting_user=Actor(user=fin), scenario=scenario, shared=True)
    scenario_share(acting_user=Actor(user=fin), scenario=scenario, shared=True)
    assert AuditEvent.objects.filter(action="what_if.shared").count() == 1
    assert list(scenarios_for(policy_of(other))) == list(scenarios_for(policy_of(auditor))) == [scenario]
    assert list(scenarios_for(policy_of(lead))) == []
    with pytest.raises(NotFound):
        scenario_forget(acting_user=Actor(user=other), scenario=scenario)
    scenario_forget(acting_user=Actor(user=fin), scenario=scenario)
    scenario_forget(acting_user=Actor(user=fin), scenario=scenario)
    assert AuditEvent.objects.filter(action="what_if.forgotten").count() == 1
    assert list(scenarios_for(policy_of(fin))) == [] and not scenario_play(scenario_id=scenario.pk)
    client = Client()
    client.force_login(lead)
    assert client.get(reverse("monitoring:what-ifs")).status_code == 403
    assert client.get("/api/v1/what-ifs/").status_code == 403
    client.force_login(auditor)
    assert client.get(reverse("monitoring:what-ifs")).status_code == 200
    assert client.post(reverse("monitoring:what-ifs"), {}).status_code == 403


def test_three_open_questions_at_once(w: World) -> None:
    fin = Actor(user=person("fin", ("finance", None)))
    for _n in range(3):
        ask(fin)
    with pytest.raises(Conflict):
        ask(fin)
    assert Scenario.objects.count() == 3


def test_what_a_dead_worker_left_is_taken_up_and_a_forgotten_one_ends(
    w: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    fin = Actor(user=person("fin", ("finance", None)))
    scenario = ask(fin)
    Scenario.objects.filter(pk=scenario.pk).update(state="running", beat_at=NOW - timedelta(minutes=3))
    sent: list[int] = []
    monkeypatch.setattr("monitoring.services.what_if._send", sent.append)
    with set_clock(NOW + timedelta(minutes=1)):
        assert scenarios_sweep() == 1 and sent == [scenario.pk]
        assert scenarios_sweep() == 1  # asked for again until somebody takes it
        Scenario.objects.filter(pk=scenario.pk).update(result={"tries": 3})
        assert not scenario_play(scenario_id=scenario.pk)  # three workers died of it
        scenario.refresh_from_db()
        assert (scenario.state, scenario.error_code, scenario.result) == ("failed", "play_failed", {})
        Scenario.objects.filter(pk=scenario.pk).update(state="queued", error_code="")
    monkeypatch.setattr(what_if_run, "LOOK_S", 0.01)

    def gone(*_args: object, **_more: object) -> int:
        return 0

    monkeypatch.setattr("monitoring.services.what_if._beat", gone)
    with set_clock(NOW):
        assert not scenario_play(scenario_id=scenario.pk)
    scenario.refresh_from_db()
    assert (scenario.state, scenario.error_code, scenario.result) == ("failed", "forgotten", {})


def test_a_play_that_breaks_says_so(monkeypatch: pytest.MonkeyPatch, w: World) -> None:
    monkeypatch.setattr(what_if_run, "MODULE", "pool.engine.no_such_module")
    with pytest.raises(PlayFailed) as error:
        what_if_run.run_play([], None, since=0, until=1, stop=None, told=lambda _n: True)  # type: ignore[arg-type]
    assert error.value.code == "play_failed"
    scenario = ask(Actor(user=person("fin", ("finance", None))))
    with set_clock(NOW):
        assert not scenario_play(scenario_id=scenario.pk)
    scenario.refresh_from_db()
    assert (scenario.state, scenario.error_code) == ("failed", "play_failed")
    assert not Notification.objects.exists()


def test_the_pages_ask_and_answer(w: World, django_assert_max_num_queries: object) -> None:
    client = Client()
    client.force_login(person("fin", ("finance", None)))
    client.cookies["django_language"] = "en"
    address = reverse("monitoring:what-ifs")
    form = {
        "source": "pool", "past-name": "A node more", "past-since": "2026-05-10", "past-until": "2026-05-11",
        "past-node_flavour": w.flavour.code, "past-node_count": "1",
    }  # fmt: skip
    with set_clock(NOW):
        assert "Nothing asked yet" in client.get(address).content.decode()
        half = client.post(address, {**form, "past-node_count": ""})
        assert half.status_code == 400 and "This belongs to it." in half.content.decode()
        late = client.post(address, {**form, "past-until": "2026-12-31"})
        assert late.status_code == 400 and "A node more" in late.content.decode()
        assert not Scenario.objects.exists()
        sent = client.post(address, form)
        scenario = Scenario.objects.get()
        assert sent.status_code == 302 and sent["Location"] == reverse(
            "monitoring:what-if", args=[scenario.uid]
        )
        assert "Waiting" in client.get(sent["Location"]).content.decode()
    played(scenario)
    with set_clock(NOW), django_assert_max_num_queries(15):  # type: ignore[operator]
        page = client.get(sent["Location"]).content.decode()
    assert "owners take back 1 run fewer" in page and "Nodes with H800 80GB: +1" in page
    assert client.post(reverse("monitoring:what-if-act", args=[scenario.uid, "share"])).status_code == 302
    with set_clock(NOW):
        assert "shared" in client.get(address).content.decode()
    trace = client.post(
        address,
        {
            "source": "trace",
            "trace-name": "Files",
            "trace-jobs": SimpleUploadedFile("jobs.csv", JOBS.encode()),
            "trace-quotas": SimpleUploadedFile("quotas.csv", QUOTAS.encode()),
        },
    )
    assert trace.status_code == 302
    client.cookies["django_language"] = "zh-hans"
    page = client.get(trace["Location"]).content.decode()
    assert "Files" in page
    assert client.post(reverse("monitoring:what-if-act", args=[scenario.uid, "forget"])).status_code == 302
    assert client.get(sent["Location"]).status_code == 404


def test_prices_of_their_time_are_taken(w: World) -> None:
    with set_clock(at("2026-05-10T06:00")):
        rate_set(
            acting_user=Actor(user=person("boss", ("finance", None))), flavour=w.flavour,
            micro_per_gpu_hour=20_000_000, valid_from=at("2026-05-10T08:00"),
        )  # fmt: skip
    found = played(ask(Actor(user=person("fin", ("finance", None))))).result
    # both cards until 8:00 (1 from 0, 2 from 1 to 4, 3 from 4 to 6, 2 from 6): 15 h at 10; 2 + 5 h at 20
    assert found["a"]["cost"] == found["b"]["cost"] == 150_000_000 + 140_000_000
    assert date(2026, 5, 10).isoformat() in found["a"]["days"]


def test_pages_of_what_ifs_stay_within_the_budget(w: World) -> None:
    """A list of fifty and an answer of sixty departments: at most 15 queries and 60 kB, like every page."""
    fin = person("fin", ("finance", None))
    first = played(ask(Actor(user=fin), changes={"nodes": {w.flavour.code: 1}}))
    for side in ("a", "b"):
        group = first.result[side]["groups"][0]
        first.result[side]["groups"] = [group | {"department": f"Organisation / Unit {n}"} for n in range(60)]
    first.save()
    Scenario.objects.bulk_create(
        Scenario(name=f"Later {n}", owner=fin, params=first.params, state="ready", seconds=1)
        for n in range(60)
    )
    client = Client(headers={"accept-encoding": "identity"})
    client.force_login(fin)
    wide = []
    for address in (reverse("monitoring:what-ifs"), reverse("monitoring:what-if", args=[first.uid])):
        with set_clock(NOW):
            client.get(address)
            with CaptureQueriesContext(connection) as queries:
                page = client.get(address)
        assert page.status_code == 200
        if len(queries) > 15 or len(page.content) > 60_000:
            wide.append((address, len(queries), len(page.content)))
    assert wide == []
