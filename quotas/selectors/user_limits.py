"""Limits in force for a person, and what counts against them."""

from __future__ import annotations

from django.db.models import F, Sum

from quotas.models import CapacityRequest, UserLimit

FIELDS = ("gpus_at_once_milli", "longest_lease_s", "gpu_ms_per_month", "money_micro_per_month")


def limits_of(user_id: int) -> dict[str, int | None]:
    """The person's limits: own row first, else everybody's, else unlimited (None)."""
    rows = UserLimit.objects.filter(user_id=user_id) | UserLimit.objects.filter(user=None)
    row = rows.order_by(F("user_id").asc(nulls_last=True)).first()
    return {name: getattr(row, name) if row is not None else None for name in FIELDS}


def held_milli(user_id: int, *, but_not: int | None = None) -> int:
    """Milli-GPU that the person's requests hold now (allocated, whether starting, running or ending)."""
    rows = CapacityRequest.objects.filter(requester_id=user_id, state=CapacityRequest.State.ALLOCATED)
    if but_not is not None:
        rows = rows.exclude(pk=but_not)
    return rows.aggregate(n=Sum("charge_milli"))["n"] or 0
