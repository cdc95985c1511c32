"""The pool's own past as the engine plays it: who asked in a period, and the fleet, quotas and policy of that time.

What is read as it was: the asks with their arrival, the time each held GPUs, the grants and the policy version in force
at the period's beginning. What is read as it is now: departments, and the fleet with every card in service.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from django.db.models import Q

from pool.engine.model import EvictCause, Node
from pool.engine.past import Piece, Played, Run, Setting
from pool.models import Allocation, SchedulingPolicy
from pool.selectors.planner_nodes import facts_of, nodes_read
from pool.selectors.planner_queue import COLUMNS, item_of
from pool.services.snapshot import policy_from
from portal.kernel.units import to_ms
from quotas.engine.tree import QuotaNode
from quotas.models import CapacityRequest, GpuFlavour, QuotaGrant
from quotas.selectors.trees import UsageNumbers, build_tree, department_parents

WARM_UP = timedelta(hours=24)
"""So long before the period the play begins, so that it finds the pool at work."""

GONE = (CapacityRequest.State.ENDED, CapacityRequest.State.WITHDRAWN, CapacityRequest.State.REJECTED)
TAKEN: dict[str, EvictCause] = {
    str(Allocation.EndReason.RECLAIMED): "reclaim",
    str(Allocation.EndReason.OVER_QUOTA): "reclaim",
    str(Allocation.EndReason.PREEMPTED): "preempt",
}


@dataclass(frozen=True, slots=True)
class Past:
    """``recorded``: what really happened, in the form of a played past."""

    pieces: tuple[Piece, ...]
    recorded: Played
    since: int
    until: int
    refs: dict[int, str]


class _Held(NamedTuple):
    request_id: int
    flavour: str | None
    charge: int
    start: int
    end: int
    open: bool
    reason: str


def pool_past(since: datetime, until: datetime, flavour: GpuFlavour | None = None) -> Past:
    """Everybody who waited or held GPUs in the period or shortly before it; of one flavour where one is named."""
    warm, last = to_ms(since - WARM_UP), to_ms(until)
    held = _held(since - WARM_UP, until)
    pieces, runs, refs = [], [], {}
    for row in _requests(since - WARM_UP, until):
        item = item_of(row, row.flavour__code)
        if flavour is not None:
            if flavour.code not in item.flavours:
                continue
            item = replace(item, flavours=(flavour.code,))
        arrives = max(item.queued_at, item.start_at or 0, warm)
        item = replace(item, start_at=None, deadline_at=None)
        own = held.get(row.id, [])
        begun = [one for one in own if one.start < last]
        if own:
            needs = sum(one.end - max(one.start, warm) for one in own)
            leaves = None
            arrives = min(arrives, max(warm, own[0].start))
        else:
            needs = item.duration_ms or max(1, last - arrives)
            leaves = to_ms(row.state_since) if row.state in GONE else None
        if leaves is not None and leaves <= arrives:
            continue
        pieces.append(Piece(item, arrives, max(1, needs), leaves))
        refs[row.id] = f"R-{row.id}"
        runs += [
            Run(
                row.id,
                one.flavour or "",
                "",
                one.charge,
                max(one.start, warm),
                min(one.end, last),
                _ending(one, last),
                TAKEN.get(one.reason),
            )
            for one in begun
            if flavour is None or one.flavour == flavour.code
        ]
    ran = {run.request_id for run in runs}
    left = {p.request.id: p.leaves for p in pieces if p.leaves is not None and p.leaves < last}
    waiting = sorted(p.request.id for p in pieces if p.request.id not in ran and p.request.id not in left)
    return Past(tuple(pieces), Played(runs, waiting, left), to_ms(since), last, refs)


def _ending(one: _Held, last: int) -> Any:
    if one.open or one.end > last:
        return None
    return "taken" if one.reason in TAKEN else "finish"


def _held(since: datetime, until: datetime) -> dict[int, list[_Held]]:
    """Holdings by request in order of time: from the decision until seen free. What still holds ends when it is due,
    at the period's end at the earliest."""
    found: dict[int, list[_Held]] = defaultdict(list)
    rows = (
        Allocation.objects.filter(Q(ended_at=None) | Q(ended_at__gt=since), charge_milli__gt=0)
        .filter(request__queued_at__lt=until)
        .order_by("reserved_at", "id")
        .values_list(
            "request_id",
            "flavour__code",
            "charge_milli",
            "reserved_at",
            "ended_at",
            "expires_at",
            "end_reason",
        )
    )
    for request_id, code, charge, start, ended, expires, reason in rows.iterator(chunk_size=5000):
        end = ended or max(until, expires or until)
        found[request_id].append(
            _Held(
                request_id, code, charge, to_ms(start), max(to_ms(end), to_ms(start)), ended is None, reason
            )
        )
    return found


