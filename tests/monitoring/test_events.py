"""XIDs and other events: recorded once, acted upon by the catalogue, escalated when two owners meet them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.test import Client
from django.utils.translation import override

from monitoring.models import GpuEvent
from monitoring.services.events import gpu_event_record, xid_catalogue
from monitoring.web.xid_words import MEANINGS, meaning_words
from portal.accounts.models import Role
from portal.kernel.clock import set_clock
from portal.notify.models import Notification
from portal.notify.texts import reading_as, words_of
from portal.ops.models import Incident
from portal.ops.outbox import subscribers
from tests.monitoring import builders as b

pytestmark = pytest.mark.django_db
T0 = datetime(2026, 6, 16, 6, 0, tzinfo=UTC)


def event(card: Any, code: int, at: datetime = T0, **data: Any) -> GpuEvent | None:
    with set_clock(at):
        return gpu_event_record(
            {
                "node_uid": str(card.node.uid),
                "gpu_uuid": card.uuid,
                "kind": "xid",
                "at": at.isoformat(),
                "data": {"xid": code, "text": "NVRM: Xid", **data},
            }
        )


def test_monitoring_listens_to_the_agents_events() -> None:
    assert "monitoring.services.events.gpu_event_record" in subscribers("pool.agent_event")


def test_a_program_fault_tells_and_keeps_the_card_xid_31() -> None:
    """P070: an event with its time, an application's fault, no reason to close the card."""
    card = b.node().gpus.get(index=0)
    found = event(card, 31)
    assert (
        found is not None
        and found.facts["effect"] == "restart_app"
        and "page fault" in found.facts["meaning"]
    )
    card.refresh_from_db()
    assert card.condition == "ok" and Incident.objects.filter(kind="xid").count() == 1
    assert found.at == T0


def test_a_device_fault_takes_the_card_out_and_opens_an_incident_xid_48() -> None:
    """P070: a fault of the hardware closes it until a person clears it."""
    card = b.node().gpus.get(index=0)
    event(card, 48)
    card.refresh_from_db()
    card.node.refresh_from_db()
    assert (card.condition, card.condition_reason, card.node.schedulable) == ("fault", "xid_48", "open")
    assert Incident.objects.get(kind="xid").severity == "critical"


def test_a_node_fault_cordons_the_node_xid_79() -> None:
    card = b.node().gpus.get(index=0)
    event(card, 79)
    card.refresh_from_db()
    card.node.refresh_from_db()
    assert card.condition == "fault" and card.node.schedulable == "cordoned"


def test_the_same_event_twice_is_one_event() -> None:
    card = b.node().gpus.get(index=0)
    event(card, 31)
    event(card, 31)
    assert GpuEvent.objects.count() == 1 and Incident.objects.get(kind="xid").occurrences == 1


def test_two_equal_codes_in_a_row_are_two_events_g087() -> None:
    card = b.node().gpus.get(index=0)
    event(card, 31)
    event(card, 31, T0 + timedelta(seconds=5))
    assert GpuEvent.objects.count() == 2


def test_the_same_code_under_two_owners_escalates_to_the_card() -> None:
    card = b.node().gpus.get(index=0)
    vision = b.department()
    with set_clock(T0):
        first = b.held(card, b.person("a.a", where=vision), vision, since=T0 - timedelta(hours=1))
    event(card, 31)
    first.ended_at = T0 + timedelta(hours=1)
    first.save()
    type(first.allocation).objects.filter(pk=first.allocation_id).update(state="ended")
    with set_clock(T0):
        b.held(card, b.person("b.b", where=vision), vision, since=T0 + timedelta(hours=2))
    found = event(card, 31, T0 + timedelta(hours=3))
    card.refresh_from_db()
    assert found is not None and found.facts["effect"] == "drain_gpu" and card.condition == "fault"


def test_severity_comes_from_the_strongest_code_of_a_burst_g095() -> None:
    card = b.node().gpus.get(index=0)
    event(card, 48)
    found = event(card, 45, T0 + timedelta(seconds=10))
    assert found is not None and found.facts["effect"] == "drain_gpu"
    alone = event(b.node("other-01").gpus.get(index=0), 45)
    assert alone is not None and alone.facts["effect"] == "watch"


def test_ignored_codes_are_kept_and_nothing_else_happens_xid_43() -> None:
    card = b.node().gpus.get(index=0)
    found = event(card, 43)
    assert found is not None and found.facts["effect"] == "ignore" and not Incident.objects.exists()


