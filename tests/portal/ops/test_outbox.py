"""The outbox: in order, at least once, one failing handler stops no other, and ten failures are told."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db import transaction

from portal.kernel.clock import now, set_clock
from portal.ops import outbox
from portal.ops.models import Incident, OutboxEvent
from portal.ops.services.outbox import outbox_deliver

pytestmark = pytest.mark.django_db
taken: list[dict[str, Any]] = []


def take(payload: dict[str, Any]) -> None:
    taken.append(payload)


def fail(payload: dict[str, Any]) -> None:
    raise ValueError("cannot take this")


@pytest.fixture(autouse=True)
def handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    taken.clear()
    monkeypatch.setattr(outbox, "_poke", lambda: None)
    names = {"test.good": [f"{__name__}.take"], "test.bad": [f"{__name__}.fail"]}
    monkeypatch.setattr(outbox, "_subscribers", names)


def add(topic: str, **payload: Any) -> OutboxEvent:
    with transaction.atomic():
        return outbox.outbox_add(topic, payload)


def test_events_are_delivered_once_and_in_order_though_one_fails() -> None:
    bad = add("test.bad", n=0)
    add("test.good", n=1)
    add("test.good", n=2)
    assert outbox_deliver() == 2
    assert taken == [{"n": 1}, {"n": 2}]
    bad.refresh_from_db()
    assert (bad.attempts, bad.done_at, bad.last_error) == (1, None, "ValueError: cannot take this")
    assert outbox_deliver() == 0
    assert taken == [{"n": 1}, {"n": 2}]


def test_the_tenth_failure_is_told_and_the_event_stays() -> None:
    bad = add("test.bad", n=0)
    moment = now()
    for _ in range(12):
        moment += timedelta(hours=1)
        with set_clock(moment):
            outbox_deliver()
    bad.refresh_from_db()
    assert (bad.attempts, bad.done_at) == (10, None)
    incident = Incident.objects.get(kind="outbox_stuck")
    assert (incident.state, incident.severity, incident.facts["topic"]) == ("open", "critical", "test.bad")


@pytest.mark.django_db(transaction=True)
def test_an_event_outside_a_transaction_is_a_mistake() -> None:
    with pytest.raises(RuntimeError):
        outbox.outbox_add("test.good", {})
    assert OutboxEvent.objects.count() == 0
