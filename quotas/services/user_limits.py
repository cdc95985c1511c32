"""Limits of single people: GPUs at once, longest lease, GPU-hours and money a month. Null is unlimited."""

from __future__ import annotations

from typing import Any

from django.db import transaction
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from portal.accounts.models import User
from portal.accounts.policy import Policy
from portal.kernel.clock import now
from portal.kernel.errors import Blocked, Conflict, Invalid
from portal.kernel.locks import lock_in_transaction
from portal.kernel.models import advance
from portal.kernel.units import gpus_from_milli
from portal.ops.actor import Actor
from portal.ops.services.audit import audit_record
from quotas.models import CapacityRequest, UserLimit
from quotas.selectors.user_limits import FIELDS, held_milli, limits_of, running_count, waiting_count


def user_limit_set(
    *,
    acting_user: Actor,
    policy: Policy,
    user: User | None,
    gpus_at_once_milli: int | None,
    longest_lease_s: int | None,
    gpu_ms_per_month: int | None = None,
    money_micro_per_month: int | None = None,
    waiting_at_once: int | None = None,
    running_at_once: int | None = None,
    version: int | None = None,
) -> UserLimit:
    """Set the limits of a person, or of everybody who has none of their own (``user`` None). Pool
    administrators.
    """
    policy.require(policy.administers_pool)
    values: dict[str, Any] = {
        "gpus_at_once_milli": gpus_at_once_milli,
        "longest_lease_s": longest_lease_s,
        "gpu_ms_per_month": gpu_ms_per_month,
        "money_micro_per_month": money_micro_per_month,
        "waiting_at_once": waiting_at_once,
        "running_at_once": running_at_once,
    }
    wrong = [name for name, value in values.items() if value is not None and value < 0]
    if wrong:
        text = gettext_lazy("A limit is 0 or more; empty means unlimited.")
        raise Invalid(
            code="invalid", detail=text, errors=[{"pointer": name, "detail": text} for name in wrong]
        )
    with transaction.atomic():
        row = UserLimit.objects.select_for_update().filter(user=user).first()
        if row is None:
            row, before = UserLimit.objects.create(user=user, **values), {}
        else:
            if version is not None and row.version != version:
                raise Conflict(code="version_changed", detail=_("It was changed by somebody else meanwhile."))
            before = {name: getattr(row, name) for name in FIELDS}
            advance(UserLimit.objects.filter(pk=row.pk), **values)
            row.refresh_from_db()
        audit_record(
            acting_user=acting_user, action="user_limit.set", subject=row, before=before, after=values
        )
        return row


def user_limit_clear(*, acting_user: Actor, policy: Policy, user: User | None) -> bool:
    """Take a person's own limits away, so that everybody's hold again (``user`` None: everybody's). False where
    there were none.
    """
    policy.require(policy.administers_pool)
    with transaction.atomic():
        row = UserLimit.objects.select_for_update().filter(user=user).first()
        if row is None:
            return False
        before = {name: getattr(row, name) for name in FIELDS}
        audit_record(acting_user=acting_user, action="user_limit.cleared", subject=row, before=before)
        row.delete()
        return True


def gpus_at_once_check(*, user_id: int, charge_milli: int, but_not: int | None = None) -> None:
    """Blocked where what the person holds and ``charge_milli`` more pass the limit on GPUs at once."""
    limit = limits_of(user_id)["gpus_at_once_milli"]
    if limit is None:
        return
    held = held_milli(user_id, but_not=but_not)
    if held + charge_milli > limit:
        raise Blocked(
            code="user_limit",
            detail=_("Your limit: {used} held + {requested} asked > {limit} GPUs at once.").format(
                used=gpus_from_milli(held),
                requested=gpus_from_milli(charge_milli),
                limit=gpus_from_milli(limit),
            ),
            blocking={"level": "user", "limit": limit, "used": held, "requested": charge_milli},
            extra={"rule": "gpus_at_once", "at": now().isoformat()},
        )


def queue_room_check(*, user: User, more: int, but_not: CapacityRequest | None = None) -> None:
    """Blocked where ``more`` further requests of the person would pass their limit on what waits. Runs in
    the transaction that adds them: two that come at once are judged one after the other.
    """
    limit = limits_of(user.pk)["waiting_at_once"]
    if limit is None:
        return
    lock_in_transaction(f"quotas.queue_room:{user.pk}")
    waiting = waiting_count(user.pk, but_not=but_not.pk if but_not is not None else None)
    if waiting + more > limit:
        raise Blocked(
            code="queue_limit",
            detail=_("Your limit: {used} wait + {requested} asked > {limit} waiting requests.").format(
                used=waiting, requested=more, limit=limit
            ),
            blocking={"level": "user", "limit": limit, "used": waiting, "requested": more},
            extra={"rule": "waiting_at_once"},
        )


def running_room_check(*, user_id: int) -> None:
    """Blocked where the person holds as many requests as their limit allows."""
    limit = limits_of(user_id)["running_at_once"]
    if limit is None:
        return
    running = running_count(user_id)
    if running + 1 > limit:
        raise Blocked(
            code="running_limit",
            detail=_("Your limit: {used} run + 1 asked > {limit} running requests.").format(
                used=running, limit=limit
            ),
            blocking={"level": "user", "limit": limit, "used": running, "requested": 1},
            extra={"rule": "running_at_once"},
        )
