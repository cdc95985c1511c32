"""What the live wall costs: 10,000 cards that each tell a sample every ten seconds, 500 open walls, one web process.

A sample is published as ingest does (its time is the moment of publishing); every socket notes when the frame with
that sample arrives. Then 2,000 sockets: every frame has to follow the one before by one. Then 500 with one reader
that takes nothing: the others must not notice. The clients run in this process, which has to be quick enough not to
be what is measured; its own share of the delay is part of the figures.
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


async def _follow(socket: Any, seen: Seen) -> None:
    number: int | None = None
    newest = 0.0
    async for frame in socket:
        arrived = time.time() * 1000
        _version, kind, _zero, _identity, n, at = HEAD.unpack_from(frame)
        if kind == 0:
            seen.snapshots += seen.counting
        elif kind == 1 and number is not None and n != number + 1:
            seen.gaps += 1
        number = n
        if kind == 1 and seen.counting:
            seen.frames += 1
            seen.bytes += len(frame)
            if at > newest:
                seen.delays.append(arrived - at)
        newest = max(newest, at)


async def _open(port: int, cookie: str, count: int) -> list[Any]:
    from websockets.asyncio.client import connect

    async def one() -> Any:
        return await connect(
            f"ws://127.0.0.1:{port}/ws/wall/", additional_headers={"Cookie": cookie}, compression=None,
            origin=f"http://127.0.0.1:{port}", max_size=None, open_timeout=60, ping_interval=None,
        )  # fmt: skip

    sockets: list[Any] = []
    for begin in range(0, count, 50):
        sockets += await asyncio.gather(*(one() for _ in range(min(50, count - begin))))
    return sockets


async def _round(web: Any, ids: list[int], count: int, *, slow: bool = False) -> dict[str, float]:
    import numpy as np

    from monitoring.services.bus import publish
    from tests.perf._wall_scale import cpu_seconds, records, resident_mb

    seen = Seen()
    sockets = await _open(web.port, web.cookie, count)
    tasks = [asyncio.create_task(_follow(socket, seen)) for socket in sockets]
    idle = (await _open(web.port, web.cookie, 1))[0] if slow else None
    if idle is not None:
        idle.transport.pause_reading()
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
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    if idle is not None:
        idle.transport.abort()
    await asyncio.gather(*(socket.close() for socket in sockets), return_exceptions=True)
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
