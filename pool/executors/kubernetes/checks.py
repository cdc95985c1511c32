"""Whether a cluster can be used: what answers, what we may, what is there. Changes nothing."""

from __future__ import annotations

from datetime import timedelta

from pool.executors.base import ExecutorFailure
from pool.executors.kubernetes.connection import Problem
from pool.executors.kubernetes.session import Session, failure
from portal.kernel.clock import now

Finding = tuple[str, bool, str]
SOON = timedelta(days=7)
NEEDED = (
    ("", "pods", "", "list", True),
    ("", "pods", "", "watch", True),
    ("", "nodes", "", "list", True),
    ("", "pods", "", "create", False),
    ("", "pods", "", "delete", False),
    ("", "pods", "eviction", "create", False),
    ("", "pods", "log", "get", False),
    ("", "services", "", "create", False),
)
"""(API group, resource, subresource, verb, for the whole cluster in every case)."""


def findings(session: Session) -> list[Finding]:
    """In the order in which somebody would mend them; stops at the first that makes the rest pointless."""
    out: list[Finding] = []
    try:
        out.append(("answers", True, session.version()))
        end = session.expires_at
        if end is not None:
            out.append(("credential_lasts", end > now() + SOON, f"until {end:%Y-%m-%d %H:%M} UTC"))
        out += _rights(session)
        if any(not good for code, good, _ in out if code == "right"):
            return out
        out += _nodes(session)
    except Problem as problem:
        error = failure(problem, "check")
        out.append((error.code, False, error.detail))
    except ExecutorFailure as error:
        out.append((error.code, False, error.detail))
    return out


def _rights(session: Session) -> list[Finding]:
    out: list[Finding] = []
    for group, resource, sub, verb, _ in NEEDED:
        attributes = {"group": group, "resource": resource, "subresource": sub, "verb": verb}
        if not session.options.create_namespaces and not (resource == "nodes" or verb in ("list", "watch")):
            continue  # given in each department's namespace alone
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }
        answer = session.connection.create("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body)
        name = f"{verb} {resource}{'/' + sub if sub else ''}"
        out.append(("right", bool((answer.get("status") or {}).get("allowed")), name))
    return out


def _nodes(session: Session) -> list[Finding]:
    """Nodes that cannot be used as they are; one line for all that can."""
    nodes = session.nodes()
    out: list[Finding] = []
    sound = 0
    for node in nodes:
        bad = [note for note in node.notes if note[0] not in ("gpu_unhealthy", "gpu_tainted")]
        for code, detail in bad:
            out.append((code, False, f"{node.name}: {detail}"))
        sound += not bad and bool(node.cards)
    out.insert(0, ("gpu_nodes", sound > 0, f"{sound} of {len(nodes)} nodes offer GPUs"))
    return out
