"""Two sockets that meet: a person's machine and a node's agent, each dialled out, paired by a session.

The person's socket carries an API token and an order; a service decides. The node's agent is poked through its own
socket and dials out again for the session with the node's token. From then on each binary message is one frame of
`pool.agent.channel`, handed over as it is. How much may be under way is the ends' agreement; a sender that does not
keep to it is cut off, so nothing piles up here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from typing import Any
from uuid import UUID, uuid4

import structlog
from channels.db import database_sync_to_async
from channels.exceptions import ChannelFull
from channels.generic.websocket import AsyncWebsocketConsumer
from django.core.cache import cache
from rest_framework.exceptions import AuthenticationFailed

from pool.agent.channel import ANSWER, COUNTED, ORDER, PIECE, WINDOW
from pool.selectors.agents import token_check
from pool.services.commands import node_group
from pool.services.remote import Opened, remote_open, remote_still_open
from portal.accounts.api.auth import TokenAuthentication
from portal.kernel.errors import DomainError
from portal.ops.actor import Actor

log = structlog.get_logger(__name__)
UNAUTHENTICATED, FORBIDDEN, PROTOCOL, AWAY, DONE = 4401, 4403, 4400, 4408, 1000
JOIN_SECONDS = 20.0
CHECK_SECONDS = 15.0
MOST_FRAME = PIECE + 64
MOST_ORDER = 64 * 1024
FULL_TRIES, FULL_SECONDS = 500, 0.02
SCOPE = "request"


def bearer(scope: Any) -> str:
    """The token in the headers, empty where there is none."""
    headers = {name.lower(): value for name, value in scope.get("headers", [])}
    scheme, _, token = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


class _Asking:
    """As much of a request as the API's own authentication looks at."""

    def __init__(self, token: str) -> None:
        self.headers = {"Authorization": f"Bearer {token}"}
        self.policy: Any = None


def _person(token: str) -> tuple[Any, Any, Any]:
    """(user, token, policy) of a valid API token; None where there is none."""
    asking = _Asking(token)
    try:
        answer = TokenAuthentication().authenticate(asking)  # type: ignore[arg-type]
    except AuthenticationFailed:
        return None, None, None
    return (answer[0], answer[1], asking.policy) if answer else (None, None, None)


class Half(AsyncWebsocketConsumer):
    """What both sockets do once they are paired."""

    peer = ""
    flying = 0

    async def refuse(self, code: str, detail: str, closing: int) -> None:
        """Say why, then close."""
        with contextlib.suppress(Exception):
            text = json.dumps({"t": "refused", "code": code, "detail": detail}, ensure_ascii=False)
            await self.send(text_data=text)
            await self.close(closing)

    async def hand_over(self, message: dict[str, Any]) -> bool:
        """Put a message into the peer's channel; False where that stays full or is gone."""
        for _ in range(FULL_TRIES):
            try:
                await self.channel_layer.send(self.peer, message)
                return True
            except ChannelFull:
                await asyncio.sleep(FULL_SECONDS)
        return False

    async def receive(self, text_data: str | None = None, bytes_data: bytes | None = None) -> None:
        """One frame of our own end, for the other."""
        if not self.peer or not bytes_data or len(bytes_data) > MOST_FRAME:
            await self.close(PROTOCOL)
            return
        if bytes_data[:1] in COUNTED:
            self.flying += 1
            if self.flying > WINDOW:
                await self.refuse("too_fast", "More frames than agreed are under way.", PROTOCOL)
                return
        if not await self.hand_over({"type": "remote.frame", "data": bytes(bytes_data)}):
            await self.close(AWAY)

    async def remote_frame(self, event: dict[str, Any]) -> None:
        """One frame of the other end, for ours."""
        data = event["data"]
        if data[:1] == ANSWER and len(data) == 5:
            self.flying -= struct.unpack("!I", data[1:])[0]
        await self.send(bytes_data=data)

    async def remote_gone(self, event: dict[str, Any]) -> None:
        """The other end closed."""
        self.peer = ""
        await self.close(DONE)

    async def disconnect(self, code: int) -> None:
        """Tell the other end."""
        if self.peer:
            peer, self.peer = self.peer, ""
            with contextlib.suppress(ChannelFull, OSError):
                await self.channel_layer.send(peer, {"type": "remote.gone"})


