"""A small RFC 6455 client over asyncio streams: what the agent needs and no more.

Text and binary messages are sent and received. TLS certificates are always verified (a custom
authority may be given). Fragmented messages are joined, pings answered, close codes reported, and a message
above ``max_bytes`` closes with 1009. A path prefix before the socket's own path (a reverse proxy) is kept.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import ssl
import struct
from urllib.parse import urlsplit

GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA
MAX_HEADER_BYTES = 16384


class WebSocketError(Exception):
    """The connection could not be made or broke the protocol."""


class HandshakeRefused(WebSocketError):
    """The server answered the upgrade with another status than 101."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"HTTP {status} {reason}")
        self.status = status
        self.reason = reason


class Closed(WebSocketError):
    """The connection is closed; ``code`` is the peer's close code, 1006 when it vanished without one."""

    def __init__(self, code: int, reason: str = "") -> None:
        super().__init__(f"closed {code} {reason}")
        self.code = code
        self.reason = reason


def mask_bytes(data: bytes, key: bytes) -> bytes:
    """XOR ``data`` with the repeated 4-byte ``key`` (RFC 6455, 5.3); its own inverse."""
    if not data:
        return data
    repeated = (key * (len(data) // 4 + 1))[: len(data)]
    number = int.from_bytes(data, "little") ^ int.from_bytes(repeated, "little")
    return number.to_bytes(len(data), "little")


def frame(opcode: int, payload: bytes, fin: bool = True, key: bytes | None = None) -> bytes:
    """One masked client frame."""
    if key is None:
        key = os.urandom(4)
    head = bytes([(0x80 if fin else 0) | opcode])
    size = len(payload)
    if size < 126:
        head += bytes([0x80 | size])
    elif size < 65536:
        head += bytes([0x80 | 126]) + struct.pack("!H", size)
    else:
        head += bytes([0x80 | 127]) + struct.pack("!Q", size)
    return head + key + mask_bytes(payload, key)


def tls_context(ca_file: str | None = None) -> ssl.SSLContext:
    """A verifying TLS context; ``ca_file`` adds the enterprise's own authority to the system's."""
    context = ssl.create_default_context()
    if ca_file:
        context.load_verify_locations(cafile=ca_file)
    return context


class WebSocket:
    """An open client connection. ``receive`` is for one reader; ``send`` may be called by many tasks."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, max_bytes: int = 4 * 1024 * 1024
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._max_bytes = max_bytes
        self._write_lock = asyncio.Lock()
        self._close_sent = False
        self.last_received = asyncio.get_event_loop().time()

    @property
    def local_address(self) -> str:
        """This machine's own address on the way to the server."""
        name = self._writer.get_extra_info("sockname")
        return str(name[0]) if name else ""

    async def _write(self, data: bytes) -> None:
        async with self._write_lock:
            try:
                self._writer.write(data)
                await self._writer.drain()
            except (ConnectionError, OSError, RuntimeError) as error:
                raise Closed(1006, str(error)) from error

    async def send(self, text: str) -> None:
        """Send one text message."""
        if self._close_sent:
            raise Closed(1000, "closing")
        await self._write(frame(TEXT, text.encode("utf-8")))

    async def send_bytes(self, data: bytes) -> None:
        """Send one binary message."""
        if self._close_sent:
            raise Closed(1000, "closing")
        await self._write(frame(BINARY, data))

    async def ping(self, payload: bytes = b"") -> None:
        """Ask the server for a pong; any answer renews ``last_received``."""
        await self._write(frame(PING, payload))

    async def _read_frame(self) -> tuple[bool, int, bytes]:
        try:
            first, second = await self._reader.readexactly(2)
            if first & 0x70:
                raise WebSocketError("reserved bits set")
            if second & 0x80:
                raise WebSocketError("masked frame from the server")
            size = second & 0x7F
            if size == 126:
                size = struct.unpack("!H", await self._reader.readexactly(2))[0]
            elif size == 127:
                size = struct.unpack("!Q", await self._reader.readexactly(8))[0]
            opcode = first & 0x0F
            if opcode >= 0x8 and (size > 125 or not first & 0x80):
                raise WebSocketError("control frame too long or fragmented")
            if size > self._max_bytes:
                await self.close(1009, "message too big")
                raise WebSocketError(f"message of {size} bytes")
            payload = await self._reader.readexactly(size) if size else b""
        except (asyncio.IncompleteReadError, ConnectionError, OSError) as error:
            raise Closed(1006, "connection lost") from error
        self.last_received = asyncio.get_event_loop().time()
        return bool(first & 0x80), opcode, payload

    async def receive(self) -> str:
        """The next whole message as text. Raises ``Closed`` when the connection ends."""
        return (await self.receive_message())[1].decode("utf-8")

    async def receive_message(self) -> tuple[int, bytes]:
        """The next whole message: TEXT or BINARY, and its bytes. Raises ``Closed`` when the connection ends."""
        parts: list[bytes] = []
        size, first = 0, TEXT
        while True:
            fin, opcode, payload = await self._read_frame()
            if opcode == PING:
                await self._write(frame(PONG, payload))
            elif opcode == PONG:
                continue
            elif opcode == CLOSE:
                code, reason = 1005, ""
                if len(payload) >= 2:
                    code = struct.unpack("!H", payload[:2])[0]
                    reason = payload[2:].decode("utf-8", "replace")
                if not self._close_sent:
                    self._close_sent = True
                    try:
                        await self._write(frame(CLOSE, payload[:2]))
                    except Closed:
                        pass
                raise Closed(code, reason)
            elif opcode in (TEXT, BINARY):
                if parts:
                    raise WebSocketError("a new message inside a fragmented one")
                if fin:
                    return opcode, payload
                first = opcode
                parts.append(payload)
                size = len(payload)
            elif opcode == CONTINUATION:
                if not parts:
                    raise WebSocketError("a continuation of nothing")
                parts.append(payload)
                size += len(payload)
                if size > self._max_bytes:
                    await self.close(1009, "message too big")
                    raise WebSocketError(f"message of more than {self._max_bytes} bytes")
                if fin:
                    return first, b"".join(parts)
            else:
                raise WebSocketError(f"unknown opcode {opcode}")

    async def close(self, code: int = 1000, reason: str = "") -> None:
        """Say goodbye (once) and close the transport without waiting for the peer's answer."""
        if not self._close_sent:
            self._close_sent = True
            try:
                await asyncio.wait_for(
                    self._write(frame(CLOSE, struct.pack("!H", code) + reason.encode("utf-8")[:120])), 2
                )
            except (Closed, asyncio.TimeoutError):
                pass
        self.abort()

    def abort(self) -> None:
        """Drop the transport now."""
        try:
            self._writer.close()
        except RuntimeError:
            pass


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, str, dict[str, str]]:
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError, OSError) as error:
        raise WebSocketError("no answer to the upgrade") from error
    if len(raw) > MAX_HEADER_BYTES:
        raise WebSocketError("answer too long")
    lines = raw.decode("latin-1").split("\r\n")
    parts = lines[0].split(" ", 2)
    if len(parts) < 2 or not parts[1].isdigit():
        raise WebSocketError(f"not HTTP: {lines[0][:80]!r}")
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return int(parts[1]), parts[2] if len(parts) > 2 else "", headers


