"""Pages and API of taking back and maintenance: who sees what, acts by POST and by the right people, in both
languages, within the budget of queries and bytes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from pool.models import (
    DepartmentMode,
    IdleWatch,
    MaintenanceWindow,
    ReclaimAdvice,
    ReclaimCase,
    ReclaimConsent,
)
from pool.services.idle import IdleFinding, idle_findings_take
from pool.services.ladder import case_begin
from pool.services.modes import advice_note
from pool.services.reclaim_rules import rules_active
from portal.kernel.clock import now
from portal.ops.actor import SYSTEM
from quotas.services.usage import usage_recompute
from tests.pool import builders as pool
from tests.pool.reclaim import running
from tests.quotas import build

pytestmark = pytest.mark.django_db(transaction=True)


def browser(user: Any) -> Client:
    client = Client(headers={"accept-language": "en"})
    client.force_login(user, backend="django.contrib.auth.backends.ModelBackend")
    return client


class Scene:
    """A department over its cap with three leases: one under notice, one idle, one advised; an administrator."""

    def __init__(self) -> None:
        self.team = build.department("vg", name="Video")
        self.h800 = build.flavour("h800", installed=None)
        self.node = pool.node(self.h800, name="sh-01")
        build.limits(self.team, self.h800, 0)
        self.lin = build.user("lin", self.team, language="en")
        build.role(self.lin, "researcher", self.team)
        self.zhao = build.user("zhao", language="en")
        build.role(self.zhao, "pool_admin")
        self.noticed, self.idle, self.advised = (
            running(self.team, self.h800, 2, who=self.lin, duration_s=86_400) for _ in range(3)
        )
        case_begin(
            acting_user=SYSTEM, allocation_id=self.noticed.pk, cause="maintenance", rule="node_drain", grace_s=3600,
            reason="new power supply",
        )  # fmt: skip
        idle_findings_take(findings=[IdleFinding(self.idle.pk, "idle", now() - timedelta(hours=5))])
        IdleWatch.objects.filter(pk=self.idle.pk).update(
            idle_since=now() - timedelta(hours=5), warned_at=now()
        )
        advice_note(
            allocation_id=self.advised.pk,
            cause="preempted",
            rule="owner_below_guarantee",
            mode="pilot",
            figures={},
        )
        build.limits(self.team, self.h800, 0, hard_cap=1)
        usage_recompute(flavour_id=self.h800.pk)


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_every_page_reads_in_both_languages_within_its_budget(scene: Scene) -> None:
    admin = browser(scene.zhao)
    start = now() + timedelta(days=1)
    admin.post(
        "/maintenance/new/",
        {"title": "New supply", "reason": "rack 4", "nodes": [str(scene.node.uid)], "notice_h": "2",
         "starts_at": f"{start:%Y-%m-%dT%H:%M}", "ends_at": f"{start + timedelta(hours=2):%Y-%m-%dT%H:%M}"},
    )  # fmt: skip
    window = MaintenanceWindow.objects.get()
    expected = {
        "/reclaim/": "its node is drained",
        "/reclaim/modes/": "The installation",
        f"/reclaim/modes/?department={scene.team.uid}": "Mode of Video",
        "/reclaim/advice/": "an owner below its guarantee asks for it",
        "/reclaim/surplus/": "over by 5",
        "/reclaim/rules/": "The defaults are in force",
        "/maintenance/": "New supply",
        "/maintenance/new/": "Whole site",
        f"/maintenance/{window.uid}/": "Will be told",
        f"/leases/{scene.noticed.uid}/": "Being taken back",
        f"/nodes/{scene.node.uid}/": "Only work that ends before it is placed here.",
        "/operations/": "Taking back",
    }
    for address, words in expected.items():
        with CaptureQueriesContext(connection) as queries:
            answer = admin.get(address)
        assert answer.status_code == 200, address
        assert words in answer.content.decode(), address
        assert len(queries) <= 15, (address, len(queries))
        assert len(answer.content) < 60_000, (address, len(answer.content))
    scene.zhao.language = "zh-hans"
    scene.zhao.save()
    admin = browser(scene.zhao)
    for address in expected:
        text = admin.get(address).content.decode()
        assert "回收" in text or "维护" in text, address


def test_only_administrators_and_auditors_see_them_and_only_administrators_act(scene: Scene) -> None:
    auditor = build.user("he", language="en")
    build.role(auditor, "auditor")
    mine = browser(scene.lin)
    for address in (
        "/reclaim/",
        "/reclaim/modes/",
        "/reclaim/advice/",
        "/reclaim/surplus/",
        "/reclaim/rules/",
    ):
        assert mine.get(address).status_code == 403, address
        assert browser(auditor).get(address).status_code == 200, address
    acts = [
        ("/reclaim/modes/?department=all", {"mode": "pilot", "reason": "r"}),
        ("/reclaim/rules/", {"idle_window_s": "900", "reason": "r"}),
        (
            "/reclaim/surplus/",
            {"department": str(scene.team.uid), "flavour": "h800", "hours": "1", "reason": "r"},
        ),
        ("/maintenance/new/", {"title": "t", "reason": "r"}),
    ]
    for who in (scene.lin, auditor):
        for address, body in acts:
            assert browser(who).post(address, body).status_code == 403, address
    assert (
        DepartmentMode.objects.count(),
        MaintenanceWindow.objects.count(),
        ReclaimCase.objects.count(),
    ) == (0, 0, 1)
    assert rules_active()[0] is None


def test_an_administrator_sets_modes_rules_and_takes_a_surplus_back(scene: Scene) -> None:
    admin = browser(scene.zhao)
    assert (
        admin.post(
            f"/reclaim/modes/?department={scene.team.uid}", {"mode": "pilot", "reason": ""}
        ).status_code
        == 400
    )
    assert DepartmentMode.objects.count() == 0
    answer = admin.post(
        f"/reclaim/modes/?department={scene.team.uid}", {"mode": "pilot", "reason": "first weeks"}
    )
    assert (answer.status_code, DepartmentMode.objects.get().mode) == (302, "pilot")
    answer = admin.post(
        f"/reclaim/modes/?department={scene.team.uid}",
        {"mode": "", "min_run_preempt_s": "", "min_run_reclaim_s": "1.5", "reason": "long warm-up"},
    )
    row = DepartmentMode.objects.get()
    assert (answer.status_code, row.mode, row.min_run_preempt_s, row.min_run_reclaim_s) == (
        302,
        "",
        None,
        5400,
    )
    page = admin.get(f"/reclaim/modes/?department={scene.team.uid}").content.decode()
    assert 'value="1.5"' in page and "1\xa0h\xa030\xa0min from owners" in page
    bad = admin.post(
        f"/reclaim/modes/?department={scene.team.uid}", {"min_run_reclaim_s": "soon", "reason": "r"}
    )
    assert bad.status_code == 400
    form = admin.get("/reclaim/rules/").context["form"]
    values = {name: str(form.initial[name]) for name in form.fields if name in form.initial}
    values.pop("idle_everybody")
    bad = admin.post("/reclaim/rules/", {**values, "idle_window_s": "5", "reason": "sooner", "seen": "0"})
    assert (bad.status_code, "between 300 and" in bad.content.decode()) == (400, True)
    assert 'value="5"' in bad.content.decode()
    good = admin.post("/reclaim/rules/", {**values, "idle_window_s": "900", "reason": "sooner", "seen": "0"})
    assert (good.status_code, rules_active()[1].idle_window_s, rules_active()[1].idle_everybody) == (
        302,
        900,
        False,
    )
    body = {"department": str(scene.team.uid), "flavour": "h800", "hours": "2", "reason": "quota cut"}
    assert admin.post("/reclaim/surplus/", body).status_code == 302
    assert set(ReclaimCase.objects.filter(cause="over_quota").values_list("text", flat=True)) == {"quota cut"}


def test_a_window_is_planned_with_its_mistakes_named_and_called_off(scene: Scene) -> None:
    admin = browser(scene.zhao)
    bad = admin.post(
        "/maintenance/new/", {"title": "Supply", "starts_at": "x", "ends_at": "", "notice_h": "soon"}
    )
    text = bad.content.decode()
    assert (bad.status_code, MaintenanceWindow.objects.count()) == (400, 0)
    assert 'value="Supply"' in text and "Name nodes, or a site." in text and "30 days" in text
    start = (now() + timedelta(hours=1)).astimezone(
        ZoneInfo("Asia/Shanghai")
    )  # as the reader's clock shows it
    good = admin.post(
        "/maintenance/new/",
        {"title": "Supply", "reason": "rack 4", "site": scene.node.cluster.site.code, "notice_h": "24",
         "starts_at": f"{start:%Y-%m-%dT%H:%M}", "ends_at": f"{start + timedelta(hours=20):%Y-%m-%dT%H:%M}"},
    )  # fmt: skip
    window = MaintenanceWindow.objects.get()
    assert (good.status_code, good.headers["Location"]) == (302, f"/maintenance/{window.uid}/")
    assert browser(scene.lin).get(f"/maintenance/{window.uid}/").status_code == 200
    assert browser(scene.lin).post(f"/maintenance/{window.uid}/cancel/", {"reason": "mine"}).status_code in (
        302,
        403,
    )
    assert admin.get(f"/maintenance/{window.uid}/cancel/").status_code == 405
    window.refresh_from_db()
    assert window.state in ("planned", "announced")
    assert admin.post(f"/maintenance/{window.uid}/cancel/", {"reason": "not today"}).status_code == 302
    window.refresh_from_db()
    assert (window.state, window.end_reason) == ("cancelled", "not today")


def test_still_needed_is_one_click_for_its_holder(scene: Scene) -> None:
    mine = browser(scene.lin)
    page = mine.get(f"/leases/{scene.idle.uid}/").content.decode()
    assert "It counts as idle since" in page and "3 times left" in page
    address = f"/leases/{scene.idle.uid}/do/still-needed/"
    assert mine.get(address).status_code == 405
    assert mine.post(address).status_code == 302
    watch = IdleWatch.objects.get(pk=scene.idle.pk)
    assert (watch.excuses, watch.warned_at) == (1, None)
    browser(scene.zhao).post(address)
    assert IdleWatch.objects.get(pk=scene.idle.pk).excuses == 1
    assert mine.post(f"/leases/{scene.idle.uid}/do/consent/").status_code == 302
    assert ReclaimConsent.objects.filter(request=scene.idle.request).count() == 1
    assert mine.post(f"/leases/{scene.idle.uid}/do/no-consent/").status_code == 302
    assert ReclaimConsent.objects.count() == 0


def test_the_api_can_what_the_pages_can(scene: Scene) -> None:
    admin, mine = browser(scene.zhao), browser(scene.lin)
    post = {"content_type": "application/json"}
    found = mine.get("/api/v1/reclaim-cases/?state=open").json()
    assert [row["allocation_ref"] for row in found["results"]] == [scene.noticed.ref]
    stranger = build.user("wu", home=build.department("other"), language="en")
    assert browser(stranger).get("/api/v1/reclaim-cases/").json()["results"] == []
    assert browser(stranger).get("/api/v1/reclaim-advice/").json()["results"] == []
    assert admin.get("/api/v1/reclaim-advice/").json()["results"][0]["times"] == 1
    assert mine.get("/api/v1/reclaim-modes/").status_code == 403
    body = {"department": "vg", "mode": "rollout", "willing": True, "reason": "they agreed"}
    assert mine.post("/api/v1/reclaim-modes/", body, **post).status_code == 403
    assert admin.post("/api/v1/reclaim-modes/", body, **post).json() == {
        "department": "vg", "mode": "rollout", "willing": True, "own": True,
        "min_run_preempt_s": None, "min_run_reclaim_s": None,
    }  # fmt: skip
    assert {row["department"]: row["mode"] for row in admin.get("/api/v1/reclaim-modes/").json()}[
        "vg"
    ] == "rollout"
    answer = admin.post("/api/v1/reclaim-rules/", {"idle_window_s": 5, "reason": "r"}, **post)
    assert (answer.status_code, answer.json()["errors"][0]["pointer"]) == (400, "idle_window_s")
    assert (
        admin.post("/api/v1/reclaim-rules/", {"idle_window_s": 900, "reason": "r"}, **post).status_code == 200
    )
    assert mine.get("/api/v1/reclaim-rules/").json()["values"]["idle_window_s"] == 900
    start = now() + timedelta(days=2)
    window = {
        "title": "Supply", "reason": "rack 4", "nodes": ["sh-01"], "starts_at": start.isoformat(),
        "ends_at": (start + timedelta(hours=2)).isoformat(), "notice_s": 3600,
    }  # fmt: skip
    assert mine.post("/api/v1/maintenance-windows/", window, **post).status_code == 403
    wrong = admin.post("/api/v1/maintenance-windows/", {**window, "nodes": ["nowhere"]}, **post)
    assert (wrong.status_code, wrong.json()["errors"][0]["pointer"]) == (400, "nodes")
    made = admin.post("/api/v1/maintenance-windows/", window, **post)
    assert (made.status_code, made.json()["state"], made.json()["nodes"]) == (201, "planned", ["sh-01"])
    cancel = f"/api/v1/maintenance-windows/{made.json()['uid']}/cancel/"
    assert mine.post(cancel, {"reason": "mine"}, **post).status_code == 403
    assert admin.post(cancel, {"reason": "not today"}, **post).json()["state"] == "cancelled"
    assert admin.post(cancel, {"reason": "again"}, **post).status_code == 409
    surplus = {"department": "vg", "flavour": "h800", "notice_s": 3600, "reason": "cut"}
    assert mine.post("/api/v1/reclaim-cases/surplus/", surplus, **post).status_code == 403
    taken = admin.post("/api/v1/reclaim-cases/surplus/", surplus, **post).json()
    assert {row["cause"] for row in taken} == {"over_quota"}
    uid = scene.idle.uid
    assert mine.post(f"/api/v1/allocations/{uid}/consent/", {"willing": True}, **post).status_code == 200
    assert mine.post(f"/api/v1/allocations/{uid}/still-needed/", {}, **post).status_code == 200
    assert ReclaimAdvice.objects.count() == 1


def test_home_warns_above_the_cards_and_takes_still_needed(scene: Scene) -> None:
    mine = browser(scene.lin)
    page = mine.get("/leases/mine/cards/").content.decode()
    assert page.count('class="callout"') == 2
    assert f"{scene.noticed.ref} (2 × " in page and "is taken back at" in page
    assert f"{scene.idle.ref} (2 × " in page and "counts as idle since" in page
    assert page.count("Reclaiming") == page.count("Taken back ") == 1
    most = rules_active()[1].still_needed_times
    assert f"{most} times left" in page or f"{most} time left" in page
    answer = mine.post(f"/leases/{scene.idle.uid}/do/still-needed/", {"next": "/"})
    assert answer.headers["Location"] == "/"
    assert mine.get("/leases/mine/cards/").content.decode().count('class="callout"') == 1
