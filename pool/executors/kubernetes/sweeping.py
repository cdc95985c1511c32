"""What ended pods leave behind: they stay for their output, and go some minutes later, with the service of their gang
and the template of their claim."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import UUID

import structlog

from pool.executors.base import ExecutorFailure, Key
from pool.executors.kubernetes import names
from pool.executors.kubernetes.connection import Problem
from pool.executors.kubernetes.session import Session
from pool.executors.kubernetes.states import is_over, observed, when
from portal.kernel.clock import now

log = structlog.get_logger(__name__)
KEPT = timedelta(seconds=150)
"""Longer than output is followed after an end."""
AT_ONCE = 50


def sweep(session: Session, asked: set[Key]) -> int:
    """Remove pods of ours that ended long enough ago and that nobody asks for; how many. What does not work is done by
    the next look."""
    due = [pod for pod in session.view.pods.values() if _due(pod, asked)][:AT_ONCE]
    removed = 0
    for pod in due:
        meta = pod["metadata"]
        base = f"/api/v1/namespaces/{meta['namespace']}"
        try:
            session.connection.delete(f"{base}/pods/{meta['name']}", 0, uid=meta["uid"])
            uid = UUID(meta["labels"][names.ALLOCATION])
            _leftovers(session, base, meta, uid)
            removed += 1
        except (Problem, ExecutorFailure) as error:
            log.info("pod_not_swept", pod=meta["name"], error=str(error)[:200])
            return removed
    return removed


def _due(pod: dict[str, Any], asked: set[Key]) -> bool:
    meta = pod["metadata"]
    labels = meta["labels"]
    if labels.get(names.MANAGED_BY) != names.US or names.ALLOCATION not in labels or not is_over(pod):
        return False
    try:
        key = (UUID(labels[names.ALLOCATION]), int(labels.get(names.MEMBER, "0")))
    except ValueError:
        return False
    if key in asked or meta["name"] != names.pod_name(*key):  # an adopted pod is its owner's to remove
        return False
    ended = observed(pod).ended_at or when(pod["status"].get("startTime"))
    return ended is None or ended < now() - KEPT


def _leftovers(session: Session, base: str, meta: dict[str, Any], uid: UUID) -> None:
    if not meta["name"].endswith("-0"):
        return
    session.connection.delete(f"{base}/services/{names.group_name(uid)}")
    version = session.dra()
    if version:
        path = base.replace("/api/v1", f"/apis/resource.k8s.io/{version}")
        session.connection.delete(f"{path}/resourceclaimtemplates/{meta['name']}")
