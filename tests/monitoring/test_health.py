"""Health judged from stored samples, and alert rules, end to end: opened once, collected, told once, closed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse
from django.utils import translation

from monitoring.models import AlertFiring, AlertRule, CardHealth, GpuState
from monitoring.selectors.board import board_forget
from monitoring.services import intake
from monitoring.services.alerts import alert_rule_save, alerts_evaluate
from monitoring.services.health import health_judge
from monitoring.services.ingest import samples_write
from pool.models import Gpu, Node
from pool.services.conditions import gpu_condition_set
from portal.accounts.models import Role
from portal.accounts.policy import policy_of
from portal.kernel.clock import now, set_clock
from portal.kernel.errors import Conflict, Invalid, PreconditionFailed, Refused
from portal.notify.models import Notification
from portal.ops.actor import SYSTEM, Actor
from portal.ops.facts import fact_rows
from portal.ops.models import AuditEvent, Incident, OutboxEvent
from portal.ops.services.outbox import outbox_deliver as deliver
from tests.monitoring import builders as make

pytestmark = pytest.mark.django_db
T = datetime(2026, 6, 16, 6, 0, tzinfo=UTC)


def at(seconds: float) -> set_clock:
    board_forget()
    return set_clock(T + timedelta(seconds=seconds))


def person(*values: Any) -> Any:
    with set_clock(T - timedelta(days=30)):
        return make.person(*values)


def sample(card: Gpu, *, missing: dict[str, str] | None = None, **values: Any) -> None:
    known = {
        name: values.pop(name) for name in ("util_pm", "temp_c", "throttle", "power_mw") if name in values
    }
    GpuState.objects.update_or_create(
        gpu=card, slot=0, defaults={"at": now(), "more": values, "missing": missing or {}, **known}
    )


def standing(**by: Any) -> list[Incident]:
    return list(Incident.objects.exclude(state="closed").filter(**by))


def test_an_incident_opens_once_collects_and_closes_by_itself() -> None:
    with at(0):
        [card] = make.node(gpus=1).gpus.all()
        sample(card, remap_pending=1, remap_uncorr=1)
        assert health_judge()["begun"] == 1
        assert health_judge() == {
            "begun": 0,
            "ended": 0,
            "nodes": 0,
            "sources": 0,
        }  # the same sample is judged once
    with at(60):
        sample(card, remap_pending=1, remap_uncorr=1)
        assert health_judge()["begun"] == 0
        card.refresh_from_db()
        assert (card.condition, card.condition_reason) == ("suspect", "gpu_remap_pending")
    [own] = standing(kind="gpu_remap_pending")
    assert (own.severity, own.facts["remap_uncorr"]) == ("warning", 1)
    with at(120):
        sample(card, remap_pending=0, remap_uncorr=1)
        assert health_judge()["ended"] == 1
        card.refresh_from_db()
        assert card.condition == "ok"
    assert standing() == []
    assert Incident.objects.get(kind="gpu_remap_pending").note == "no longer seen"


def test_memory_errors_stay_until_a_person_clears_the_card() -> None:
    with at(0):
        [card] = make.node(gpus=1).gpus.all()
        sample(card, ecc_uncorr=2)
        assert health_judge()["begun"] == 0
    with at(60):
        sample(card, ecc_uncorr=3)
        assert health_judge()["begun"] == 1
    with at(120):
        sample(card, ecc_uncorr=3)
        assert health_judge() == {"begun": 0, "ended": 0, "nodes": 0, "sources": 0}
        card.refresh_from_db()
        assert card.condition == "suspect"
        assert len(standing(kind="gpu_ecc")) == 1
        gpu_condition_set(acting_user=SYSTEM, gpu=card, condition="ok")
    with at(180):
        sample(card, ecc_uncorr=3)
        assert health_judge()["ended"] == 1
    assert standing() == []


def test_heat_counts_after_ten_minutes_without_touching_the_card() -> None:
    for minute in range(12):
        with at(60 * minute):
            card = Gpu.objects.first() or make.node(gpus=1).gpus.get()
            sample(card, throttle=0x40, util_pm=950, temp_c=88)
            assert health_judge()["begun"] == (1 if minute == 10 else 0)
    card.refresh_from_db()
    assert card.condition == "ok"
    [one] = standing(kind="gpu_throttled")
    assert one.facts["since"] == T.isoformat()


def test_what_is_not_told_raises_nothing_and_a_worse_condition_is_kept() -> None:
    with at(0):
        [card] = make.node(gpus=1).gpus.all()
        sample(card, missing={"fan": "not_supported", "ecc_uncorr": "not_supported"})
        assert health_judge()["begun"] == 0
        gpu_condition_set(acting_user=SYSTEM, gpu=card, condition="fault", reason="xid_79")
    with at(60):
        sample(card, remap_pending=1)
        health_judge()
        card.refresh_from_db()
        assert (card.condition, card.condition_reason) == ("fault", "xid_79")


def test_old_samples_and_retired_cards_are_not_judged() -> None:
    with at(0):
        old, gone = make.node(gpus=2).gpus.order_by("index")
        for card in (old, gone):
            sample(card, remap_failure=1)
        GpuState.objects.filter(gpu=old).update(at=now() - timedelta(minutes=6))
        Gpu.objects.filter(pk=gone.pk).update(condition="retired")
        assert health_judge()["begun"] == 0
        assert CardHealth.objects.count() == 0


def test_a_card_with_fewer_nvlinks_than_its_neighbours() -> None:
    with at(0):
        cards = list(make.node(gpus=3).gpus.order_by("index"))
        for card, links in zip(cards, (18, 18, 17), strict=True):
            Gpu.objects.filter(pk=card.pk).update(nvlink={"links": links})
            sample(card)
        assert health_judge()["begun"] == 0
    with at(121):
        for card in cards:
            sample(card)
        assert health_judge()["begun"] == 1
    [one] = standing(kind="gpu_nvlink")
    assert (one.subject_uid, one.facts["links"], one.facts["of"]) == (cards[2].uid, 17, 18)


def test_clocks_and_drivers_of_nodes() -> None:
    with at(0):
        nodes = [make.node(f"n{k}", gpus=1, driver="550.54") for k in range(3)]
        Node.objects.filter(pk=nodes[0].pk).update(driver="535.10")
        Node.objects.filter(pk=nodes[1].pk).update(clock_skew_ms=2_500)
        assert health_judge()["nodes"] == 2
        assert health_judge()["nodes"] == 0
        found = {(i.kind, i.subject_label, i.severity) for i in standing()}
        assert found == {("node_driver", "n0", "warning"), ("node_clock", "n1", "warning")}
        Node.objects.update(driver="550.54", clock_skew_ms=100)
        health_judge()
    assert standing() == []


def test_a_greeting_that_came_late_is_no_wrong_clock() -> None:
    """A busy server makes a node look behind; its samples show that it is not, or that it is."""
    with at(0):
        nodes = [make.node(f"n{n}", 1, clock_skew_ms=-3000) for n in range(3)]
        cards = [node.gpus.get() for node in nodes]
        for card, behind in zip(cards[:2], (0.4, 2.9), strict=True):
            sample(card, temp_c=50)
            GpuState.objects.filter(gpu=card).update(received_at=now() + timedelta(seconds=behind))
        assert health_judge()["nodes"] == 1
        assert {i.subject_label for i in standing(kind="node_clock")} == {"n1"}, "of n2 it cannot be told"
        Node.objects.filter(pk=nodes[0].pk).update(clock_skew_ms=3000)
        health_judge()
        assert {i.subject_label for i in standing(kind="node_clock")} == {"n0", "n1"}, "ahead is ahead"
        Node.objects.filter(pk=nodes[2].pk).update(clock_skew_ms=-40_000)
        health_judge()
        assert {i.subject_label for i in standing(kind="node_clock")} == {"n0", "n1", "n2"}, (
            "no way takes that"
        )


@pytest.fixture
def admin() -> Any:
    return person("admin", Role.POOL_ADMIN)


def rule(admin: Any, **values: Any) -> AlertRule:
    base = {"name": "Hot cards", "metric": "gpu_temp_c", "threshold": 85, "for_s": 60}
    return alert_rule_save(acting_user=Actor(user=admin), policy=policy_of(admin), values={**base, **values})


def test_all_subjects_of_a_rule_are_one_incident_that_is_told_once(admin: Any) -> None:
    with at(0):
        cards = list(make.node(gpus=3).gpus.order_by("index"))
        rule(admin)
    for seconds, temps in ((1, (90, 91, 60)), (62, (90, 95, 60)), (130, (90, 60, 92)), (200, (90, 60, 92))):
        with at(seconds):
            for card, temp in zip(cards, temps, strict=True):
                sample(card, temp_c=temp)
            done = alerts_evaluate()
            assert done["opened"] == {1: 0, 62: 2, 130: 0, 200: 1}[seconds]
    [one] = standing(kind="alert")
    assert (one.occurrences, one.facts["subjects"], one.facts["which"]) == (
        2,
        2,
        ["sh-h800-01/0", "sh-h800-01/2"],
    )
    with at(230):
        deliver()
        deliver()
    assert Notification.objects.filter(kind="ops.incident_opened", user=admin).count() == 1
    with at(260):
        for card in cards:
            sample(card, temp_c=60)
        assert alerts_evaluate() == {"opened": 0, "ended": 2}
    assert standing() == []
    assert list(AlertFiring.objects.order_by("id").values_list("worst", flat=True)) == [90, 95, 92]


def test_p09_an_alert_on_power_judges_the_mean_of_half_a_minute(admin: Any) -> None:
    """(450 + 460 + 620) / 3 W is no alarm above 600, though the last instant is; 610 W all along is."""
    with at(0):
        peak, steady, rare = make.node(gpus=3).gpus.order_by("index")
        rule(admin, metric="gpu_power_w", threshold=600, for_s=0)
    for seconds, watts in ((70, (900, 610)), (101, (450, 610)), (111, (460, 610)), (121, (620, 610))):
        with at(seconds):
            rows = [
                make.row(card, now(), power_mw=w * 1000)
                for card, w in zip((peak, steady), watts, strict=True)
            ]
            batch, refused = intake.batch_of(node_id=peak.node_id, message=make.message(*rows))
            assert not refused
            samples_write(batches=[batch])
    with at(125):
        sample(
            rare, power_mw=640_000
        )  # its source tells more seldom than that: the last value is all there is
        assert alerts_evaluate()["opened"] == 2
    firings = AlertFiring.objects.order_by("label").values_list("label", "value")
    assert list(firings) == [("sh-h800-01/1", 610), ("sh-h800-01/2", 640)]


def test_the_facts_of_an_alert_are_words_of_the_readers_language(admin: Any) -> None:
    facts = {"threshold": "below -5", "which": ["pool", "sh-h800-01/1"]}
    for language, threshold, which in (
        ("en", "below \u22125", "the pool, sh-h800-01/1"),
        ("zh-hans", "低于 \u22125", "整个资源池，sh-h800-01/1"),
    ):
        with translation.override(language):
            shown = {row["key"]: str(row["value"]) for row in fact_rows(facts)}
        assert shown == {"threshold": threshold, "which": which}


def test_the_holder_is_told_where_the_rule_says_so(admin: Any) -> None:
    team = make.department("vision")
    wu = person("wu", Role.RESEARCHER, team)
    with at(0):
        held, free = make.node(gpus=2).gpus.order_by("index")
        make.held(held, wu, team, since=now() - timedelta(hours=1))
        rule(admin, for_s=0, tell_holder=True)
        for card in (held, free):
            sample(card, temp_c=99)
        assert alerts_evaluate()["opened"] == 2
        deliver()
        OutboxEvent.objects.filter(topic="monitoring.alert_opened").update(done_at=None)
        deliver()
    assert Notification.objects.filter(kind="monitoring.alert_on_mine").count() == 1
    assert Notification.objects.get(kind="monitoring.alert_on_mine").user == wu


def test_rules_of_one_site_of_nodes_and_of_the_pool(admin: Any) -> None:
    with at(0):
        [near] = make.node(gpus=1).gpus.all()
        [far] = make.node("bj-1", gpus=1, site="beijing").gpus.all()
        Node.objects.filter(name="bj-1").update(clock_skew_ms=-900)
        for card in (near, far):
            sample(card, temp_c=90)
        hot = rule(admin, for_s=0, site_code="beijing")
        skew = rule(admin, name="Clocks", metric="node_skew_ms", threshold=500, for_s=0)
        free = rule(admin, name="Few free", metric="pool_free_gpus", direction="below", threshold=3, for_s=0)
        rule(
            admin, name="Off", metric="pool_free_gpus", direction="below", threshold=99, for_s=0, active=False
        )
        assert alerts_evaluate()["opened"] == 3
    assert [f.label for f in hot.firings.all()] == ["bj-1/0"]
    assert [(f.label, f.value) for f in skew.firings.all()] == [("bj-1", 900)]
    assert [(f.label, f.value) for f in free.firings.all()] == [("pool", 2)]


def test_another_condition_ends_what_fired_under_the_old_one(admin: Any) -> None:
    with at(0):
        [card] = make.node(gpus=1).gpus.all()
        sample(card, temp_c=90)
        hot = rule(admin, for_s=0)
        alerts_evaluate()
        act = {"acting_user": Actor(user=admin), "policy": policy_of(admin), "rule": hot}
        same = alert_rule_save(**act, values={"name": "Hot"})
        assert len(standing(kind="alert")) == 1
        with pytest.raises(PreconditionFailed):
            alert_rule_save(**act, values={"threshold": 95}, seen_version=same.version + 1)
        alert_rule_save(**act, values={"threshold": 95}, seen_version=same.version)
        assert standing() == []
        assert alerts_evaluate() == {"opened": 0, "ended": 0}
    assert AuditEvent.objects.filter(action="alert_rule.changed").count() == 2


def test_wrong_rules_are_refused_and_change_nothing(admin: Any) -> None:
    rule(admin)
    for values in (
        {"metric": "colour"},
        {"threshold": "warm"},
        {"name": " "},
        {"for_s": 10**7},
        {"direction": "up"},
    ):
        with pytest.raises(Invalid):
            rule(admin, **{"name": "Other", **values})
    with pytest.raises(Conflict, match="name is there already"):
        rule(admin)
    with pytest.raises(Refused):
        rule(person("auditor", Role.AUDITOR), name="Mine")
    assert AlertRule.objects.count() == 1


def test_the_pages_and_the_api_of_rules(admin: Any) -> None:
    def client(user: Any) -> Client:
        browser = Client()
        browser.force_login(user, backend="django.contrib.auth.backends.ModelBackend")
        return browser

    with at(0):
        [card] = make.node(gpus=1).gpus.all()
        sample(card, temp_c=90)
        mine = client(admin)
        typed = {"name": "Hot", "metric": "gpu_temp_c", "direction": "above", "threshold": "x", "for_s": "0",
                 "severity": "critical", "active": "on"}  # fmt: skip
        wrong = mine.post(reverse("monitoring:alert-rule-new"), typed)
        assert wrong.status_code == 400 and 'value="Hot"' in wrong.content.decode()
        made = mine.post(reverse("monitoring:alert-rule-new"), {**typed, "threshold": "85"})
        assert made.status_code == 302
        alerts_evaluate()
        page = mine.get(made["Location"]).content.decode()
        assert "sh-h800-01/0" in page and "It fires since" in page
        assert "Fires" in mine.get(reverse("monitoring:alert-rules")).content.decode()
        assert client(person("r", Role.RESEARCHER)).get(reverse("monitoring:alert-rules")).status_code == 403
        json = {"content_type": "application/json"}
        listed = mine.get("/api/v1/alert-rules/").json()["results"]
        address = f"/api/v1/alert-rules/{listed[0]['uid']}/"
        assert mine.patch(address, {"colour": "red"}, **json).status_code == 400
        stale = mine.patch(address, {"threshold": 95}, headers={"If-Match": '"9"'}, **json)
        assert stale.status_code == 412
        assert [a["label"] for a in mine.get("/api/v1/alerts/", {"state": "open"}).json()["results"]] == [
            "sh-h800-01/0"
        ]
        fresh = mine.get(address)
        changed = mine.patch(address, {"threshold": 95}, headers={"If-Match": fresh["ETag"]}, **json)
        assert (changed.status_code, changed.json()["threshold"]) == (200, 95)
        assert mine.get("/api/v1/alerts/", {"state": "open"}).json()["results"] == []
        auditor = client(person("auditor", Role.AUDITOR))
        assert auditor.get(address).status_code == 200
        assert auditor.patch(address, {"threshold": 5}, **json).status_code == 403
