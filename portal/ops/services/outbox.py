"""Deliver the outbox: claim open events, call their subscribers, note the outcome."""

from __future__ import annotations

from datetime import timedelta

import structlog
from django.db import transaction
from django.utils.module_loading import import_string

from portal.kernel.clock import now
from portal.ops.models import OutboxEvent
from portal.ops.outbox import subscribers
from portal.ops.services.incidents import incident_open

log = structlog.get_logger(__name__)
MAX_ATTEMPTS = 10


def outbox_deliver(*, limit: int = 200) -> int:
    """Deliver up to `limit` due events, each in a transaction of its own; returns how many were done.

    Rows are claimed with SKIP LOCKED, so several workers may deliver at once; each handler runs in a savepoint
    of the claiming transaction, hence "done" and the handler's own writes stand or fall together.
    """
    done = 0
    while done < limit:
        with transaction.atomic():
            event = (
                OutboxEvent.objects.select_for_update(skip_locked=True)
                .filter(done_at=None, available_at__lte=now(), attempts__lt=MAX_ATTEMPTS)
                .order_by("id")
                .first()
            )
            if event is None:
                return done
            try:
                with transaction.atomic():
                    for handler in subscribers(event.topic):
                        import_string(handler)(event.payload)
            except Exception as error:  # a handler's failure must not stop the others
                event.attempts += 1
                event.last_error = f"{type(error).__name__}: {error}"[:2000]
                event.available_at = now() + timedelta(seconds=min(600, 2**event.attempts))
                event.save(update_fields=["attempts", "last_error", "available_at"])
                if event.attempts >= MAX_ATTEMPTS:
                    incident_open(
                        kind="outbox_stuck",
                        dedupe_key=f"outbox_stuck:{event.topic}",
                        severity="critical",
                        subject=event,
                        facts={"topic": event.topic, "event": event.pk, "error": event.last_error[:300]},
                    )
                log.warning(
                    "outbox_handler_failed", topic=event.topic, event_id=event.pk, error=type(error).__name__
                )
            else:
                event.done_at = now()
                event.save(update_fields=["done_at"])
                done += 1
    return done
