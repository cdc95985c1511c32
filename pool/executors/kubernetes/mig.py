"""MIG layouts through MIG Manager: one label of a node asks for a layout, another says how far it is.

MIG Manager ends nothing that runs: it stops the device plugin and fails where a process is on a card. So the label is
written only on a node on which no pod holds a GPU, and which is closed for new ones.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pool.executors.base import RetryableFailure, TerminalFailure
from pool.executors.kubernetes import names
from pool.executors.kubernetes.connection import Problem
from pool.executors.kubernetes.nodes import MIG_CONFIG, MIG_STATE, SeenNode
from pool.executors.kubernetes.session import NODES, Session, failure

_CONFIG = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
UNDER_WAY = ("pending", "rebooting")


@dataclass(frozen=True)
class Layout:
    """A node's layout by MIG Manager's labels: the wanted configuration, and `success`, `failed`, `pending`,
    `rebooting`, or empty where MIG Manager never spoke; `not_there` where it says `success` and nothing is offered."""

    config: str
    state: str

    @property
    def settled(self) -> bool:
        """Whether it is over, well or not."""
        return self.state not in UNDER_WAY


def layout_of(session: Session, node: str) -> Layout:
    """As the labels say now, and what is offered: a label alone is believed where it is bad news only."""
    return _layout(session.node(node))


def _layout(seen: SeenNode) -> Layout:
    there = all(code != "mig_not_there" for code, _detail in seen.notes)
    return Layout(seen.mig_config, seen.mig_state if there else "not_there")


def layout_set(session: Session, node: str, config: str) -> Layout:
    """Ask MIG Manager for a configuration of its config map (``all-1g.10gb``, ``all-balanced``, a site's own).

    Asked twice, asked once. `mig_config_wrong` (terminal) for what no label can hold, `mig_not_managed` (terminal)
    where no MIG Manager has ever spoken, `node_not_closed` and `node_in_use` (retryable) until it is drained,
    `mig_under_way` (retryable) while another change runs.
    """
    if not _CONFIG.fullmatch(config):
        raise TerminalFailure("mig_config_wrong", f"no name of a configuration: {config[:80]!r}")
    seen = session.node(node)
    now = _layout(seen)
    if now.config == config and now.state not in ("failed", "not_there"):
        return now
    if not now.state:
        raise TerminalFailure("mig_not_managed", f"MIG Manager has never spoken on {node}")
    if not now.settled:
        raise RetryableFailure("mig_under_way", f"{node}: {now.config} is {now.state}")
    if seen.cordoned is None and seen.reason != "cordoned_there":
        raise RetryableFailure("node_not_closed", f"{node} takes new work: close it first")
    holders = _holders(session, node)
    if holders:
        raise RetryableFailure("node_in_use", f"{node}: {', '.join(holders[:5])} hold GPUs")
    # The old answer goes with the new question: else its `success` would be taken for the new one's.
    labels = {MIG_CONFIG: config, MIG_STATE: "pending"}
    try:
        session.connection.patch(f"{NODES}/{node}", {"metadata": {"labels": labels}})
    except Problem as problem:
        raise failure(problem, f"layout of {node}") from problem
    return Layout(config, "pending")


def _holders(session: Session, node: str) -> list[str]:
    """Pods on the node that ask for any GPU resource and have not ended."""
    try:
        pods = (
            session.connection.get("/api/v1/pods", fieldSelector=f"spec.nodeName={node}").get("items") or []
        )
    except Problem as problem:
        raise failure(problem, f"pods of {node}") from problem
    out = []
    for pod in pods:
        if (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
            continue
        spec = pod["spec"]
        wants = any(
            resource.startswith("nvidia.com/")
            for container in spec.get("containers") or []
            for resource in (container.get("resources") or {}).get("limits") or {}
        )
        if wants or spec.get("resourceClaims") or names.ALLOCATION in (pod["metadata"].get("labels") or {}):
            out.append(f"{pod['metadata']['namespace']}/{pod['metadata']['name']}")
    return sorted(out)
