"""Reads about node agents: whose token this is, which commands wait, how often to sample."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.db.models import F, Window
from django.db.models.functions import RowNumber

from pool.models import AgentCommand, AgentToken, Gpu, Node

HEARTBEAT_SECONDS = 5.0
MOST_COMMANDS = 500


@dataclass(frozen=True)
class TokenAnswer:
    """`code` is empty for a valid token; else `token_unknown` or `token_revoked`."""

    node_id: int | None
    token_id: int
    code: str


def secret_hash(secret: str) -> str:
    """SHA-256 of a code or token: both are long random strings, so no salt or stretching is needed."""
    return hashlib.sha256(secret.encode()).hexdigest()


def token_check(token: str) -> TokenAnswer:
    """Whose token this is. One look-up by hash, so its time says nothing about the token."""
    found = AgentToken.objects.select_related("node").filter(hash=secret_hash(token)).first()
    if not token or found is None:
        return TokenAnswer(None, 0, "token_unknown")
    retired = found.node.schedulable == Node.Schedulable.RETIRED
    code = "token_revoked" if found.revoked_at is not None or retired else ""
    return TokenAnswer(found.node_id, found.pk, code)


def commands_open(node_ids: Collection[int]) -> dict[int, list[AgentCommand]]:
    """By node the commands that its agent has not acknowledged, oldest first; a node without any is not in it.

    One query, however many nodes are asked for. Rows come with their allocations, for `command_message`.
    """
    number = Window(RowNumber(), partition_by=F("node_id"), order_by=F("id").asc())
    rows = (
        AgentCommand.objects.filter(node_id__in=node_ids, acked_at=None, cancelled_at=None)
        .annotate(number=number)
        .filter(number__lte=MOST_COMMANDS)
        .select_related("allocation")
        .order_by("node_id", "id")
    )
    found: dict[int, list[AgentCommand]] = {}
    for row in rows:
        found.setdefault(row.node_id, []).append(row)
    return found


def command_message(command: AgentCommand) -> dict[str, Any]:
    """One command as the agent reads it."""
    return {
        **command.payload,
        "t": command.kind,
        "command": str(command.uid),
        "allocation": str(command.allocation.uid) if command.allocation is not None else "",
        "member": command.member,
    }


def sample_seconds(node: Node) -> float:
    """How often this node's agent samples: its cluster's choice, else by the size of the pool."""
    chosen = node.cluster.settings.get("sample_s") or getattr(settings, "GPUPOOL_SAMPLE_SECONDS", None)
    if chosen:
        return max(0.2, float(chosen))
    cards = Gpu.objects.exclude(condition=Gpu.Condition.RETIRED).count()
    return 2.0 if cards <= 512 else 5.0 if cards <= 2048 else 10.0