class PersonSocket(Half):
    """A person's machine. The first message is the order; what follows the answer `joined` are frames."""

    session = ""
    waiting: asyncio.Task[None] | None = None

    async def connect(self) -> None:
        """Check the token; a refusal is told in words before the close."""
        await self.accept()
        user, token, policy = await database_sync_to_async(_person)(bearer(self.scope))
        if user is None:
            await self.refuse("token_invalid", "This token is not valid, or no longer.", UNAUTHENTICATED)
        elif SCOPE not in token.scopes:
            await self.refuse("forbidden", "The token needs the scope request.", FORBIDDEN)
        else:
            address = (self.scope.get("client") or [None])[0]
            self.actor = Actor(user=user, via="token", token_uid=str(token.uid), address=address)
            self.policy = policy

    async def receive(self, text_data: str | None = None, bytes_data: bytes | None = None) -> None:
        """The order first, then frames."""
        if self.session:
            await super().receive(text_data, bytes_data)
            return
        if (
            not hasattr(self, "actor")
            or not bytes_data
            or bytes_data[:1] != ORDER
            or len(bytes_data) > MOST_ORDER
        ):
            await self.close(PROTOCOL)
            return
        try:
            order = json.loads(bytes_data[1:])
            if not isinstance(order, dict):
                raise ValueError
        except (ValueError, RecursionError):
            await self.close(PROTOCOL)
            return
        uid: UUID = self.scope["url_route"]["kwargs"]["uid"]
        try:
            opened = await database_sync_to_async(remote_open)(
                acting_user=self.actor, policy=self.policy, uid=uid, order=order
            )
        except DomainError as error:
            await self.refuse(error.code, str(error.detail), FORBIDDEN)
            return
        await self.call(uid, opened)

    async def call(self, uid: UUID, opened: Opened) -> None:
        """Ask the node's agent to come."""
        self.session = str(uuid4())
        expected = {"node_id": opened.node_id, "person": self.channel_name}
        await cache.aset(f"remote:{self.session}", expected, JOIN_SECONDS + 5)
        message = {
            "session": self.session,
            "allocation": opened.allocation,
            "member": opened.member,
            "order": opened.order,
        }
        self.waiting = asyncio.create_task(self.watch(uid, str(opened.order["kind"])))
        await self.channel_layer.group_send(
            node_group(opened.node_id), {"type": "agent.remote", "message": message}
        )

    async def watch(self, uid: UUID, kind: str) -> None:
        """Give up on a node that does not come; end a session whose right has ended."""
        await asyncio.sleep(JOIN_SECONDS)
        if not self.peer:
            await self.refuse("node_away", "The node did not answer.", AWAY)
            return
        token = bearer(self.scope)
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            user, _token, _policy = await database_sync_to_async(_person)(token)
            allowed = user is not None and await database_sync_to_async(remote_still_open)(
                user_id=user.pk, uid=uid, kind=kind
            )
            if not allowed:
                await self.refuse("session_ended", "The lease or the token has ended.", FORBIDDEN)
                return

    async def remote_joined(self, event: dict[str, Any]) -> None:
        """The node is there."""
        self.peer = event["peer"]
        await self.send(text_data=json.dumps({"t": "joined"}))

    async def disconnect(self, code: int) -> None:
        """Forget the session and tell the node."""
        if self.waiting is not None:
            self.waiting.cancel()
        if self.session:
            await cache.adelete(f"remote:{self.session}")
        await super().disconnect(code)


class NodeSocket(Half):
    """The agent that was called for a session; another node's token does not get in."""

    async def connect(self) -> None:
        """Check the node's token and that this node was called, once."""
        await self.accept()
        answer = await database_sync_to_async(token_check)(bearer(self.scope))
        if answer.code:
            await self.refuse(answer.code, "Enrol this node again.", UNAUTHENTICATED)
            return
        key = f"remote:{self.scope['url_route']['kwargs']['session']}"
        expected = await cache.aget(key)
        if expected is None:
            await self.refuse("session_unknown", "There is no such session.", FORBIDDEN)
        elif expected["node_id"] != answer.node_id:
            log.warning("remote_of_another_node", node=answer.node_id, expected=expected["node_id"])
            await self.refuse("session_of_another_node", "Another node was called.", FORBIDDEN)
        elif not await cache.adelete(key):
            await self.refuse("session_unknown", "The session was taken.", FORBIDDEN)
        else:
            self.peer = expected["person"]
            await self.hand_over({"type": "remote.joined", "peer": self.channel_name})
