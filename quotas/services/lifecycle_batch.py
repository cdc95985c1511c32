"""Many requests that the scheduler placed, in the caller's transaction: what ``request_allocated`` does for one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from django.db import connection

from portal.kernel.bulk import values_copy
from portal.kernel.clock import now
from portal.ops.actor import system
from portal.ops.services.audit import audit_record_many, audit_row
from quotas.models import CapacityRequest, RequestEvent, UserLimit
from quotas.selectors.user_limits import held_by
from quotas.services.lifecycle import SCHEDULER
from quotas.transitions import REQUEST_ARROWS

S = CapacityRequest.State
JUDGED = (
    "uid", "state", "requester", "department", "interruptible", "priority", "duration_s", "end_at", "charge_milli",
)  # fmt: skip
"""What the scheduler looks at when it carries a plan out."""
ALLOCATE = """
UPDATE quotas_capacityrequest SET state = %s, state_since = %s, version = version + 1, updated_at = %s
 WHERE id = ANY(%s) AND state = ANY(%s)
"""


def requests_lock(ids: Collection[int]) -> dict[int, CapacityRequest]:
    """Lock requests by id; those that exist, as far as `JUDGED` goes (the rest is read when asked for)."""
    if not connection.in_atomic_block:
        raise RuntimeError("row locks need a transaction")
    rows = (
        CapacityRequest.objects.select_for_update(of=("self",), no_key=True)
        .filter(pk__in=sorted(ids))
        .only(*JUDGED)
        .order_by("pk")
    )
    return {row.pk: row for row in rows}


class Rooms:
    """What each of some people may still hold at once, counted down as their requests are placed."""

    def __init__(self, user_ids: Collection[int]) -> None:
        rows = UserLimit.objects.values_list("user_id", "gpus_at_once_milli", "running_at_once")
        limits: dict[int | None, tuple[int | None, int | None]] = {row[0]: (row[1], row[2]) for row in rows}
        everybody = limits.get(None, (None, None))
        self._limit = {one: limits.get(one, everybody) for one in user_ids}
        people = [one for one, limit in self._limit.items() if limit != (None, None)]
        self._held = held_by(people) if people else {}

    def refusal(self, user_id: int, charge_milli: int) -> str:
        """The code why so much more is beyond the person's limits, or ""."""
        milli, running = self._held.get(user_id, (0, 0))
        most_milli, most_running = self._limit[user_id]
        if most_milli is not None and milli + charge_milli > most_milli:
            return "user_limit"
        return "running_limit" if most_running is not None and running + 1 > most_running else ""

    def take(self, user_id: int, charge_milli: int) -> None:
        """Count what was placed for the person."""
        milli, running = self._held.get(user_id, (0, 0))
        self._held[user_id] = (milli + charge_milli, running + 1)


def requests_allocated(requests: Sequence[CapacityRequest], facts: Mapping[int, dict[str, Any]]) -> None:
    """Locked requests in state queued become allocated, with their lines of history and audit.

    RuntimeError where one is in another state: the caller has not judged it under the lock.
    """
    sources, target = REQUEST_ARROWS["allocate"]
    moment = now()
    with connection.cursor() as cursor:
        ids = [one.pk for one in requests]
        cursor.execute(ALLOCATE, [str(target), moment, moment, ids, [str(one) for one in sources]])
        if cursor.rowcount != len(ids):
            raise RuntimeError("a request was not queued")
    values_copy(
        RequestEvent,
        ("request_id", "at", "kind", "actor_name", "facts"),
        ((one.pk, moment, "allocated", SCHEDULER, facts.get(one.pk, {})) for one in requests),
    )
    audit_record_many(
        [
            audit_row(
                acting_user=system(SCHEDULER),
                action="request.allocated",
                subject=one,
                before={"state": S.QUEUED},
                after={"state": S.ALLOCATED, **facts.get(one.pk, {})},
            )
            for one in requests
        ]
    )
