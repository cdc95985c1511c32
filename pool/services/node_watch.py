"""Nodes that fall silent: late → suspect → lost, and what becomes of their work.

A lost node's work is stopped and goes back to its old place in line once it is fenced: either the node is
back and its cards were seen free, or the fencing time-out passed. Its cards stay held until they were seen
free.

Silence counts only while somebody listened: where this installation was stopped, its nodes are judged from when it
listens again (``listening_since``), so that a restart, an upgrade or an hour without power here costs no work there.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from django.db import transaction
from django.db.models import Q

from pool.locks import allocation_lock
from pool.models import Allocation, AllocationEvent, AllocationMember, Node, ReclaimCase
from pool.services import stopping
from pool.services.capacity import capacity_refresh
from pool.services.fencing import member_fence
from pool.transitions import LIVE, MEMBER_GONE
from portal.kernel.clock import now
from portal.kernel.models import advance
from portal.ops.actor import system
from portal.ops.models import TaskRun
from portal.ops.outbox import outbox_add
from portal.ops.services import audit_record, incident_open

SYSTEM = system("node watch")
H = Node.Health
M = AllocationMember.State
STEPS: tuple[tuple[timedelta, str], ...] = (
    (timedelta(seconds=120), H.LOST),
    (timedelta(seconds=45), H.SUSPECT),
    (timedelta(seconds=15), H.LATE),
)
RANK = {H.OK: 0, H.LATE: 1, H.SUSPECT: 2, H.LOST: 3}
FENCE_AFTER = timedelta(minutes=5)
DEAF_AFTER = timedelta(seconds=45)
"""So long without a sweep and without a group of heartbeats: the installation itself was away."""
WATCH = "pool.node_watch"


def listening_since() -> datetime:
    """Stamp that the watch goes on, and tell since when it has without a break. One row: begun, last stamp.

    Called by each sweep, and now and then by whoever takes heartbeats (``pool.live.heartbeats``): workers that are
    merely late beside a web process that hears agents are no break. A heartbeat that comes after a break is none
    either way: it says nothing of the time in which nobody could have heard the others.
    """
    at = now()
    with transaction.atomic():
        row = TaskRun.objects.select_for_update().filter(name=WATCH).order_by("-id").first()
        if row is None:
            TaskRun.objects.create(name=WATCH, started_at=at, ended_at=at)
            return at
        broken = row.ended_at is None or row.ended_at < at - DEAF_AFTER
        since = at if broken else row.started_at
        TaskRun.objects.filter(pk=row.pk).update(started_at=since, ended_at=at)
    return since


def nodes_sweep(*, listening: datetime | None = None) -> dict[str, int]:
    """Judge every node by its last sign of life, then fence what was lost for long. Returns counts.

    ``listening``: since when signs of life could be heard here (None: always); an earlier silence is nobody's.
    """
    at = now()
    done = {"changed": 0, "lost": 0, "fenced": 0}
    # Of nodes behind an outside system nothing is known while that is away: they are not heard of, nor are they lost.
    unseen = Q(cluster__away_since__isnull=False) | Q(cluster__looked_at__lt=at - STEPS[-1][0])
    silent = (
        Node.objects.filter(last_heartbeat_at__lte=at - STEPS[-1][0])
        .exclude(health__in=[H.LOST, H.UNKNOWN])
        .exclude(unseen)
    )
    for node in silent.order_by("id"):
        health = health_at(node, at, listening)
        if RANK[H(health)] > RANK[H(node.health)] and _worse(node, health, at):
            done["changed"] += 1
            done["lost"] += health == H.LOST
    lost = AllocationMember.objects.filter(state=M.LOST, fenced_at=None, ended_at__lte=at - FENCE_AFTER)
    for member in lost.order_by("id").values_list("pk", "allocation_id"):
        done["fenced"] += member_fence(member_id=member[0], allocation_id=member[1])
    return done


def health_at(node: Node, at: datetime, listening: datetime | None = None) -> str:
    """What the silence of a node means at a moment; ``listening`` as in ``nodes_sweep``."""
    heard = node.last_heartbeat_at
    if heard is not None and listening is not None:
        heard = max(heard, listening)
    silence = at - heard if heard else timedelta(0)
    return next((health for after, health in STEPS if silence >= after), H.OK)


def _worse(node: Node, health: str, at: datetime) -> bool:
    """One step down, unless the node was heard of meanwhile; a lost one gives up its work."""
    with transaction.atomic():
        changed = advance(
            Node.objects.filter(pk=node.pk, last_heartbeat_at=node.last_heartbeat_at, health=node.health),
            health=health,
            health_since=at,
        )
        if not changed:
            return False
        outbox_add(
            "pool.node_state",
            {"node_uid": str(node.uid), "health": str(health), "was": str(node.health)},
            key=node.name,
        )
        if health == H.LOST:
            facts = {
                "last_heartbeat_at": node.last_heartbeat_at.isoformat() if node.last_heartbeat_at else None
            }
            incident_open(
                kind="node_lost",
                dedupe_key=f"node_lost:{node.uid}",
                severity="critical",
                subject=node,
                facts=facts,
            )
            audit_record(
                acting_user=SYSTEM,
                action="node.lost",
                subject=node,
                before={"health": str(node.health)},
                after={"health": "lost"},
            )
            capacity_refresh()
    if health == H.LOST:
        for allocation_id in (
            AllocationMember.objects.filter(node=node)
            .exclude(allocation__state=Allocation.State.ENDED)
            .order_by("allocation_id")
            .values_list("allocation_id", flat=True)
        ):
            node_lost_stop(node=node, allocation_id=allocation_id, at=at)
    return True


def node_lost_stop(*, node: Node, allocation_id: int, at: datetime) -> None:
    """An allocation with a part on a lost node: that part is lost, the rest of the gang is stopped."""
    with transaction.atomic():
        allocation = allocation_lock(allocation_id)
        changed = (
            AllocationMember.objects.filter(allocation=allocation, node=node)
            .exclude(state__in=MEMBER_GONE)
            .update(state=M.LOST, ended_at=at)
        )
        # A member that had ended but whose cards nobody can look at now is in the same case.
        changed += AllocationMember.objects.filter(allocation=allocation, node=node, state=M.EXITED).update(
            state=M.LOST
        )
        if not changed:
            return
        AllocationEvent.objects.create(
            allocation=allocation,
            at=at,
            kind="member_lost",
            actor_name=SYSTEM.name,
            facts={"node": node.name},
        )
        if allocation.state in LIVE:
            stopping.stop(
                acting_user=SYSTEM,
                allocation_id=allocation.pk,
                cause=ReclaimCase.Cause.NODE_LOST,
                rule="node_lost",
                grace_s=stopping.GANG_GRACE_S,
            )
