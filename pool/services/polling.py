"""Looks at outside systems (Slurm, Kubernetes): what a look found becomes the same reports that agents send.

This is also the reconcile of what should run with what does, both ways: each look is complete, so whatever was missed
(an answer, a look, a day) is made good by the next one. What should run and is not there any more ends here as
vanished; what runs there and should not is ended (``outside_work``). A look that did not come about concludes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import structlog
from django.core.cache import cache
from django.db import connection, transaction

from pool.executors.base import ExecutorFailure, Observation, PolledExecutor, polled_executor
from pool.locks import allocation_lock
from pool.models import Allocation, AllocationMember, Cluster, Lease, Node
from pool.rubbish import rubbish_left
from pool.services.execution import allocation_start
from pool.services.member_reports import member_ended, member_free, member_running, member_starting
from pool.services.outside_away import cluster_answers, cluster_away
from pool.services.outside_nodes import nodes_take
from pool.services.outside_work import made_room, others_take
from portal.kernel.clock import now

log = structlog.get_logger(__name__)
A = Allocation.State
M = AllocationMember.State
OPEN_STATES = (M.RESERVED, M.STARTING, M.RUNNING, M.EXITED, M.LOST)
IN_FLIGHT = timedelta(seconds=30)
"""So long after an order was sent it may still arrive: only then "unknown" means that it never did."""
KILL_AGAIN = timedelta(seconds=10)
UP = (Node.Health.OK, Node.Health.LATE)
VANISHED = {
    "code": "work_vanished",
    "detail": "The outside system does not know this work any more.",
    "retryable": True,
}
REQUEUED = {
    "code": "requeued_outside",
    "detail": "The outside system put this work back in its own line.",
    "retryable": True,
}


NODES_EVERY_S = 5
AWAY_EVERY = timedelta(seconds=5)


def clusters_polled() -> list[int]:
    """Clusters that must be looked at, by id."""
    rows = Cluster.objects.exclude(executor=Cluster.Executor.AGENT).order_by("id")
    return [cluster.pk for cluster in rows if cluster.settings.get("active", True)]


def poll_due(*, cluster_id: int) -> bool:
    """Whether to ask now: always, but one that is away is not asked every second."""
    row = Cluster.objects.values("away_since", "id").get(pk=cluster_id)
    return row["away_since"] is None or cache.add(
        f"pool.poll.away.{cluster_id}", 1, AWAY_EVERY.total_seconds()
    )


def nodes_due(*, cluster_id: int) -> bool:
    """Whether this look is one that looks at the nodes too."""
    return cache.add(f"pool.poll.nodes.{cluster_id}", 1, NODES_EVERY_S)


@dataclass
class Polled:
    """What one look led to."""

    answered: bool = True
    members: int = 0
    reports: int = 0
    kills: int = 0
    started: int = 0
    strays: int = 0
    nodes: int = 0
    code: str = ""
    touched: list[int] = field(default_factory=list)


ALLOCATION_COLUMNS = (
    "id", "uid", "state", "error_code", "grace_until", "expires_at", "retry_at", "request_id", "holder_id",
    "department_id",
)  # fmt: skip
"""What a look reads of an allocation; the rest comes by itself where somebody needs it (a stop, an order)."""


_OPEN = """
    SELECT m.id, m.allocation_id, m.xmin::text, a.xmin::text
    FROM {member} m JOIN {allocation} a ON a.id = m.allocation_id JOIN {node} n ON n.id = m.node_id
    WHERE n.cluster_id = %s AND m.state = ANY(%s) AND (m.ordered_at IS NOT NULL OR m.external_id <> '')
    ORDER BY m.id