def test_a_card_of_another_node_is_never_touched() -> None:
    one, two = b.node("a-01"), b.node("b-01")
    card = two.gpus.get(index=0)
    gpu_event_record(
        {
            "node_uid": str(one.uid),
            "gpu_uuid": card.uuid,
            "kind": "xid",
            "at": T0.isoformat(),
            "data": {"xid": 79},
        }
    )
    card.refresh_from_db()
    two.refresh_from_db()
    assert card.condition == "ok" and two.schedulable == "open" and GpuEvent.objects.get().gpu is None


def test_unknown_nodes_and_kinds_are_left_alone() -> None:
    card = b.node().gpus.get(index=0)
    assert gpu_event_record({"node_uid": "00000000-0000-7000-8000-000000000000", "kind": "xid"}) is None
    assert gpu_event_record({"node_uid": str(card.node.uid), "kind": "party"}) is None
    assert not GpuEvent.objects.exists()


def test_the_catalogue_is_whole() -> None:
    catalogue = xid_catalogue()
    assert len(catalogue) == 172 and all(entry["meaning"] and entry["effect"] for entry in catalogue.values())


def test_every_meaning_of_the_catalogue_is_known_to_gettext_and_has_its_chinese() -> None:
    assert {entry["meaning"] for entry in xid_catalogue().values()} == MEANINGS
    with override("zh-hans"):
        told = {text: meaning_words(text) for text in MEANINGS}
    assert [
        text for text, words in told.items() if not any("\u4e00" <= sign <= "\u9fff" for sign in words)
    ] == []
    assert len(set(told.values())) == len(told)
    with override("en"):
        assert all(meaning_words(text) == text for text in MEANINGS)


def test_a_meaning_of_no_catalogue_is_shown_as_it_is() -> None:
    with override("zh-hans"):
        assert [meaning_words(text) for text in ("an older text", "", None)] == ["an older text", "", ""]


@pytest.mark.parametrize(
    ("language", "meaning", "effect"),
    [
        ("en", "GPU dropped off the PCIe bus", "nothing new is placed on this node until it was restarted"),
        ("zh-hans", "GPU 已从 PCIe 总线掉线", "重启前不再在此节点上安排新任务"),
    ],
)
def test_meanings_are_told_in_the_readers_language(language: str, meaning: str, effect: str) -> None:
    """On the page of the card, on both incidents, and in the notice; what is kept is the data's own text."""
    card, team = b.node().gpus.get(index=0), b.department()
    wu, boss = b.person("wu", where=team), b.person("boss", Role.POOL_ADMIN)
    wu.language = boss.language = language
    wu.save()
    boss.save()
    with set_clock(T0):
        b.held(card, wu, team, since=T0 - timedelta(hours=1))
    found = event(card, 79)
    assert found is not None and found.facts["meaning"] == "GPU dropped off the PCIe bus"
    reader = Client()
    reader.force_login(boss)
    reader.cookies["django_language"] = language
    incidents = Incident.objects.filter(kind__in=("xid", "gpu_fault"))
    assert incidents.count() == 2
    for address in (f"/gpus/{card.uid}/", *(f"/incidents/{one.uid}/" for one in incidents)):
        page = reader.get(address).content.decode()
        assert meaning in page and effect in page, address
        assert language == "en" or "dropped off" not in page
    with reading_as(wu):
        body = words_of(Notification.objects.get(kind="monitoring.xid_on_mine")).body
    assert meaning in body and effect in body


def test_monitoring_hears_of_leases_nodes_and_cards() -> None:
    for topic in (
        "pool.allocation_started",
        "pool.allocation_ended",
        "pool.node_state",
        "pool.gpu_condition",
    ):
        assert any(handler.startswith("monitoring.services.pokes.") for handler in subscribers(topic)), topic


def test_who_holds_the_card_is_told_once_a_day_for_the_same_code() -> None:
    card = b.node().gpus.get(index=0)
    team = b.department()
    wu = b.person("wu", where=team)
    with set_clock(T0):
        b.held(card, wu, team, since=T0 - timedelta(hours=1))
    event(card, 31)
    event(card, 31, T0 + timedelta(minutes=2))
    event(card, 13, T0 + timedelta(minutes=3))
    told = Notification.objects.filter(kind="monitoring.xid_on_mine").order_by("id")
    assert [(n.user, n.params["code"]) for n in told] == [(wu, 31), (wu, 13)]
    with reading_as(wu):
        words = words_of(told[0])
    assert words.title.startswith("GPU error (XID 31) under A-")
    assert "page fault" in words.body and "a fault of the program" in words.body