async def connect(
    url: str,
    headers: dict[str, str] | None = None,
    ca_file: str | None = None,
    timeout: float = 15,
) -> WebSocket:
    """Open ``ws://`` or ``wss://`` ``url`` and upgrade it.

    Raises ``HandshakeRefused`` with the HTTP status, or ``WebSocketError`` when nobody answers in time.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("ws", "wss") or not parts.hostname:
        raise WebSocketError(f"not a WebSocket address: {url}")
    secure = parts.scheme == "wss"
    port = parts.port or (443 if secure else 80)
    context = tls_context(ca_file) if secure else None
    try:
        reader, writer = await asyncio.wait_for(
            asyncio.open_connection(parts.hostname, port, ssl=context, limit=1 << 18), timeout
        )
    except (OSError, ssl.SSLError, asyncio.TimeoutError) as error:
        raise WebSocketError(f"cannot reach {url}: {error or type(error).__name__}") from error
    nonce = base64.b64encode(os.urandom(16)).decode("ascii")
    target = (parts.path or "/") + ("?" + parts.query if parts.query else "")
    host = parts.hostname if ":" not in parts.hostname else f"[{parts.hostname}]"
    lines = [
        f"GET {target} HTTP/1.1",
        f"Host: {host}" if port == (443 if secure else 80) else f"Host: {host}:{port}",
        "Upgrade: websocket",
        "Connection: Upgrade",
        "Sec-WebSocket-Key: " + nonce,
        "Sec-WebSocket-Version: 13",
    ]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    try:
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))
        status, reason, answer = await asyncio.wait_for(_read_head(reader), timeout)
        if status != 101:
            raise HandshakeRefused(status, reason)
        expected = base64.b64encode(hashlib.sha1((nonce + GUID).encode("ascii")).digest()).decode("ascii")
        if answer.get("sec-websocket-accept") != expected or answer.get("upgrade", "").lower() != "websocket":
            raise WebSocketError("the answer is not a WebSocket upgrade")
    except asyncio.TimeoutError as error:
        writer.close()
        raise WebSocketError("no answer to the upgrade in time") from error
    except (OSError, WebSocketError) as error:
        writer.close()
        if isinstance(error, WebSocketError):
            raise
        raise WebSocketError(str(error)) from error
    return WebSocket(reader, writer)
