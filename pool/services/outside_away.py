"""Whether an outside system answers: noted on its cluster, an incident after a while, its nodes kept out of placement.

What runs there is not judged while it is away: nobody can see it, so it neither ended nor was lost.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from django.db import transaction

from pool.executors.base import ExecutorFailure
from pool.models import Cluster, Node
from portal.kernel.models import advance
from portal.ops.outbox import outbox_add
from portal.ops.services import incident_open, incident_resolve

PATIENCE = timedelta(seconds=15)
H = Node.Health


def cluster_answers(*, cluster: Cluster, at: datetime) -> None:
    """A look came about at ``at``; an outage ends with it."""
    if cluster.away_since is None:
        Cluster.objects.filter(pk=cluster.pk).update(looked_at=at)
        return
    with transaction.atomic():
        Cluster.objects.filter(pk=cluster.pk).update(
            looked_at=at, away_since=None, away_code="", away_detail=""
        )
        incident_resolve(dedupe_key=_key(cluster), note="It answers again.")
    cluster.refresh_from_db()


def cluster_away(*, cluster: Cluster, error: ExecutorFailure, at: datetime) -> None:
    """A look failed. After ``PATIENCE`` it is an incident, and nothing more is placed there until it answers."""
    since = cluster.away_since or at
    Cluster.objects.filter(pk=cluster.pk).update(
        away_since=since, away_code=error.code[:64], away_detail=error.detail[:2000]
    )
    cluster.refresh_from_db()
    if at - since < PATIENCE:
        return
    incident_open(
        kind="cluster_away",
        dedupe_key=_key(cluster),
        severity="critical",
        subject=cluster,
        facts={"code": error.code, "detail": error.detail[:500], "since": since.isoformat()},
    )
    for node in Node.objects.filter(cluster=cluster, health__in=[H.OK, H.LATE]).order_by("id"):
        with transaction.atomic():
            rows = Node.objects.filter(pk=node.pk, health=node.health)
            if advance(rows, health=H.SUSPECT, health_since=at):
                outbox_add(
                    "pool.node_state",
                    {"node_uid": str(node.uid), "health": H.SUSPECT.value, "was": str(node.health)},
                    key=node.name,
                )


def _key(cluster: Cluster) -> str:
    return f"cluster_away:{cluster.uid}"
