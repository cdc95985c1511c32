"""What the live wall costs: 10,000 cards that each tell a sample every ten seconds, 500 open walls, one web process.

A sample is published as ingest does (its time is the moment of publishing); every socket notes when the frame with
that sample arrives. Then 2,000 sockets: every frame has to follow the one before by one. Then 500 with one reader
that takes nothing: the others must not notice. The clients run in this process and share
its processors; their part of the delay is in the figures.
"""

from __future__ import annotations

import asyncio
import struct
import time
from dataclasses import dataclass, field
from typing import Any

CARDS, WALLS, MANY = 10_000, 500, 2_000
PARTS = 10
SECONDS = 20
HEAD = struct.Struct("<BBHIQd")


@dataclass
class Seen:
    """What all sockets of one round saw."""

    delays: list[float] = field(default_factory=list)
    gaps: int = 0
    frames: int = 0
    snapshots: int = 0
    bytes: int = 0
    counting: bool = False


class Reader(asyncio.Protocol):
    """The least of a WebSocket client that reads: thousands of them must cost little beside what is measured."""

    def __init__(self, seen: Seen, request: bytes) -> None:
        self.seen, self.request = seen, request
        self.buffer = bytearray()
        self.number: int | None = None
        self.newest = 0.0
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.write(self.request)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.opened.done():
            self.opened.set_exception(exc or ConnectionResetError())

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        if not self.opened.done():
            head, found, rest = bytes(self.buffer).partition(b"\r\n\r\n")
            if not found:
                return
            if b" 101 " not in head.split(b"\r\n")[0]:
                self.opened.set_exception(ConnectionRefusedError(head[:80]))
                return
            self.buffer = bytearray(rest)
            self.opened.set_result(None)
        while len(self.buffer) >= 2:
            size, offset = self.buffer[1] & 127, 2
            if size >= 126:
                wide = 2 if size == 126 else 8
                if len(self.buffer) < 2 + wide:
                    return
                size, offset = int.from_bytes(self.buffer[2 : 2 + wide], "big"), 2 + wide
            if len(self.buffer) < offset + size:
                return
            kind, payload = self.buffer[0] & 15, bytes(self.buffer[offset : offset + size])
            del self.buffer[: offset + size]
            if kind == 2:
                self.take(payload)
            elif kind == 9:  # a pong with a mask of zeros
                self.transport.write(bytes([0x8A, 0x80 | len(payload), 0, 0, 0, 0]) + payload)

    def take(self, frame: bytes) -> None:
        """One frame of the wall."""
        seen, arrived = self.seen, time.time() * 1000
        _version, kind, _zero, _identity, n, at = HEAD.unpack_from(frame)
        if kind == 0:
            seen.snapshots += seen.counting
        elif kind == 1 and self.number is not None and n != self.number + 1:
            seen.gaps += 1
        self.number = n
        if kind == 1 and seen.counting:
            seen.frames += 1
            seen.bytes += len(frame)
            if at > self.newest:
                seen.delays.append(arrived - at)
        self.newest = max(self.newest, at)


async def _open(port: int, cookie: str, count: int, seen: Seen) -> list[Reader]:
    request = (
        f"GET /ws/wall/ HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Key: bWVhc3VyZWQgbGl2ZSB3YQ==\r\nSec-WebSocket-Version: 13\r\n"
        f"Origin: http://127.0.0.1:{port}\r\nCookie: {cookie}\r\n\r\n"
    ).encode()
    loop = asyncio.get_running_loop()
    readers: list[Reader] = []
    for begin in range(0, count, 50):
        made = [
            loop.create_connection(lambda: Reader(seen, request), "127.0.0.1", port)
            for _ in range(min(50, count - begin))
        ]
        fresh = [protocol for _transport, protocol in await asyncio.gather(*made)]
        await asyncio.gather(*(reader.opened for reader in fresh))
        readers += fresh
    return readers


async def _round(web: Any, ids: list[int], count: int, *, slow: bool = False) -> dict[str, float]:
    import numpy as np

    from monitoring.services.bus import publish
    from tests.perf._wall_scale import cpu_seconds, records, resident_mb

    seen = Seen()
    readers = await _open(web.port, web.cookie, count, seen)
    if slow:
        (idle,) = await _open(web.port, web.cookie, 1, Seen())
        idle.transport.pause_reading()
        readers.append(idle)
    rng = np.random.default_rng(7)
    await asyncio.sleep(3)
    seen.counting = True
    before, began = cpu_seconds(web.pid), time.monotonic()
    for second in range(SECONDS):
        await asyncio.to_thread(publish, records(ids, second % PARTS, PARTS, rng))
        await asyncio.sleep(max(0.0, began + second + 1 - time.monotonic()))
    core = (cpu_seconds(web.pid) - before) / (time.monotonic() - began)
    await asyncio.sleep(2)
    memory = resident_mb(web.pid)
    for reader in readers:
        reader.transport.abort()
    await asyncio.sleep(1)
    delays = np.array(seen.delays or [1e9])
    return {
        "p50_ms": round(float(np.percentile(delays, 50))),
        "p95_ms": round(float(np.percentile(delays, 95))),
        "max_ms": round(float(delays.max())),
        "core_pct": round(100 * core, 1),
        "memory_mb": round(memory),
        "frames": seen.frames,
        "lost": seen.gaps,
        "resyncs": seen.snapshots,
        "kb_a_frame": round(seen.bytes / max(1, seen.frames) / 1000, 1),
    }


def run() -> dict[str, Any]:
    """Delays from sample to socket, processor, memory, and frames lost."""
    from tests.perf._database import fresh_database

    with fresh_database():
        from tests.perf._wall_scale import cookie_of, fleet, web_process

        ids = fleet(CARDS)
        with web_process(cookie_of()) as web:
            open_walls = asyncio.run(_round(web, ids, WALLS))
            many = asyncio.run(_round(web, ids, MANY))
            slow = asyncio.run(_round(web, ids, WALLS, slow=True))
    return {
        "sizes": {
            "gpus": CARDS,
            "walls": WALLS,
            "many": MANY,
            "changed_a_second": CARDS // PARTS,
            "seconds": SECONDS,
        },
        "figures": {
            **{f"walls_{name}": value for name, value in open_walls.items()},
            **{f"many_{name}": value for name, value in many.items()},
            **{f"slow_{name}": value for name, value in slow.items()},
        },
        "aims": {
            "walls_p95_ms": ["<", 1000],
            "walls_lost": ["<", 1],
            "many_lost": ["<", 1],
            "slow_p95_ms": ["<", 1000],
            "slow_lost": ["<", 1],
        },
    }
