"""Requests as people may see them: lists, one request with its steps and history, the quota bars of a home
page.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.core.cache import cache
from django.db.models import Case, Count, IntegerField, Prefetch, Q, QuerySet, Sum, When
from redis import RedisError

from portal.accounts.models import Role
from portal.accounts.policy import DepartmentTree, Policy, Scope, policy_of
from portal.kernel.clock import now
from portal.kernel.units import MILLI_PER_GPU
from quotas.engine.available import headroom, over_by
from quotas.engine.ids import NodeId
from quotas.engine.tree import QuotaTree
from quotas.models import (
    ApprovalStep,
    CapacityRequest,
    Delegation,
    GpuFlavour,
    LedgerEntry,
    QuotaUsage,
    RequestEvent,
)
from quotas.selectors.fit import limit_of
from quotas.selectors.trees import INSTALLATION, parents_in, quota_trees
from quotas.transitions import REQUEST_OPEN

S = CapacityRequest.State


def principals_of(user_id: int) -> list[int]:
    """Whose deputy the person is now."""
    moment = now()
    rows = Delegation.objects.filter(
        deputy_id=user_id,
        starts_at__lte=moment,
        ends_at__gt=moment,
        revoked_at=None,
        principal__is_active=True,
    )
    return sorted(set(rows.values_list("principal_id", flat=True)))


def decides_scope(policy: Policy) -> Scope:
    """Departments whose steps the person may see and decide, as a deputy too; asked once per policy."""
    kept: Scope | None = getattr(policy, "kept_decides_scope", None)
    if kept is not None:
        return kept
    roles = (Role.LEAD, Role.POOL_ADMIN, Role.FINANCE)
    scope = policy.scope(*roles)
    for principal in Delegation.objects.filter(
        deputy=policy.user, starts_at__lte=now(), ends_at__gt=now(), revoked_at=None
    ).select_related("principal"):
        scope = scope | policy_of(principal.principal, policy.tree).scope(*roles)
    policy.kept_decides_scope = scope  # type: ignore[attr-defined]
    return scope


def visible_requests(policy: Policy) -> QuerySet[CapacityRequest]:
    """Own ones, and those of departments that the person reads or decides for (also as a deputy)."""
    scope = policy.reads | decides_scope(policy)
    return CapacityRequest.objects.filter(Q(requester=policy.user) | scope.q()).select_related(
        "flavour", "department", "requester"
    )


def with_open_step(rows: QuerySet[CapacityRequest]) -> QuerySet[CapacityRequest]:
    """With the steps of each, in order, as ``shown_steps``: one more query for any number of rows."""
    steps = ApprovalStep.objects.select_related("department", "decided_by").order_by("round", "position")
    return rows.prefetch_related(Prefetch("steps", queryset=steps, to_attr="shown_steps"))


def own_requests(user_id: int, *, limit: int) -> list[CapacityRequest]:
    """Open ones first, then the newest that ended."""
    rows = with_open_step(
        CapacityRequest.objects.filter(requester_id=user_id, head=None).select_related(
            "flavour", "department"
        )
    )
    ended = Case(When(state__in=REQUEST_OPEN, then=0), default=1, output_field=IntegerField())
    return list(rows.order_by(ended, "-id")[:limit])


NAMES_KEPT_SECONDS = 15


def flavour_names() -> dict[str, str]:
    """Code → name of all flavours; nearly every page wants them, so they are kept for some seconds."""

    def read() -> dict[str, str]:
        return dict(GpuFlavour.objects.order_by("pk").values_list("code", "name"))

    try:
        return cache.get_or_set("quotas-flavour-names", read, NAMES_KEPT_SECONDS) or {}
    except RedisError:
        return read()


@dataclass(frozen=True, slots=True)
class QuotaBar:
    """One department and flavour as a bar shows it; milli-GPU, ``limit`` None = unlimited.

    ``borrowed``: used above the guarantee, as far as borrowing goes; ``over``: above what is allowed since a
    limit fell; ``lent``: of the own guarantee, used by others now (the part of borrowed use that nothing else
    covers).
    """

    flavour: GpuFlavour
    used: int
    guaranteed: int
    limit: int | None
    borrowed: int
    lent: int
    over: int
    available: int


def quota_bar(tree: QuotaTree, flavour: GpuFlavour, department_id: int, lent: int = 0) -> QuotaBar:
    """The figures of one node of a tree."""
    used = tree.counters[department_id].total
    guaranteed = tree.guarantee(department_id)
    over = min(over_by(tree, department_id), used)
    return QuotaBar(
        flavour=flavour,
        used=used,
        guaranteed=guaranteed,
        limit=limit_of(tree, department_id),
        borrowed=max(0, used - guaranteed - over),
        lent=lent,
        over=over,
        available=headroom(tree, department_id, interruptible=True),
    )


def lent_now(tree: QuotaTree) -> dict[int, int]:
    """How much of its guarantee each department has lent now.

    What is borrowed (used above guarantees among siblings) is covered first by what the parent keeps free of
    its own, then by the unused guarantees of the siblings in proportion, as far as their lend limits go: in
    whole GPUs where the sum is whole, the largest remainders first, so that borrowed = own free part + lent,
    exactly, at every level.
    """
    lent: dict[int, int] = {}
    for parent, children in tree.children.items():
        borrowed = sum(max(0, tree.counters[c].total - tree.guarantee(c)) for c in children)
        direct = tree.counters[parent].total - sum(tree.counters[c].total for c in children)
        need = max(0, borrowed - max(0, tree.own[parent] - direct))
        spare = {c: _lendable(tree, c) for c in children}
        unit = MILLI_PER_GPU
        if need % unit or sum(s // unit for s in spare.values()) < need // unit:
            unit = 1
        spare = {c: s // unit for c, s in spare.items()}
        total = sum(spare.values())
        need = min(need // unit, total)
        if not need:
            continue
        shares = {c: divmod(need * s, total) for c, s in spare.items()}
        left = need - sum(whole for whole, _rest in shares.values())
        ranked = sorted(shares.items(), key=lambda kv: (-kv[1][1], str(kv[0])))
        for rank, (child, (whole, _rest)) in enumerate(ranked):
            lent[int(str(child))] = (whole + (1 if rank < left else 0)) * unit
    return lent


def _lendable(tree: QuotaTree, node: NodeId) -> int:
    """The unused part of a guarantee that may be lent."""
    unused = max(0, tree.guarantee(node) - tree.counters[node].total)
    limit = tree.nodes[node].lend_limit
    return unused if limit is None else min(unused, limit)


def department_bars(department_id: int, departments: DepartmentTree) -> list[QuotaBar]:
    """Bars of a department for every flavour of which it has a grant or use; three queries."""
    rows = QuotaUsage.objects.filter(department_id=department_id).filter(Q(granted=True) | Q(total__gt=0))
    flavours = [
        r.flavour for r in rows.select_related("flavour").order_by("flavour__position", "flavour__name")
    ]
    trees = quota_trees([f.pk for f in flavours], parents_in(departments)) if flavours else {}
    return [
        quota_bar(trees[f.pk], f, department_id, lent_now(trees[f.pk]).get(department_id, 0))
        for f in flavours
    ]


@dataclass(frozen=True, slots=True)
class Use30:
    """Allocated GPU-milliseconds of the last 30 days in the ledger, and asks that ended, released early
    among them.
    """

    gpu_ms: int
    ended: int
    released: int


def use_of_30_days(*, user_id: int, department_ids: Iterable[int]) -> tuple[Use30, Use30]:
    """What a person, and some departments, used in the last 30 days. Kept for a minute: an approver goes
    through several asks of the same people, and 30 days do not change in between.
    """
    ids = sorted(department_ids)
    key = f"quotas-use-30:{user_id}:{zlib.crc32(repr(ids).encode())}"
    try:
        person, group = cache.get_or_set(key, lambda: _use_of_30_days(user_id, ids), 60)
    except RedisError:
        person, group = _use_of_30_days(user_id, ids)
    return person, group


def _use_of_30_days(user_id: int, ids: list[int]) -> tuple[Use30, Use30]:
    since = now() - timedelta(days=30)
    person, group = Q(user_id_ref=user_id), Q(department_id_ref__in=ids)
    use = LedgerEntry.objects.filter(person | group, starts_at__gte=since).aggregate(
        person=Sum("gpu_ms", filter=person), group=Sum("gpu_ms", filter=group)
    )
    person, group, early = Q(requester_id=user_id), Q(department_id__in=ids), Q(end_reason="released")
    ended = CapacityRequest.objects.filter(person | group, state=S.ENDED, ended_at__gte=since).aggregate(
        person=Count("id", filter=person),
        person_early=Count("id", filter=person & early),
        group=Count("id", filter=group),
        group_early=Count("id", filter=group & early),
    )
    return (
        Use30(use["person"] or 0, ended["person"], ended["person_early"]),
        Use30(use["group"] or 0, ended["group"], ended["group_early"]),
    )


def other_open_asks(request: CapacityRequest) -> list[CapacityRequest]:
    """Other asks of the same department that are not decided or wait, newest first."""
    rows = CapacityRequest.objects.filter(
        department_id=request.department_id, state__in=[S.IN_APPROVAL, S.NEEDS_CONSENT, S.QUEUED]
    ).exclude(pk=request.pk)
    return list(rows.select_related("flavour").order_by("-id")[:8])


@dataclass(frozen=True, slots=True)
class Waits:
    """Waiting times of similar asks: from the queue to GPUs, seconds, middle 80 %, of ``count`` cases."""

    low_s: int
    high_s: int
    count: int


def waits_of(flavour_id: int, charge_milli: int) -> Waits | None:
    """The range of waits of asks of the same flavour and about the same size in 30 days; None below 5 cases:
    then there is no estimate.
    """
    since = now() - timedelta(days=30)
    rows = RequestEvent.objects.filter(
        kind="allocated",
        at__gte=since,
        request__flavour_id=flavour_id,
        request__charge_milli__lte=charge_milli * 2,
        request__charge_milli__gte=charge_milli // 2,
        request__queued_at__isnull=False,
    ).values_list("at", "request__queued_at")[:500]
    waits = sorted(max(0, int((at - queued).total_seconds())) for at, queued in rows if queued is not None)
    if len(waits) < 5:
        return None
    return Waits(waits[len(waits) // 10], waits[-1 - len(waits) // 10], len(waits))


def range_from(waits: Waits, moment: datetime) -> tuple[datetime, datetime]:
    """The range as times."""
    return moment + timedelta(seconds=waits.low_s), moment + timedelta(seconds=waits.high_s)


def free_of(trees: Mapping[int, QuotaTree], flavour: Any) -> int:
    """Milli-GPU of a flavour that are healthy and not used, by the counters."""
    capacity = getattr(flavour, "capacity", None)
    if capacity is None or flavour.pk not in trees:
        return 0
    return max(0, int(capacity.healthy_milli) - trees[flavour.pk].counters[INSTALLATION].total)
