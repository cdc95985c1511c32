"""Output of work in outside systems, followed into the portal's own log: read from where it was left, in pieces.

Each pass reads a bounded number of members in turn, those that just ended first and to their end. Pieces are unique by
their offset, so a pass that is done twice writes once.
"""

from __future__ import annotations

import codecs
from datetime import timedelta

import structlog
from django.core.cache import cache
from django.db import transaction
from django.db.models import F, Q

from pool.executors.base import OUTPUT, ExecutorFailure, PolledExecutor, polled_executor
from pool.models import AllocationLog, AllocationMember, Cluster
from portal.kernel.clock import now

log = structlog.get_logger(__name__)
LIMIT_BYTES = 8 * 1024 * 1024
AT_ONCE = 200
PIECES = 16
"""Pieces of one member in one pass, so that a chatty job leaves time for the others."""
AFTER_END = timedelta(seconds=60)
"""Output still comes so long after the end: file systems are late."""
M = AllocationMember.State


def outputs_follow(*, cluster_id: int) -> int:
    """One pass over a cluster; returns how many pieces were written."""
    cluster = Cluster.objects.get(pk=cluster_id)
    executor = polled_executor(cluster)
    if executor is None or OUTPUT not in executor.can or cluster.away_since is not None:
        return 0
    at = now()
    rows = AllocationMember.objects.filter(node__cluster=cluster, read_bytes__lt=LIMIT_BYTES).exclude(
        external_id=""
    )
    rows = rows.select_related("node__cluster", "allocation__request", "allocation__holder").order_by("id")
    ended = list(rows.filter(ended_at__gt=at - AFTER_END).filter(~Q(state=M.LOST))[:AT_ONCE])
    key = f"pool.output.turn.{cluster_id}"
    turn = int(cache.get(key) or 0)
    running = list(rows.filter(state=M.RUNNING, pk__gt=turn)[:AT_ONCE])
    cache.set(key, running[-1].pk if len(running) == AT_ONCE else 0, 3600)
    written = 0
    for member in [*ended, *running]:
        try:
            written += _follow(executor, member)
        except ExecutorFailure as error:
            log.info("output_not_read", member=member.pk, code=error.code)
            break
    return written


def _follow(executor: PolledExecutor, member: AllocationMember) -> int:
    for count in range(PIECES):
        data = executor.output(member=member, offset=member.read_bytes)
        taken = _whole(data)
        if not taken or not _write(member, taken):
            return count
        member.read_bytes += len(taken)
    return PIECES


def _whole(data: bytes) -> bytes:
    """Without the beginning of a character whose rest is not written yet."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return data[: len(data) - len(decoder.getstate()[0])]


def _write(member: AllocationMember, data: bytes) -> bool:
    """One piece and the new place to read from, in one transaction; False where another pass was faster."""
    with transaction.atomic():
        moved = AllocationMember.objects.filter(pk=member.pk, read_bytes=member.read_bytes).update(
            read_bytes=F("read_bytes") + len(data)
        )
        if moved:
            text = data.decode("utf-8", "replace").replace("\0", "\ufffd")
            piece = AllocationLog(
                allocation_id=member.allocation_id,
                member=member.number,
                offset=member.read_bytes,
                data=text,
                at=now(),
            )
            AllocationLog.objects.bulk_create([piece], ignore_conflicts=True)
    return bool(moved)
