"""Work in an outside system that we did not ask for: strays of ours are ended, the rest is shown as foreign use.

Strays are runs that carry the uid of an allocation which is over (a start that was given up and came through later,
work on a node that was lost). A uid that this installation does not know is another one's: foreign, never touched.
"""

from __future__ import annotations

from typing import Any

import structlog

from pool.executors.base import ExecutorFailure, Key, PolledExecutor, Work
from pool.models import Allocation, AllocationMember, Cluster, Gpu, Lease
from pool.services.conditions import gpu_foreign_use_set
from portal.ops.services import incident_open

log = structlog.get_logger(__name__)
MOST_SHOWN = 200
M = AllocationMember.State


def others_take(
    *,
    cluster: Cluster,
    executor: PolledExecutor,
    others: list[Work],
    over: set[Key] | frozenset[Key] = frozenset(),
) -> int:
    """End strays, note foreign work; returns how many strays were ended. ``over``: members of ours that this look saw
    ended. What they still lease counts as free, so that cards which others took from them are theirs before anything
    of ours is placed there again."""
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
    _foreign(cluster, foreign, over)
    return ended


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


def _foreign(cluster: Cluster, foreign: list[Work], over: set[Key] | frozenset[Key]) -> None:
    shown = sorted((_shown(work) for work in foreign), key=lambda item: str(item["id"]))[:MOST_SHOWN]
    if shown != cluster.foreign_work:
        Cluster.objects.filter(pk=cluster.pk).update(foreign_work=shown)
        cluster.foreign_work = shown
    _mark_cards(cluster, foreign, over)


def _mark_cards(cluster: Cluster, foreign: list[Work], over: set[Key] | frozenset[Key]) -> None:
    """Cards that foreign work uses take nothing of ours.

    Which card of a node an outside system gives is its own choice and need not be the one that a lease names: where
    the card it names is leased here, a free one of the same kind stands for it, so that the numbers are right.
    """
    wanted: dict[str, dict[int, Work]] = {}
    for work in foreign:
        for node, indexes in work.gpu_indexes.items():
            wanted.setdefault(node, {}).update(dict.fromkeys(indexes, work))
    marked = Gpu.objects.filter(node__cluster=cluster).exclude(foreign_use=[])
    names = set(wanted) | set(marked.values_list("node__name", flat=True))
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
    for name, rows in by_node.items():
        uses = _spread(rows, wanted.get(name, {}), leased)
        for card in rows:
            processes = [_process(uses[card.pk])] if card.pk in uses else []
            if card.foreign_use != processes:
                gpu_foreign_use_set(gpu=card, processes=processes)


def _process(work: Work) -> dict[str, Any]:
    return {
        "pid": None,
        "name": work.name[:120],
        "user": work.user[:64],
        "mem_mib": None,
        "work": work.external_id,
        "since": work.started_at.isoformat() if work.started_at else None,
    }


def _spread(rows: list[Gpu], wanted: dict[int, Work], leased: set[int]) -> dict[int, Work]:
    """Which card stands for which foreign work: its own where that is not leased, else the first free one alike."""
    uses: dict[int, Work] = {}
    moved: list[tuple[Gpu, Work]] = []
    by_index = {card.index: card for card in rows}
    for index, work in sorted(wanted.items()):
        card = by_index.get(index)
        if card is None:
            continue
        if card.pk in leased:
            moved.append((card, work))
        else:
            uses[card.pk] = work
    for card, work in moved:
        alike = (
            other
            for other in rows
            if other.flavour_id == card.flavour_id and other.pk not in leased and other.pk not in uses
        )
        found = next(alike, None)
        if found is not None:
            uses[found.pk] = work
    return uses