def _requests(since: datetime, until: datetime) -> Iterable[Any]:
    """Single asks and members of series that were in line or held GPUs between the two moments."""
    alive = Q(ended_at__gt=since) | ~Q(state__in=GONE) | Q(ended_at=None, state_since__gt=since)
    rows = (
        CapacityRequest.objects.filter(alive, queued_at__lt=until, series="")
        .exclude(shape=CapacityRequest.Shape.CPU)
        .order_by("id")
    )
    return rows.values_list(*COLUMNS, "state_since", named=True).iterator(chunk_size=5000)


def pool_setting(since: datetime, flavour: GpuFlavour | None = None) -> Setting:
    """Fleet, quotas and policy for a period that begins at a moment."""
    flavours = [flavour] if flavour is not None else list(GpuFlavour.objects.all())
    codes = {one.pk: one.code for one in flavours}
    nodes = tuple(
        found
        for node in nodes_read(list(GpuFlavour.objects.all())).values()
        if (found := _in_service(node, set(codes.values()))).gpus
    )
    cards: dict[str, int] = defaultdict(int)
    for node in nodes:
        for gpu in node.gpus:
            cards[gpu.flavour] += 1
    version = policy_then(since)
    return Setting(
        nodes=nodes,
        flavours=tuple(facts_of(one) for one in flavours),
        quotas=_quotas(since, codes, cards),
        policy=policy_from(version.values if version is not None else {}),
    )


def policy_then(moment: datetime) -> SchedulingPolicy | None:
    """The version in force at a moment; before the first one that was published, that one; None without any."""
    published = SchedulingPolicy.objects.filter(published_at__isnull=False)
    return (
        published.filter(published_at__lte=moment).order_by("-published_at").first()
        or published.order_by("published_at").first()
    )


def _in_service(node: Node, codes: set[str]) -> Node:
    gpus = tuple(replace(gpu, blocked=None) for gpu in node.gpus if gpu.flavour in codes)
    return replace(node, gpus=gpus, blocked=None, caution=False)


def _quotas(
    since: datetime, codes: dict[int, str], cards: dict[str, int]
) -> dict[str, tuple[QuotaNode, ...]]:
    """Trees from the grants in force at a moment; a department that got its first one later has that."""
    rows: dict[int, dict[int, UsageNumbers]] = defaultdict(dict)
    grants = QuotaGrant.objects.filter(flavour_id__in=codes).filter(
        Q(during__contains=since) | Q(during__startswith__gt=since)
    )
    for grant in grants.order_by("during", "id"):
        rows[grant.flavour_id].setdefault(
            grant.department_id,
            UsageNumbers(
                grant.department_id,
                grant.flavour_id,
                True,
                grant.guaranteed,
                grant.borrow_limit,
                grant.lend_limit,
                grant.hard_cap,
                grant.weight,
                0,
                0,
            ),
        )
    parents = department_parents()
    return {
        code: build_tree(parents, rows[pk].values(), 1000 * cards.get(code, 0)).snapshot()
        for pk, code in codes.items()
    }