"""
"""Which members are open, with the versions that PostgreSQL itself gives to their rows (any change gives a new one)."""

_kept: dict[int, dict[int, tuple[tuple[int, str, str], AllocationMember]]] = {}
"""By cluster and member: the row as the last look of this process read it, with its version. It may be lost."""


def open_members(cluster: Cluster) -> list[AllocationMember]:
    """Members on a cluster that an outside system was told of and whose cards were not seen free yet, by id.

    Thousands, each second, of which few changed: only those are read again, without their requests, and with one object
    for each node and for the cluster, whose JSON would else be read anew for each of them.
    """
    nodes = Node.objects.filter(cluster=cluster).defer("facts", "labels").in_bulk()
    for node in nodes.values():
        node.cluster = cluster
    names = {
        name: connection.ops.quote_name(model._meta.db_table)
        for name, model in (("member", AllocationMember), ("allocation", Allocation), ("node", Node))
    }
    with connection.cursor() as cursor:
        cursor.execute(_OPEN.format(**names), [cluster.pk, [str(state) for state in OPEN_STATES]])
        now_open = {pk: (allocation, mine, its) for pk, allocation, mine, its in cursor.fetchall()}
    before = _kept.get(cluster.pk, {})
    kept = {pk: before[pk] for pk, version in now_open.items() if pk in before and before[pk][0] == version}
    changed = [pk for pk in now_open if pk not in kept]
    allocations = (
        Allocation.objects.only(*ALLOCATION_COLUMNS).in_bulk({now_open[pk][0] for pk in changed})
        if changed
        else {}
    )
    for member in AllocationMember.objects.filter(pk__in=changed) if changed else ():
        if member.allocation_id in allocations:
            member.allocation = allocations[member.allocation_id]
            # What changed since the versions were read is read again by the next look: its version is older.
            kept[member.pk] = (now_open[member.pk], member)
    _kept[cluster.pk] = kept
    # One that begins, or moves, between these queries is of the next look.
    members = [kept[pk][1] for pk in now_open if pk in kept and kept[pk][1].node_id in nodes]
    for member in members:
        member.node = nodes[member.node_id]
        # Requests and people that somebody asked for at an earlier look may have changed since.
        member.allocation._state.fields_cache.clear()
    return members


def cluster_poll(*, cluster_id: int, nodes: bool = False) -> Polled:
    """Look at a cluster once and take what was found; the caller sees to it that only one does so at a time."""
    cluster = Cluster.objects.get(pk=cluster_id)
    executor = polled_executor(cluster)
    if executor is None:
        return Polled(answered=False, code="not_polled")
    began = now()
    try:
        with rubbish_left():
            members = open_members(cluster)
            done = Polled(members=len(members))
            look = executor.look(cluster=cluster, members=members, nodes=nodes)
    except ExecutorFailure as error:
        cluster_away(cluster=cluster, error=error, at=began)
        return Polled(answered=False, members=len(members), code=error.code)
    cluster_answers(cluster=cluster, at=began)
    if look.nodes is not None:
        done.nodes = nodes_take(cluster=cluster, executor=executor, found=look.nodes, at=began)
    over = {key for key, seen in look.members.items() if seen.state not in ("starting", "running")}
    put_out = {
        key
        for member in members
        if (key := (member.allocation.uid, member.number)) in over and made_room(member, look.members[key])
    }
    done.strays = others_take(
        cluster=cluster, executor=executor, others=look.others, over=over, put_out=put_out
    )
    for member in members:
        seen = look.members.get((member.allocation.uid, member.number))
        if seen is None:
            continue  # nothing could be learnt of it this time
        if _is_news(member, seen) and _take(member, seen, began):
            done.reports += 1
            done.touched.append(member.pk)
        done.kills += _end_what_must(executor, member, seen, began)
    done.started = _order_again(members, look.members, began)
    return done


def _is_news(member: AllocationMember, seen: Observation) -> bool:
    """Whether what was seen may change the member's row; most looks at most members end here."""
    if seen.state == "starting":
        return member.state in (M.RESERVED, M.RUNNING)
    if seen.state == "running":
        return member.state in (M.RESERVED, M.STARTING)
    if seen.state == "exited":
        return member.state != M.EXITED
    return True  # free or unknown: every open member has something to learn from that


def _take(member: AllocationMember, seen: Observation, began: datetime) -> bool:
    """Write one observation to a member as it is now; whether it changed."""
    with transaction.atomic():
        allocation = allocation_lock(member.allocation_id)
        row = (
            AllocationMember.objects.select_for_update(of=("self",), no_key=True)
            .select_related("node")
            .get(pk=member.pk)
        )
        row.allocation = allocation
        before = row.state
        if seen.state == "unknown":
            _take_unknown(row, allocation, began)
        elif seen.state == "starting":
            _take_starting(row, seen)
        elif seen.state == "running":
            if row.state in (M.RESERVED, M.STARTING):
                member_running(
                    member=row,
                    at=seen.started_at or began,
                    pid=seen.pid,
                    account=seen.account[:64],
                    external_id=seen.external_id[:120],
                )
        elif seen.state in ("exited", "free"):
            _take_end(row, seen, began)
        row.refresh_from_db(fields=["state"])
        return bool(row.state != before)


