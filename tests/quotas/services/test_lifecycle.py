"""What the pool tells of a request after its approval."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from portal.kernel.clock import set_clock
from portal.kernel.errors import Blocked, Conflict
from portal.ops.models import AuditEvent, OutboxEvent
from quotas.models import CapacityRequest, UserLimit
from quotas.selectors.queue import queued_requests
from quotas.services.lifecycle import (
    request_allocated,
    request_ended,
    request_event,
    request_requeued,
    request_started,
)
from tests.quotas import build

pytestmark = pytest.mark.django_db
T = datetime(2026, 6, 16, 6, 0, tzinfo=UTC)


def queued(who=None, **values):
    who = who or build.user()
    where = build.department()
    return CapacityRequest.objects.create(
        requester=who,
        department=where,
        flavour=build.flavour(),
        state="queued",
        queued_at=T,
        charge_milli=1000,
        duration_s=3600,
        **values,
    )


def kinds(request):
    return list(request.events.order_by("id").values_list("kind", flat=True))


def test_from_queue_to_end_each_told_twice_and_done_once():
    request = queued()
    with set_clock(T):
        for call, facts in ((request_allocated, {"nodes": ["n1"]}), (request_started, {"node": "n1"})):
            assert call(request_id=request.pk, facts=facts) is True
            assert call(request_id=request.pk, facts=facts) is False
        assert request_ended(request_id=request.pk, reason="expired", facts={"gpu_ms": 3_600_000}) is True
        assert request_ended(request_id=request.pk, reason="expired", facts={}) is False
    request.refresh_from_db()
    assert (request.state, request.end_reason, request.ended_at) == ("ended", "expired", T)
    assert kinds(request) == ["allocated", "started", "ended"]
    assert list(AuditEvent.objects.order_by("id").values_list("action", flat=True)) == [
        "request.allocated",
        "request.ended",
    ]


def test_requeued_keeps_its_place_and_tells():
    request = queued()
    request_allocated(request_id=request.pk)
    request_started(request_id=request.pk)
    assert request_requeued(request_id=request.pk, reason="node_lost", facts={"node": "n1"}) is True
    assert request_requeued(request_id=request.pk, reason="node_lost", facts={}) is False
    request.refresh_from_db()
    assert (request.state, request.queued_at) == ("queued", T)
    assert OutboxEvent.objects.get(topic="quotas.request_queued").payload == {
        "request": str(request.uid),
        "cause": "node_lost",
    }
    assert request_allocated(request_id=request.pk) is True
    assert request_started(request_id=request.pk) is True


@pytest.mark.parametrize(
    "state", ["draft", "in_approval", "returned", "needs_consent", "rejected", "withdrawn", "ended"]
)
def test_only_a_queued_request_is_allocated(state):
    request = queued()
    CapacityRequest.objects.filter(pk=request.pk).update(state=state)
    with pytest.raises(Conflict) as refusal:
        request_allocated(request_id=request.pk)
    assert refusal.value.extra["state"] == state
    assert not request.events.exists()


def test_gpus_at_once_is_held_when_it_would_start():
    who = build.user()
    UserLimit.objects.create(user=who, gpus_at_once_milli=1000)
    first, second = queued(who), queued(who)
    request_allocated(request_id=first.pk)
    with pytest.raises(Blocked) as refusal:
        request_allocated(request_id=second.pk)
    assert refusal.value.blocking == {"level": "user", "limit": 1000, "used": 1000, "requested": 1000}
    request_ended(request_id=first.pk, reason="released")
    assert request_allocated(request_id=second.pk) is True


def test_queue_is_ordered_by_place_then_number():
    a, b = queued(), queued()
    c = queued()
    CapacityRequest.objects.filter(pk=c.pk).update(queued_at=T.replace(hour=5))
    assert list(queued_requests()) == [c, a, b]


def test_a_line_of_history_changes_no_state():
    request = queued()
    request_event(request_id=request.pk, kind="extended", facts={"extra_s": 3600}, actor_name="Lin Yue")
    request.refresh_from_db()
    assert request.state == "queued"
    event = request.events.get()
    assert (event.kind, event.actor_name, event.facts) == ("extended", "Lin Yue", {"extra_s": 3600})
