"""A two-way stream of frames between a person's machine and a node, through the installation.

One WebSocket message is one frame: a kind (one byte) and its content. Data waits for the other end: at most
``WINDOW`` frames are under way without its answer, so that the installation between them keeps nothing of either.
Used by the client and by the agent.
"""

from __future__ import annotations

import asyncio
import json
import struct
from typing import Any

from pool.agent import ws

PIECE = 32 * 1024
WINDOW = 16
ANSWER_EVERY = 4

DATA, INPUT, END = b"d", b"i", b"z"
RESIZE, EXIT, ERROR, ORDER = b"r", b"x", b"e", b"o"
OPEN, FLOW, CLOSE, OPENED = b"c", b"f", b"l", b"p"
ANSWER = b"a"
COUNTED = frozenset((DATA, INPUT, FLOW))


class Refusal(Exception):
    """The installation or the node said no; ``code`` is stable."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail or code)
        self.code = code
        self.detail = detail


class Channel:
    """One end. ``send`` may be called by many tasks, ``receive`` by one."""

    def __init__(self, socket: ws.WebSocket) -> None:
        self.socket = socket
        self._room = asyncio.Semaphore(WINDOW)
        self._got = 0

    async def send(self, kind: bytes, content: bytes = b"") -> None:
        """Send one frame; a counted one waits until the other end has room."""
        if kind in COUNTED:
            await self._room.acquire()
        await self.socket.send_bytes(kind + content)

    async def send_json(self, kind: bytes, content: Any) -> None:
        """Send one frame of JSON."""
        await self.send(kind, json.dumps(content).encode())

    async def receive(self) -> tuple[bytes, bytes]:
        """The next frame. Call it again only when the last one was dealt with: that is what makes room.

        Raises ``Refusal`` with the installation's reason, ``ws.Closed`` when the other end is gone.
        """
        if self._got >= ANSWER_EVERY:
            await self.socket.send_bytes(ANSWER + struct.pack("!I", self._got))
            self._got = 0
        while True:
            opcode, data = await self.socket.receive_message()
            if opcode == ws.TEXT:
                message = json.loads(data.decode("utf-8"))
                if message.get("t") == "refused":
                    raise Refusal(str(message.get("code")), str(message.get("detail") or ""))
                continue
            kind, content = data[:1], data[1:]
            if kind == ANSWER:
                for _ in range(min(WINDOW, struct.unpack("!I", content[:4])[0])):
                    self._room.release()
                continue
            if kind in COUNTED:
                self._got += 1
            return kind, content


def stream_frame(stream: int, content: bytes = b"") -> bytes:
    """The content of a frame that belongs to one of several streams."""
    return struct.pack("!I", stream) + content


def stream_of(content: bytes) -> tuple[int, bytes]:
    """(stream, content) of such a frame."""
    return int(struct.unpack("!I", content[:4])[0]), content[4:]
