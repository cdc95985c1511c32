"""Commands to node agents: a row first, then a poke; the row is sent again until the agent acknowledges
it."""

from __future__ import annotations

from typing import Any

import structlog
from asgiref.sync import async_to_sync
from channels.layers import get_channel_layer
from django.db import IntegrityError, transaction

from pool.models import AgentCommand, Allocation, Node
from portal.kernel.clock import now
from portal.kernel.models import advance

log = structlog.get_logger(__name__)
START, CHECKPOINT, STOP, CHECK_FREE = "start", "checkpoint", "stop", "check_free"


def node_group(node_id: int) -> str:
    """The Channels group of a node's agent socket (one member, whichever web process holds it)."""
    return f"agent.node.{node_id}"


def node_poke(node_id: int, kind: str = "agent.commands") -> None:
    """Tell the socket of a node to look. A lost poke costs little: commands are also read at each
    heartbeat."""
    layer = get_channel_layer()
    if layer is None:
        return
    try:
        async_to_sync(layer.group_send)(node_group(node_id), {"type": kind})
    except Exception as error:  # Redis is down: the rows are there, the heartbeat finds them
        log.warning("agent_poke_failed", node=node_id, error=type(error).__name__)


def command_send(
    *, node: Node, kind: str, allocation: Allocation, member: int = 0, payload: dict[str, Any] | None = None
) -> AgentCommand:
    """Queue a command; the same (allocation, member, kind) is one command however often it is sent.

    A stop withdraws a start that the agent has not acknowledged; a stop that was acknowledged long ago is
    opened again (the agent answers it with the job's end). At most one check_free per member is open;
    a checkpoint is one command per member and reclaim case.
    """
    with transaction.atomic():
        open_rows = AgentCommand.objects.select_for_update().filter(
            allocation=allocation, member=member, kind=kind
        )
        if kind == CHECK_FREE:
            open_rows = open_rows.filter(acked_at=None, cancelled_at=None)
        elif kind == CHECKPOINT:
            open_rows = open_rows.filter(payload__case=(payload or {}).get("case"))
        row = open_rows.order_by("-id").first()
        if row is None:
            values = {"node": node, "allocation": allocation, "member": member, "kind": kind}
            try:
                with transaction.atomic():
                    row = AgentCommand.objects.create(payload=payload or {}, **values)
            except IntegrityError:  # another process queued the same one at this moment
                row = AgentCommand.objects.get(**values)
        elif kind == STOP and row.acked_at is not None:
            advance(AgentCommand.objects.filter(pk=row.pk), acked_at=None, payload=payload or row.payload)
        if kind == STOP:
            advance(
                AgentCommand.objects.filter(
                    allocation=allocation,
                    member=member,
                    kind__in=[START, CHECKPOINT],
                    acked_at=None,
                    cancelled_at=None,
                ),
                cancelled_at=now(),
            )
        transaction.on_commit(lambda: node_poke(node.pk))
    return row


def commands_sent(*, node_id: int, uids: list[str]) -> None:
    """Note that these commands were written to the node's socket."""
    for uid in uids:
        row = AgentCommand.objects.filter(node_id=node_id, uid=uid, acked_at=None).first()
        if row is not None:
            advance(
                AgentCommand.objects.filter(pk=row.pk), sent_at=now(), attempts=min(row.attempts + 1, 30000)
            )


def command_acked(*, node_id: int, uid: str) -> bool:
    """The agent has the command on its disk. False for an unknown one or another node's."""
    changed = advance(AgentCommand.objects.filter(node_id=node_id, uid=uid, acked_at=None), acked_at=now())
    return bool(changed)
