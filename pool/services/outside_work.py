"""Work in an outside system that we did not ask for: strays of ours are ended, the rest is shown as foreign use.

Strays are runs that carry the uid of an allocation which is over (a start that was given up and came through later,
work on a node that was lost). A uid that this installation does not know is another one's: foreign, never touched.

Work of ours that the outside system put out for somebody else's leaves cards that are spoken for: whoever it made room
for begins there a moment later. Until that is seen, or for ``AWAITED_FOR``, nothing of ours is placed on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import structlog
from django.utils.dateparse import parse_datetime

from pool.executors.base import ExecutorFailure, Key, Observation, PolledExecutor, Work
from pool.models import Allocation, AllocationMember, Cluster, Gpu, Lease
from pool.services.conditions import gpu_foreign_use_set
from portal.kernel.clock import now
from portal.ops.services import incident_open

log = structlog.get_logger(__name__)
MOST_SHOWN = 200
PUT_OUT = frozenset({"preempted_outside", "preempted_there", "requeued_outside"})
"""Ends with which an outside system made room for other work (or may have: what it put back in line gave way)."""
AWAITED_FOR = timedelta(seconds=60)
"""So long at most cards wait for whoever they were taken for: a scheduler's slowest round over its line."""
M = AllocationMember.State


def others_take(
    *,
    cluster: Cluster,
    executor: PolledExecutor,
    others: list[Work],
    over: AbstractSet[Key] = frozenset(),
    put_out: AbstractSet[Key] = frozenset(),
) -> int:
    """End strays, note foreign work; returns how many strays were ended. ``over``: members of ours that this look saw
    ended. What they still lease counts as free, so that cards which others took from them are theirs before anything
    of ours is placed there again. ``put_out``: those of them that had to make room (``made_room``)."""
    uids = {work.uid for work in others if work.uid}
    ours = {row.uid: row for row in Allocation.objects.filter(uid__in=uids)} if uids else {}
    ended = 0
    foreign: list[Work] = []
    for work in others:
        row = ours.get(work.uid) if work.uid is not None else None
        if row is None:
            foreign.append(work)
        elif _is_over(row, work):
            ended += _end(cluster, executor, work)
    _foreign(cluster, foreign, over, put_out)
    return ended


def made_room(member: AllocationMember, seen: Observation) -> bool:
    """Whether the outside system ended this member for other work: by this look, or by an earlier one (what it put back
    in its line is ended here by us, and its cards are free only then)."""
    return (seen.error or {}).get("code") in PUT_OUT or member.allocation.error_code in PUT_OUT


def _is_over(row: Allocation, work: Work) -> bool:
    """Whether nothing of it may run: the allocation ended, or this member is through."""
    if row.state == Allocation.State.ENDED:
        # Cards of a fenced member are waited for, and looks ask for it: then it is no stray.
        return True
    if work.number is None:
        return False
    return AllocationMember.objects.filter(
        allocation=row, number=work.number, state=M.FREE, ordered_at__isnull=False
    ).exists()


def _end(cluster: Cluster, executor: PolledExecutor, work: Work) -> bool:
    try:
        executor.end(cluster=cluster, external_id=work.external_id)
    except ExecutorFailure as error:
        log.warning("stray_not_ended", cluster=cluster.code, work=work.external_id, code=error.code)
        return False
    incident_open(
        kind="stray_work",
        dedupe_key=f"stray_work:{cluster.uid}:{work.external_id}",
        subject=cluster,
        facts={"work": work.external_id, "allocation": str(work.uid), "nodes": list(work.nodes)},
    )
    return True


def _shown(work: Work) -> dict[str, Any]:
    return {
        "id": work.external_id,
        "name": work.name[:120],
        "user": work.user[:64],
        "account": work.account[:64],
        "nodes": list(work.nodes)[:64],
        "gpus": work.gpus,
        "started_at": work.started_at.isoformat() if work.started_at else None,
        "ends_at": work.ends_at.isoformat() if work.ends_at else None,
    }


def _foreign(
    cluster: Cluster, foreign: list[Work], over: AbstractSet[Key], put_out: AbstractSet[Key]
) -> None:
    shown = sorted((_shown(work) for work in foreign), key=lambda item: str(item["id"]))[:MOST_SHOWN]
    if shown != cluster.foreign_work:
        Cluster.objects.filter(pk=cluster.pk).update(foreign_work=shown)
        cluster.foreign_work = shown
    _mark_cards(cluster, foreign, over, put_out)


@dataclass
class _Use:
    """What foreign work uses of one node: cards by their index there, and how many more it has of which nobody told
    yet which (a job that just began)."""

    cards: dict[int, Work] = field(default_factory=dict)
    somewhere: list[Work] = field(default_factory=list)


def _uses(foreign: list[Work]) -> dict[str, _Use]:
    out: dict[str, _Use] = {}
    for work in foreign:
        for node, indexes in work.gpu_indexes.items():
            out.setdefault(node, _Use()).cards.update(dict.fromkeys(indexes, work))
        untold = work.gpus - sum(len(indexes) for indexes in work.gpu_indexes.values())
        silent = [node for node in work.nodes if not work.gpu_indexes.get(node)]
        for number, node in enumerate(silent):
            share = untold // len(silent) + (number < untold % len(silent))
            out.setdefault(node, _Use()).somewhere += [work] * max(0, share)
    return out


