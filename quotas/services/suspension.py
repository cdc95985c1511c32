"""What happens to the asks of a suspended person."""

from __future__ import annotations

from django.db import transaction

from portal.accounts.models import User
from portal.kernel.clock import now
from portal.ops.actor import Actor
from portal.ops.outbox import outbox_add
from portal.ops.services.audit import audit_record
from quotas.models import CapacityRequest
from quotas.services.approval_steps import steps_skip
from quotas.services.history import note_event
from quotas.services.locks import request_lock
from quotas.transitions import REQUEST_ARROWS, move


def requests_of_suspended(*, acting_user: Actor, user: User) -> int:
    """Withdraw all that holds nothing yet, with the reason; what runs is the pool's to end. Returns how
    many.
    """
    sources = REQUEST_ARROWS["withdraw"][0]
    done = 0
    for pk in (
        CapacityRequest.objects.filter(requester=user, state__in=sources)
        .order_by("pk")
        .values_list("pk", flat=True)
    ):
        with transaction.atomic():
            held = request_lock(pk)
            if held.state not in sources:
                continue
            before = held.state
            move(held, "withdraw", ended_at=now(), end_reason="suspended", held="")
            steps_skip(held)
            note_event(
                request_id=held.pk,
                kind="withdrawn",
                actor_name=acting_user.name,
                facts={"from": before, "reason": "suspended"},
            )
            audit_record(
                acting_user=acting_user,
                action="request.withdrawn",
                subject=held,
                before={"state": before},
                after={"state": held.state},
                reason="suspended",
            )
            outbox_add("quotas.request_withdrawn", {"request": str(held.uid)}, key=held.ref)
            done += 1
    return done
