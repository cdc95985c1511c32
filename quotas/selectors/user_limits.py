"""Limits in force for a person, and what counts against them."""

from __future__ import annotations

from collections.abc import Collection

from django.db.models import F, Q, Sum

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


def held_by(user_ids: Collection[int], *, but_not: int | None = None) -> dict[int, tuple[int, int]]:
    """(milli-GPU, requests) that people hold now (allocated, whether starting, running or ending), by person.

    A request counts with what it holds, which is less than was asked where an elastic gang started smaller.
    """
    rows = CapacityRequest.objects.filter(requester_id__in=user_ids, state=CapacityRequest.State.ALLOCATED)
    if but_not is not None:
        rows = rows.exclude(pk=but_not)
    open_now = Sum("usage_spans__charge_milli", filter=Q(usage_spans__ended_at=None))
    found: dict[int, tuple[int, int]] = {}
    for user_id, asked, holds in rows.annotate(holds=open_now).values_list(
        "requester_id", "charge_milli", "holds"
    ):
        milli, count = found.get(user_id, (0, 0))
        found[user_id] = (milli + (asked if holds is None else min(asked, holds)), count + 1)
    return found


def held_flavours(user_id: int) -> tuple[int, list[tuple[str, int]]]:
    """(requests, [(flavour, milli-GPU)]) that one person holds now, the most first."""
    rows = CapacityRequest.objects.filter(requester_id=user_id, state=CapacityRequest.State.ALLOCATED)
    open_now = Sum("usage_spans__charge_milli", filter=Q(usage_spans__ended_at=None))
    found: dict[str, int] = {}
    count = 0
    for name, asked, holds in rows.annotate(holds=open_now).values_list(
        "flavour__name", "charge_milli", "holds"
    ):
        count += 1
        if name is not None:
            found[name] = found.get(name, 0) + (asked if holds is None else min(asked, holds))
    return count, sorted(found.items(), key=lambda item: (-item[1], item[0]))


def held_milli(user_id: int, *, but_not: int | None = None) -> int:
    """Milli-GPU that one person's requests hold now."""
    return held_by([user_id], but_not=but_not).get(user_id, (0, 0))[0]


def waiting_count(user_id: int, *, but_not: int | None = None) -> int:
    """Requests of a person that wait, for people or for GPUs; an array counts by its members."""
    rows = CapacityRequest.objects.filter(requester_id=user_id, state__in=WAITING)
    if but_not is not None:
        rows = rows.exclude(pk=but_not)
    return sum(max(1, count) for count in rows.values_list("array_count", flat=True))


def running_count(user_id: int) -> int:
    """Requests of a person that hold GPUs."""
    return CapacityRequest.objects.filter(requester_id=user_id, state=CapacityRequest.State.ALLOCATED).count()
