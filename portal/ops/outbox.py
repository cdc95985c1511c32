"""The outbox's two sides: services add events, upper rooms subscribe to topics.

Delivery is at least once. A handler takes the payload, is idempotent, and may be any dotted path to a function
`handler(payload: dict) -> None`. A handler that fails is tried again with growing pauses; after 10 attempts the
event stays open with its error and an incident tells.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from django.db import transaction

from portal.kernel.bulk import values_copy
from portal.kernel.clock import now
from portal.ops.models import OutboxEvent

_subscribers: dict[str, list[str]] = defaultdict(list)


def subscribe(topic: str, handler: str) -> None:
    """Register a dotted handler for a topic (from AppConfig.ready); the same pair counts once."""
    if handler not in _subscribers[topic]:
        _subscribers[topic].append(handler)


def subscribers(topic: str) -> list[str]:
    """Handlers of a topic in order of registration."""
    return list(_subscribers.get(topic, []))


def outbox_add(topic: str, payload: dict[str, Any], *, key: str = "") -> OutboxEvent:
    """Add an event inside the caller's transaction; delivery is poked after commit."""
    row = _event(topic, payload, key)
    row.save(force_insert=True)
    transaction.on_commit(_poke, robust=True)
    return row


def outbox_add_many(events: Sequence[tuple[str, dict[str, Any], str]]) -> int:
    """Add many (topic, payload, key) by COPY, with one poke after commit; returns how many."""
    moment = now()
    added = values_copy(
        OutboxEvent,
        ("topic", "payload", "key", "created_at", "available_at"),
        ((topic, payload, key, moment, moment) for topic, payload, key in events),
    )
    transaction.on_commit(_poke, robust=True)
    return added


def _event(topic: str, payload: dict[str, Any], key: str) -> OutboxEvent:
    if not transaction.get_connection().in_atomic_block:
        raise RuntimeError("an outbox row belongs to the transaction of the change it tells of")
    moment = now()
    return OutboxEvent(topic=topic, payload=payload, key=key, created_at=moment, available_at=moment)


def load_celery() -> None:
    """Make sure that tasks find the installation's Celery application: web, worker and beat load it when they
    start, a management command does not. By name, because this room lies below the wiring."""
    import_module("portal.celery")


def _poke() -> None:
    """Ask a worker to deliver soon. Losing the poke costs a few seconds: beat delivers too."""
    from portal.ops.tasks import deliver_outbox

    load_celery()
    deliver_outbox.apply_async(ignore_result=True, retry=False)
