"""Departments' limits as ResourceQuotas: a second fence for pods that come past the pool.

One quota of ours for each namespace, on ``requests.nvidia.com/gpu``: the sum over the cluster's flavours, in what its
device plugin counts (shares, where cards are shared there; instances under the single MIG strategy), rounded up. Other
quotas of a namespace are their owner's and never touched.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pool.executors.base import Limit
from pool.executors.kubernetes import manifests, names
from pool.executors.kubernetes.connection import Problem
from pool.executors.kubernetes.nodes import GPU, GPU_SHARED, SeenNode, quantity
from pool.executors.kubernetes.session import NOT_FOUND, Session, failure
from pool.models import Cluster
from pool.services.outside_limits import wanted_limits

RESOURCE = f"requests.{GPU}"
QUOTA = "gpupool"


def compared(session: Session, cluster: Cluster) -> list[Limit]:
    """Every namespace that has a limit of ours or should have one, by name."""
    wanted = _wanted(session, cluster)
    there = _there(session)
    scopes = sorted(set(wanted) | set(there))
    return [Limit(scope, RESOURCE, there.get(scope), wanted.get(scope)) for scope in scopes]


def pushed(session: Session, cluster: Cluster, limits: Sequence[Limit]) -> None:
    """Make the quotas as wanted; namespaces that are missing are made. Done twice, done once."""
    spaces = {
        names.namespace_of(code, session.options.namespace_prefix): code
        for code in wanted_limits(cluster=cluster)
    }
    for limit in limits:
        path = f"/api/v1/namespaces/{limit.scope}/resourcequotas"
        try:
            if limit.wanted is None:
                session.connection.delete(f"{path}/{QUOTA}")
                continue
            if limit.scope in spaces:
                session.namespace_ensure(limit.scope, spaces[limit.scope])
            body = manifests.quota(limit.scope, {limit.resource: limit.wanted})
            try:
                session.connection.create(path, body)
            except Problem as problem:
                if problem.code != 409:
                    raise
                session.connection.patch(f"{path}/{QUOTA}", {"spec": body["spec"]})
        except Problem as problem:
            raise failure(problem, f"quota of {limit.scope}") from problem


def _there(session: Session) -> dict[str, int]:
    query = {"labelSelector": f"{names.MANAGED_BY}={names.US}"}
    try:
        rows = session.connection.get("/api/v1/resourcequotas", **query).get("items") or []
    except Problem as problem:
        if problem.code == NOT_FOUND:
            return {}
        raise failure(problem, "quotas") from problem
    out: dict[str, int] = {}
    for row in rows:
        hard = (row.get("spec") or {}).get("hard") or {}
        if row["metadata"]["name"] == QUOTA and RESOURCE in hard:
            out[str(row["metadata"]["namespace"])] = int(quantity(hard[RESOURCE]))
    return out


def _wanted(session: Session, cluster: Cluster) -> dict[str, int]:
    shares = max((_shares(node) for node in session.nodes()), default=1.0)
    out: dict[str, int] = {}
    for code, flavours in wanted_limits(cluster=cluster).items():
        cards = [count for count in flavours.values() if count is not None]
        if len(cards) == len(flavours):  # one without a limit: none is possible for all together
            space = names.namespace_of(code, session.options.namespace_prefix)
            out[space] = math.ceil(sum(cards) * shares)
    return out


def _shares(node: SeenNode) -> float:
    """What a card of this node counts as there."""
    if not node.cards:
        return 1.0
    counted = max(node.allocatable.get(GPU, 0), node.allocatable.get(GPU_SHARED, 0))
    return max(1.0, counted / len(node.cards))
