"""The WebSocket of one node's agent (protocol: docs/agent.md).

Parses, calls one service for each message, answers. A durable message is acknowledged after its transaction;
one that fails to be written ends the connection, so that the agent sends it again, in order. Commands come
from rows: at connect, at a poke through the node's group, and at each heartbeat for the case that a poke was
lost (read for all heartbeats of a group at once).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import structlog
from channels.consumer import get_handler_name
from channels.db import database_sync_to_async
from channels.generic.websocket import AsyncWebsocketConsumer
from django.db import DatabaseError, InterfaceError

from pool.live.heartbeats import heartbeat
from pool.models import AgentCommand
from pool.selectors.agents import TokenAnswer, command_message, commands_open, token_check
from pool.services import agent_inbox
from pool.services.commands import command_acked, commands_sent, node_group
from portal.kernel.errors import Refused

log = structlog.get_logger(__name__)
SamplesSink = Callable[[int, dict[str, Any]], Awaitable[None]]
MAX_BYTES = 4 * 1024 * 1024
CLOSE_UNAUTHENTICATED, CLOSE_FORBIDDEN, CLOSE_PROTOCOL, CLOSE_REPLACED, CLOSE_AGAIN = (
    4401,
    4403,
    4400,
    4409,
    1011,
)
RESEND_AFTER_BEATS = 2
REJOIN_AFTER_BEATS = 12
MAX_STORING = 256


def _parsed(text: str | None) -> dict[str, Any] | None:
    """A message as an object with its kind; None for anything else."""
    if not text or len(text) > MAX_BYTES:
        return None
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) and isinstance(message.get("t"), str) else None


async def discard_samples(node_id: int, message: dict[str, Any]) -> None:
    """The sink of a socket that was given none."""


class AgentConsumer(AsyncWebsocketConsumer):
    """One agent's connection. `on_samples(node_id, message)` returns once a batch of samples is durable."""

    def __init__(self, on_samples: SamplesSink = discard_samples) -> None:
        super().__init__()
        self.on_samples = on_samples
        self.node_id: int | None = None
        self.token_id = 0
        self.group = ""
        self.greeted = False
        self._sent: dict[str, int] = {}
        self._beats = 0
        self._storing: set[asyncio.Task[None]] = set()

    async def dispatch(self, message: dict[str, Any]) -> None:
        """Call the handler at once. Channels would first look at the database connection in a thread, for each message
        of a thousand agents; whatever needs the database here goes through `database_sync_to_async`, which does so."""
        await getattr(self, get_handler_name(message))(message)

    async def connect(self) -> None:
        """Check the token; a refusal is told in words before the close, as agents are read by people."""
        await self.accept()
        headers = {name.lower(): value for name, value in self.scope.get("headers", [])}
        scheme, _, token = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        try:
            answer = (
                await database_sync_to_async(token_check)(token.strip())
                if scheme.lower() == "bearer"
                else TokenAnswer(None, 0, "token_missing")
            )
        except (DatabaseError, InterfaceError):
            await self.close(CLOSE_AGAIN)
            return
        if answer.code:
            closing = CLOSE_FORBIDDEN if answer.code == "token_revoked" else CLOSE_UNAUTHENTICATED
            await self.refuse(answer.code, "Enrol this node again with a new code.", closing)
            return
        self.node_id, self.token_id = answer.node_id, answer.token_id

    async def refuse(self, code: str, detail: str, closing: int) -> None:
        """Say why, then close."""
        log.info("agent_refused", code=code, node=self.node_id)
        await self.say({"t": "refused", "code": code, "detail": detail})
        self.node_id = None
        await self.close(closing)

    async def say(self, message: dict[str, Any]) -> None:
        """Send one message."""
        await self.send(text_data=json.dumps(message, ensure_ascii=False, separators=(",", ":")))

    async def disconnect(self, code: int) -> None:
        """Leave the node's group."""
        if self.group:
            await self.channel_layer.group_discard(self.group, self.channel_name)

    async def receive(self, text_data: str | None = None, bytes_data: bytes | None = None) -> None:
        """Take one message; what cannot be read ends the connection with 4400."""
        if self.node_id is None:
            return
        message = _parsed(text_data)
        if message is None:
            await self.close(CLOSE_PROTOCOL)
            return
        kind = message["t"]
        try:
            if kind == "hello":
                await self.hello(message)
            elif not self.greeted:
                await self.close(CLOSE_PROTOCOL)
            elif kind == "heartbeat":
                await self.beat(await heartbeat(self.node_id, self.token_id))
            elif kind == "command_ack":
                uid = str(message.get("command") or "")
                self._sent.pop(uid, None)
                await database_sync_to_async(command_acked)(node_id=self.node_id, uid=uid)
            elif kind == "samples":
                await self.samples(message)
            elif kind in agent_inbox.DURABLE:
                await database_sync_to_async(agent_inbox.agent_message)(node_id=self.node_id, message=message)
                await self.say({"t": "ack", "seq": message["seq"]})
        except Refused as error:
            await self.refuse(error.code, str(error.detail), CLOSE_FORBIDDEN)
        except Exception as error:  # the database is away, or a fault of ours: nothing was acknowledged,
            # so after its pause the agent connects again and sends it again.
            if type(error).__name__ == "ClientDisconnected":
                return  # it went while we worked for it
            log.warning("agent_message_failed", node=self.node_id, kind=kind, error=repr(error)[:300])
            await self.close(CLOSE_AGAIN)

    async def hello(self, message: dict[str, Any]) -> None:
        """Synchronise the node with what the agent says, welcome it, and send what waits for it."""
        assert self.node_id is not None
        if not self.greeted:
            # Into the group first: a poke that comes while the hello is taken must not be lost.
            self.greeted = True
            self.group = node_group(self.node_id)
            await self.channel_layer.group_add(self.group, self.channel_name)
            await self.channel_layer.group_send(
                self.group, {"type": "agent.replaced", "by": self.channel_name}
            )
        welcome = await database_sync_to_async(agent_inbox.agent_hello)(node_id=self.node_id, message=message)
        await self.say(welcome)
        await self.send_commands()

    async def samples(self, message: dict[str, Any]) -> None:
        """Hand samples to the sink beside the other messages: jobs do not wait for telemetry, and a backlog is
        written in groups. Without the sink's success there is no acknowledgement and the agent keeps them."""
        if len(self._storing) >= MAX_STORING:
            return  # more than an agent sends ahead; what is not acknowledged comes again
        task = asyncio.create_task(self._store(message))
        self._storing.add(task)
        task.add_done_callback(self._storing.discard)

    async def _store(self, message: dict[str, Any]) -> None:
        node_id = self.node_id
        if node_id is None:
            return
        try:
            await self.on_samples(node_id, message)
            await self.say({"t": "ack", "seq": message["seq"]})
        except Exception as error:  # the sink's trouble, or a socket that closed meanwhile
            log.warning("agent_samples_failed", node=node_id, error=repr(error)[:300])

    async def beat(self, commands: list[AgentCommand]) -> None:
        """What a heartbeat is good for besides: commands whose poke was lost, and our place in the group."""
        self._beats += 1
        await self.hand_out(commands)  # first: they are as they were read a moment ago
        if self._beats % REJOIN_AFTER_BEATS == 0:
            # A restarted Redis forgot the group, and memberships expire after a day.
            await self.channel_layer.group_add(self.group, self.channel_name)

    async def send_commands(self) -> None:
        """Look for open commands of this node and write them to the socket."""
        assert self.node_id is not None
        found = await database_sync_to_async(commands_open)([self.node_id])
        await self.hand_out(found.get(self.node_id, []))

    async def hand_out(self, commands: list[AgentCommand]) -> None:
        """Write open commands (all of this node) to the socket, each once a connection, again only when it stays
        unanswered."""
        assert self.node_id is not None
        waiting = {str(command.uid): command for command in commands}
        self._sent = {uid: beat for uid, beat in self._sent.items() if uid in waiting}
        fresh = []
        for uid, command in waiting.items():
            last = self._sent.get(uid)
            if last is None or self._beats - last > RESEND_AFTER_BEATS:
                self._sent[uid] = self._beats
                await self.say(command_message(command))
                fresh.append(uid)
        if fresh:
            await database_sync_to_async(commands_sent)(node_id=self.node_id, uids=fresh)

    async def agent_commands(self, event: dict[str, Any]) -> None:
        """A poke: commands were added."""
        if self.node_id is not None:
            await self.send_commands()

    async def agent_remote(self, event: dict[str, Any]) -> None:
        """A person wants into a lease on this node: the agent dials out again for it."""
        if self.node_id is not None and self.greeted:
            await self.say({"t": "remote", **event["message"]})

    async def agent_revoked(self, event: dict[str, Any]) -> None:
        """A poke: the token ended."""
        if self.node_id is not None:
            await self.refuse("token_revoked", "This node's token was revoked.", CLOSE_FORBIDDEN)

    async def agent_replaced(self, event: dict[str, Any]) -> None:
        """A newer connection of the same node took over."""
        if self.node_id is not None and event.get("by") != self.channel_name:
            self.node_id = None
            await self.close(CLOSE_REPLACED)