def _mark_cards(
    cluster: Cluster, foreign: list[Work], over: AbstractSet[Key], put_out: AbstractSet[Key]
) -> None:
    """Cards that foreign work uses take nothing of ours, nor do those that wait for the work they were taken for.

    Which card of a node an outside system gives is its own choice and need not be the one that a lease names: where
    the card it names is leased here, or it names none, a free one of the same kind stands for it, so that the numbers
    are right.
    """
    wanted = _uses(foreign)
    taken = _leased_by(cluster, put_out)
    marked = Gpu.objects.filter(node__cluster=cluster).exclude(foreign_use=[])
    names = set(wanted) | set(marked.values_list("node__name", flat=True)) | set(taken.values())
    if not names:
        return
    cards = list(
        Gpu.objects.filter(node__cluster=cluster, node__name__in=names)
        .exclude(condition=Gpu.Condition.RETIRED)
        .select_related("node")
        .order_by("node_id", "index")
    )
    held = Lease.objects.filter(gpu__in=cards, ended_at=None)
    leased = {
        gpu_id
        for gpu_id, uid, number in held.values_list("gpu_id", "allocation__uid", "member")
        if (uid, number) not in over
    }
    by_node: dict[str, list[Gpu]] = {}
    for card in cards:
        by_node.setdefault(card.node.name, []).append(card)
    at = now()
    for name, rows in by_node.items():
        awaited = _awaited(rows, taken, at)
        uses = _spread(rows, wanted.get(name, _Use()), leased, set(awaited))
        marks = {pk: [_process(work)] for pk, work in uses.items()}
        known = _beside(rows)
        came = sum(work.external_id not in known for work in uses.values())
        known |= {work.external_id for work in uses.values()}
        waiting = [pk for pk in awaited if pk not in uses]
        for pk in waiting[: max(0, len(awaited) - came)]:
            marks[pk] = [{**awaited[pk], "beside": sorted(known)}]
        for card in rows:
            processes = marks.get(card.pk, [])
            if card.foreign_use != processes:
                gpu_foreign_use_set(gpu=card, processes=processes)


def _leased_by(cluster: Cluster, members: AbstractSet[Key]) -> dict[int, str]:
    """Cards that these members still lease, with their nodes' names."""
    if not members:
        return {}
    rows = Lease.objects.filter(
        gpu__node__cluster=cluster, allocation__uid__in={uid for uid, _number in members}, ended_at=None
    )
    return {
        gpu_id: node
        for gpu_id, node, uid, number in rows.values_list(
            "gpu_id", "gpu__node__name", "allocation__uid", "member"
        )
        if (uid, number) in members
    }


def _beside(rows: list[Gpu]) -> set[str]:
    """Foreign work on the node that its awaited cards do not wait for: it was seen there before."""
    for card in rows:
        for item in card.foreign_use:
            if item.get("awaited"):
                return set(item.get("beside") or ())
    return {str(item.get("work")) for card in rows for item in card.foreign_use}


def _awaited(rows: list[Gpu], taken: Mapping[int, str], at: datetime) -> dict[int, dict[str, Any]]:
    """Cards of a node that wait for whoever they were taken for, with the mark each bears."""
    out: dict[int, dict[str, Any]] = {}
    for card in rows:
        bears = next((item for item in card.foreign_use if item.get("awaited")), None)
        if bears is not None:
            since = parse_datetime(str(bears.get("since") or ""))
            if card.pk in taken or (since is not None and since > at - AWAITED_FOR):
                out[card.pk] = bears
        elif card.pk in taken:
            out[card.pk] = {
                "pid": None, "name": "", "user": "", "mem_mib": None, "work": "", "awaited": True,
                "since": at.isoformat(),
            }  # fmt: skip
    return out


def _process(work: Work) -> dict[str, Any]:
    return {
        "pid": None,
        "name": work.name[:120],
        "user": work.user[:64],
        "mem_mib": None,
        "work": work.external_id,
        "since": work.started_at.isoformat() if work.started_at else None,
    }


def _spread(rows: list[Gpu], use: _Use, leased: set[int], awaited: set[int]) -> dict[int, Work]:
    """Which card stands for which foreign work: its own where that is not leased, else a free one alike; those that
    wait for somebody first."""
    uses: dict[int, Work] = {}
    moved: list[tuple[int | None, Work]] = []
    by_index = {card.index: card for card in rows}
    for index, work in sorted(use.cards.items()):
        card = by_index.get(index)
        if card is None:
            continue
        if card.pk in leased:
            moved.append((card.flavour_id, work))
        else:
            uses[card.pk] = work
    moved += [(None, work) for work in use.somewhere]
    first = sorted(rows, key=lambda card: card.pk not in awaited)  # stable: by index after that
    for flavour, work in moved:
        found = next(
            (
                card
                for card in first
                if card.pk not in leased and card.pk not in uses and flavour in (None, card.flavour_id)
            ),
            None,
        )
        if found is not None:
            uses[found.pk] = work
    return uses