def _take_starting(row: AllocationMember, seen: Observation) -> None:
    if row.state == M.RUNNING:
        # Put back in line over there: it is back in line here instead, at its old place.
        _ended(row, REQUEUED | ({"detail": seen.detail} if seen.detail else {}), now())
        return
    if seen.external_id and row.external_id != seen.external_id:
        AllocationMember.objects.filter(pk=row.pk).update(external_id=seen.external_id[:120])
    member_starting(member=row)


def _take_end(row: AllocationMember, seen: Observation, began: datetime) -> None:
    if row.state == M.LOST and row.node.health not in UP:
        return  # nobody can look at its cards: fencing decides
    if row.state not in (M.EXITED, M.FREE):
        at = seen.ended_at or began
        if seen.started_at is not None and row.state in (M.RESERVED, M.STARTING) and not seen.failed_start:
            # It ran and ended between two looks.
            member_running(
                member=row,
                at=seen.started_at,
                pid=seen.pid,
                account=seen.account[:64],
                external_id=seen.external_id[:120],
            )
        member_ended(
            member=row,
            at=at,
            exit_code=seen.exit_code,
            signal=seen.signal,
            error=seen.error,
            failed_start=seen.failed_start,
        )
    if seen.state == "free" and row.node.health in UP:
        _free(row, began)


def _take_unknown(row: AllocationMember, allocation: Allocation, began: datetime) -> None:
    if row.state == M.RESERVED:
        # Its order may be on its way; given up by us and not arrived by now means that it never will.
        arrived = row.ordered_at is None or row.ordered_at < began - IN_FLIGHT
        if allocation.state in (A.STOPPING, A.ENDED) and arrived:
            member_ended(member=row, at=began, exit_code=None, signal=None, error=None, failed_start=True)
            _free(row, began)
        return
    if row.state in (M.STARTING, M.RUNNING):
        _ended(row, VANISHED, began)
        return
    if row.node.health in UP:
        _free(row, began)


def _ended(row: AllocationMember, error: dict[str, Any], at: datetime) -> None:
    stopping = row.allocation.state not in (A.RESERVED, A.STARTING, A.RUNNING)
    member_ended(
        member=row,
        at=at,
        exit_code=None,
        signal=None,
        error=None if stopping else error,
        failed_start=row.state != M.RUNNING,
    )


def _free(row: AllocationMember, at: datetime) -> None:
    leases = Lease.objects.filter(
        allocation_id=row.allocation_id, member=row.number, ended_at=None
    ).select_related("gpu", "mig_slice")
    found: dict[str, dict[str, Any]] = {}
    for lease in leases:
        found[lease.mig_slice.uuid if lease.mig_slice is not None else lease.gpu.uuid] = {"free": True}
    member_free(member=row, at=at, found=found)


def _end_what_must(
    executor: PolledExecutor, member: AllocationMember, seen: Observation, began: datetime
) -> bool:
    """Kill what outlived its grace, and what runs on a node whose work was given away."""
    if seen.state not in ("starting", "running"):
        return False
    allocation = member.allocation
    told = member.stop_ordered_at
    if member.state == M.LOST or allocation.state == A.ENDED:
        due = told is None or told <= began - KILL_AGAIN
    else:
        over = allocation.grace_until
        due = (
            allocation.state == A.STOPPING
            and over is not None
            and over <= began
            and (told is None or told < over or told <= began - KILL_AGAIN)
        )
    if not due:
        return False
    try:
        executor.stop(member=member, grace_s=0, signal="SIGKILL")
    except ExecutorFailure as error:
        log.warning("kill_not_ordered", member=member.pk, code=error.code)
        return False
    AllocationMember.objects.filter(pk=member.pk).update(stop_ordered_at=now())
    return True


def _order_again(members: Iterable[AllocationMember], seen: dict[Any, Observation], began: datetime) -> int:
    """Starts that were ordered by a process that died before it heard the answer, and that never arrived."""
    lost = {
        member.allocation_id
        for member in members
        if member.state == M.RESERVED
        and member.allocation.state == A.STARTING
        and member.allocation.retry_at is None
        and member.ordered_at is not None
        and member.ordered_at < began - IN_FLIGHT
        and seen.get((member.allocation.uid, member.number), Observation("unknown")).state == "unknown"
    }
    return sum(allocation_start(allocation_id=pk) for pk in sorted(lost))
