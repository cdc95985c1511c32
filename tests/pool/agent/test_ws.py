"""The small WebSocket client against a server that speaks bytes, and against hostile frames."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import struct
from collections.abc import Awaitable, Callable

import pytest

from pool.agent import ws

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter, dict[str, str]], Awaitable[None]]


async def serve(handler: Handler, status: str = "101 Switching Protocols") -> tuple[asyncio.Server, int]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raw = (await reader.readuntil(b"\r\n\r\n")).decode()
        lines = raw.split("\r\n")
        headers = {"target": lines[0].split(" ")[1]}
        headers.update(line.lower().split(": ", 1) for line in lines[1:] if ": " in line)
        key = next(line.split(": ", 1)[1] for line in lines if line.startswith("Sec-WebSocket-Key"))
        accept = base64.b64encode(hashlib.sha1((key + ws.GUID).encode()).digest()).decode()
        head = f"HTTP/1.1 {status}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        writer.write(f"{head}Sec-WebSocket-Accept: {accept}\r\n\r\n".encode())
        if status.startswith("101"):
            await handler(reader, writer, headers)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    return server, server.sockets[0].getsockname()[1]


def plain(opcode: int, payload: bytes, fin: bool = True) -> bytes:
    """An unmasked server frame."""
    size = len(payload)
    head = bytes([(0x80 if fin else 0) | opcode])
    if size < 126:
        return head + bytes([size]) + payload
    if size < 65536:
        return head + bytes([126]) + struct.pack("!H", size) + payload
    return head + bytes([127]) + struct.pack("!Q", size) + payload


async def read_frame(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    first, second = await reader.readexactly(2)
    assert second & 0x80, "a client frame is masked"
    size = second & 0x7F
    if size == 126:
        size = struct.unpack("!H", await reader.readexactly(2))[0]
    elif size == 127:
        size = struct.unpack("!Q", await reader.readexactly(8))[0]
    key = await reader.readexactly(4)
    return first & 0x0F, ws.mask_bytes(await reader.readexactly(size), key)


async def test_messages_of_all_sizes_go_both_ways_with_prefix_and_header() -> None:
    seen: dict[str, str] = {}

    async def echo(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, headers: dict[str, str]
    ) -> None:
        seen.update(headers)
        for _ in range(4):
            opcode, payload = await read_frame(reader)
            writer.write(plain(opcode, payload))

    server, port = await serve(echo)
    socket = await ws.connect(f"ws://127.0.0.1:{port}/pool/prefix/agent/ws/", {"Authorization": "Bearer t"})
    for text in ("", "中文 and ascii", "x" * 60_000, "y" * 200_000):
        await socket.send(text)
        assert await socket.receive() == text
    assert seen["target"] == "/pool/prefix/agent/ws/" and seen["authorization"] == "bearer t"
    await socket.close()
    server.close()


async def test_fragments_are_joined_and_pings_between_them_answered() -> None:
    pongs: list[bytes] = []

    async def speak(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, headers: dict[str, str]
    ) -> None:
        text = "分片".encode()
        writer.write(plain(ws.TEXT, text[:2], fin=False) + plain(ws.PING, b"hi"))
        writer.write(plain(ws.CONTINUATION, text[2:3], fin=False) + plain(ws.CONTINUATION, text[3:]))
        opcode, payload = await read_frame(reader)
        assert opcode == ws.PONG
        pongs.append(payload)
        writer.write(plain(ws.CLOSE, struct.pack("!H", 4403) + b"token_revoked"))
        assert (await read_frame(reader))[0] == ws.CLOSE

    server, port = await serve(speak)
    socket = await ws.connect(f"ws://127.0.0.1:{port}/")
    assert await socket.receive() == "分片"
    with pytest.raises(ws.Closed) as closed:
        await socket.receive()
    assert (closed.value.code, closed.value.reason, pongs) == (4403, "token_revoked", [b"hi"])
    server.close()


@pytest.mark.parametrize(
    "frames",
    [
        plain(ws.CONTINUATION, b"x"),
        bytes([0xC1, 0]),
        bytes([0x81, 0x80, 0, 0, 0, 0]),
        plain(ws.PING, b"x" * 126),
        plain(ws.TEXT, b"a", fin=False) + plain(ws.TEXT, b"b"),
        bytes([0x83, 0]),
        bytes([0x81, 127]) + struct.pack("!Q", 1 << 40),
    ],
    ids=["continuation", "reserved bits", "masked", "long ping", "interleaved", "opcode", "huge"],
)
async def test_what_breaks_the_protocol_ends_the_connection(frames: bytes) -> None:
    async def speak(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, headers: dict[str, str]
    ) -> None:
        writer.write(frames)
        await reader.read()

    server, port = await serve(speak)
    socket = await ws.connect(f"ws://127.0.0.1:{port}/")
    with pytest.raises(ws.WebSocketError):
        await asyncio.wait_for(socket.receive(), 60)
    socket.abort()
    server.close()


async def test_a_vanished_peer_is_1006_and_a_refusal_names_its_status() -> None:
    async def leave(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, headers: dict[str, str]
    ) -> None:
        return

    server, port = await serve(leave)
    socket = await ws.connect(f"ws://127.0.0.1:{port}/")
    with pytest.raises(ws.Closed) as closed:
        await socket.receive()
    assert closed.value.code == 1006
    server.close()
    server, port = await serve(leave, "403 Forbidden")
    with pytest.raises(ws.HandshakeRefused) as refused:
        await ws.connect(f"ws://127.0.0.1:{port}/")
    assert refused.value.status == 403
    server.close()
    with pytest.raises(ws.WebSocketError):
        await ws.connect("http://127.0.0.1/")


async def test_tls_is_verified_and_an_own_authority_can_be_given(tmp_path) -> None:
    import ssl
    import subprocess

    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
    ]
    command += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raw = (await reader.readuntil(b"\r\n\r\n")).decode()
        sent = next(
            line.split(": ", 1)[1] for line in raw.split("\r\n") if line.startswith("Sec-WebSocket-Key")
        )
        accept = base64.b64encode(hashlib.sha1((sent + ws.GUID).encode()).digest()).decode()
        head = "HTTP/1.1 101 OK\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        writer.write(f"{head}Sec-WebSocket-Accept: {accept}\r\n\r\n".encode() + plain(ws.TEXT, b"safe"))

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(ws.WebSocketError, match="certificate"):
        await ws.connect(f"wss://localhost:{port}/")
    socket = await ws.connect(f"wss://localhost:{port}/", ca_file=str(certificate))
    assert await socket.receive() == "safe"
    socket.abort()
    server.close()
