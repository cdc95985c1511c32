"""What pool listens to in the outbox. Handlers are idempotent: delivery is at least once."""

from __future__ import annotations

from typing import Any

from django.db import transaction

from pool.services.allocations import allocations_suspend
from pool.services.letting_go import allocation_let_go
from pool.services.rolling import EMPTIES, replicas_roll
from pool.tasks import schedule_cycle
from portal.ops.outbox import subscribe


def plan_soon(payload: dict[str, Any]) -> None:
    """Something changed that may let a request start, or leave: plan once more, after this is committed."""
    transaction.on_commit(lambda: schedule_cycle.apply_async(("event",), retry=False), robust=True)


def user_suspended(payload: dict[str, Any]) -> None:
    """A suspended person's work ends with the usual grace, unless it was to go on."""
    if payload.get("leases") == "keep":
        return
    allocations_suspend(user_uid=str(payload["user"]), reason=str(payload.get("reason") or ""))


def let_go(payload: dict[str, Any]) -> None:
    """A replica too many, a service that was not renewed, a series taken back: what it holds is released."""
    allocation_let_go(request_uid=str(payload["request"]), cause=str(payload.get("cause") or ""))


def roll(payload: dict[str, Any]) -> None:
    """A node is to be emptied: replicas there are asked for elsewhere at once. The sweep does the rest."""
    if payload.get("cause") == EMPTIES:
        replicas_roll()


for topic in (
    "quotas.request_queued",
    "quotas.request_withdrawn",
    "quotas.request_changed",
    "quotas.limits_changed",
    "pool.allocation_ended",
    "pool.capacity_changed",
    "pool.policy_published",
):
    subscribe(topic, "pool.subscriptions.plan_soon")
subscribe("pool.agent_event", "pool.services.layouts.layout_answered")
subscribe("pool.agent_event", "pool.services.work_news.work_news")
subscribe("pool.allocation_reclaim", "pool.subscriptions.roll")
subscribe("quotas.let_go", "pool.subscriptions.let_go")
subscribe("accounts.user_suspended", "pool.subscriptions.user_suspended")
