"""Closing nodes by a taint of our own: opening them again takes back that alone. The reason is an annotation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pool.executors.base import RetryableFailure
from pool.executors.kubernetes.connection import Problem
from pool.executors.kubernetes.names import CORDONED
from pool.executors.kubernetes.session import NODES, NOT_FOUND, Session, failure

TRIES = 3
CONFLICT = 409
Taints = list[dict[str, Any]]


def close(session: Session, node: str, reason: str) -> None:
    """No pod without our toleration is placed there any more; what runs goes on. Done twice, done once."""

    def taints(now: Taints) -> Taints:
        kept = [one for one in now if one.get("key") != CORDONED]
        return [*kept, {"key": CORDONED, "value": "true", "effect": "NoSchedule"}]

    _write(session, node, taints, reason[:1000])


def open_again(session: Session, node: str) -> None:
    """Take our taint away; whatever else closes it stays."""
    _write(session, node, lambda now: [one for one in now if one.get("key") != CORDONED], None)


def _write(session: Session, node: str, taints: Callable[[Taints], Taints], reason: str | None) -> None:
    path = f"{NODES}/{node}"
    try:
        for _ in range(TRIES):
            found = session.connection.get(path)
            before = (found.get("spec") or {}).get("taints") or []
            after = taints(before)
            said = (found["metadata"].get("annotations") or {}).get(CORDONED)
            if sorted(map(repr, after)) == sorted(map(repr, before)) and said == reason:
                return
            body = {
                "metadata": {
                    "resourceVersion": found["metadata"]["resourceVersion"],
                    "annotations": {CORDONED: reason},
                },
                "spec": {"taints": after or None},
            }
            try:
                session.connection.patch(path, body)
                return
            except Problem as problem:
                if problem.code != CONFLICT:
                    raise
    except Problem as problem:
        if problem.code == NOT_FOUND:
            raise RetryableFailure("node_unknown", f"the cluster has no node {node}") from problem
        raise failure(problem, f"node {node}") from problem
    raise RetryableFailure("not_done_there", f"node {node} is being changed by others all the time")
