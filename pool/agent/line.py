"""Frames over a local socket between the agent and a session's process: length (4 bytes), kind, content."""

from __future__ import annotations

import json
import socket
import struct

from pool.agent.channel import ERROR

MOST = 1024 * 1024


class Line:
    """One end, blocking. ``read`` raises ``ConnectionError`` when the other end is gone."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end

    def fileno(self) -> int:
        return self.socket.fileno()

    def _exactly(self, size: int) -> bytes:
        parts = []
        while size:
            data = self.socket.recv(size)
            if not data:
                raise ConnectionError("the line is closed")
            parts.append(data)
            size -= len(data)
        return b"".join(parts)

    def read(self) -> tuple[bytes, bytes]:
        """The next frame as (kind, content)."""
        size = struct.unpack("!I", self._exactly(4))[0]
        if not 1 <= size <= MOST:
            raise ConnectionError("a frame of no sensible size")
        data = self._exactly(size)
        return data[:1], data[1:]

    def write(self, kind: bytes, content: bytes = b"") -> None:
        """Send one frame."""
        self.socket.sendall(struct.pack("!I", len(content) + 1) + kind + content)

    def error(self, code: str, detail: str) -> None:
        """Say what went wrong; nobody may be there to hear it."""
        try:
            self.write(ERROR, json.dumps({"code": code, "detail": detail[:500]}).encode())
        except OSError:
            return
