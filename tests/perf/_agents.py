"""Many agents on one event loop, as cheap as can be: raw sockets, frames made once, so that the load costs little."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any


def frame(payload: bytes) -> bytes:
    """A client's text frame; the mask is zero, so the payload stands as it is."""
    size = len(payload)
    if size < 126:
        head = bytes([0x81, 0x80 | size])
    elif size < 65536:
        head = bytes([0x81, 0x80 | 126]) + size.to_bytes(2, "big")
    else:
        head = bytes([0x81, 0x80 | 127]) + size.to_bytes(8, "big")
    return head + b"\0\0\0\0" + payload


class Agent(asyncio.Protocol):
    """One connection: upgrade, hello, then whatever is sent. `acked(seq)` is called for each acknowledgement."""

    def __init__(self, token: str, acked: Callable[[int], None]) -> None:
        self.token, self.acked = token, acked
        self.buffer = bytearray()
        self.upgraded = False
        self.welcomed: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        key = base64.b64encode(os.urandom(16)).decode()
        transport.write(
            f"GET /agent/ws/ HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n"
            f"Authorization: Bearer {self.token}\r\n\r\n".encode()
        )

    def say(self, message: dict[str, Any]) -> None:
        self.transport.write(frame(json.dumps(message, separators=(",", ":")).encode()))

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        if not self.upgraded:
            end = self.buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            assert b" 101 " in self.buffer[:end].split(b"\r\n")[0], bytes(self.buffer[:200])
            del self.buffer[: end + 4]
            self.upgraded = True
        while len(self.buffer) >= 2:
            kind, size, at = self.buffer[0] & 15, self.buffer[1] & 127, 2
            if size == 126:
                size, at = int.from_bytes(self.buffer[2:4], "big"), 4
            elif size == 127:
                size, at = int.from_bytes(self.buffer[2:10], "big"), 10
            if len(self.buffer) < at + size:
                return
            payload = bytes(self.buffer[at : at + size])
            del self.buffer[: at + size]
            if kind == 9:
                self.transport.write(bytes([0x8A, 0x80 | len(payload)]) + b"\0\0\0\0" + payload)
            elif kind == 1:
                self.heard(json.loads(payload))

    def heard(self, message: dict[str, Any]) -> None:
        if message["t"] == "ack":
            self.acked(int(message["seq"]))
        elif message["t"] == "welcome" and not self.welcomed.done():
            self.welcomed.set_result(True)
        elif message["t"] == "refused":
            raise RuntimeError(message)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.welcomed.done():
            self.welcomed.set_result(False)


def samples(uuids: list[str], seq: int, *, at: float | None = None, util: int = 50) -> dict[str, Any]:
    """A message as an agent with NVML sends it: every measure of a card that works."""
    moment = (
        datetime.fromtimestamp(at or time.time(), UTC)
        .isoformat(timespec="milliseconds")
        .replace("+00:00", "Z")
    )
    values = {
        "util": util, "mem_used": 61_000, "mem_total": 81_559, "mem_reserved": 614, "temp": 61, "power_mw": 412_345,
        "power_limit_mw": 700_000, "sm_clock": 1755, "mem_clock": 2619, "throttle": 0, "ecc_uncorr": 0,
        "energy_mj": 5_123_456_789, "sm": 47.5, "tensor": 21.0, "dram": 33.1, "ecc_corr": 0, "ecc_uncorr_total": 0,
        "pcie_gen": 5, "pcie_width": 16, "pcie_gen_max": 5, "pcie_width_max": 16, "pcie_tx_kib_s": 120_000,
        "pcie_rx_kib_s": 80_000, "nvlink_tx_kib_s": 900_000, "nvlink_rx_kib_s": 900_000, "remap_corr": 0,
        "remap_uncorr": 0, "remap_pending": 0, "remap_failure": 0, "persistence": 1, "fabric_state": 3, "mem_temp": 70,
    }  # fmt: skip
    missing = {"fan": "not_supported", "retired_pages": "not_supported"}
    process = {"pid": 4711, "name": "python", "user": "wutao", "mem_mib": 60_000, "sm": 48}
    rows = [[uuid, None, moment, values, missing, [process]] for uuid in uuids]
    return {
        "t": "samples",
        "seq": seq,
        "rows": rows,
        "host": {"cpu": 41.5, "iowait": 1.2, "mem_used_mib": 90_000},
    }
