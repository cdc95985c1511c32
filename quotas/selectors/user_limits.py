"""Limits in force for a person, and what counts against them."""

from __future__ import annotations

from django.db.models import F, Sum

from portal.accounts.models import User
from quotas.models import CapacityRequest, UserLimit

FIELDS = (
    "gpus_at_once_milli", "longest_lease_s", "gpu_ms_per_month", "money_micro_per_month", "waiting_at_once",
    "running_at_once",
)  # fmt: skip
WAITING = ("in_approval", "returned", "needs_consent", "queued")


def limits_of(user_id: int) -> dict[str, int | None]:
    """The person's limits: own row first, else everybody's, else unlimited (None)."""
    rows = UserLimit.objects.filter(user_id=user_id) | UserLimit.objects.filter(user=None)
    row = rows.order_by(F("user_id").asc(nulls_last=True)).first()
    return {name: getattr(row, name) if row is not None else None for name in FIELDS}


def own_limits(user: User | None) -> dict[str, int | None]:
    """The limits of exactly this person (None: of everybody without own ones); unlimited where none are set."""
    row = UserLimit.objects.filter(user=user).first()
    return {name: getattr(row, name) if row is not None else None for name in FIELDS}


def held_milli(user_id: int, *, but_not: int | None = None) -> int:
    """Milli-GPU that the person's requests hold now (allocated, whether starting, running or ending)."""
    rows = CapacityRequest.objects.filter(requester_id=user_id, state=CapacityRequest.State.ALLOCATED)
    if but_not is not None:
        rows = rows.exclude(pk=but_not)
    return rows.aggregate(n=Sum("charge_milli"))["n"] or 0


def waiting_count(user_id: int, *, but_not: int | None = None) -> int:
    """Requests of a person that wait, for people or for GPUs; an array counts by its members."""
    rows = CapacityRequest.objects.filter(requester_id=user_id, state__in=WAITING)
    if but_not is not None:
        rows = rows.exclude(pk=but_not)
    return sum(max(1, count) for count in rows.values_list("array_count", flat=True))


def running_count(user_id: int) -> int:
    """Requests of a person that hold GPUs."""
    return CapacityRequest.objects.filter(requester_id=user_id, state=CapacityRequest.State.ALLOCATED).count()
