"""The web process of the agent's tests, and a raw voice that speaks the agent's protocol."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from pool.agent import ws
from pool.models import Node
from pool.services.enrolment import enrolment_code_create, enrolment_redeem
from portal.ops.actor import SYSTEM
from tests.pool.agent.conftest import PATIENCE, Site, site

__all__ = ["site"]


@dataclass
class Voice:
    """A node that says exactly what a test wants."""

    site: Site
    node: Node
    token: str
    hello: dict[str, Any]

    def talk(self, conversation: Callable[[ws.WebSocket], Awaitable[Any]], token: str | None = None) -> Any:
        """Run a conversation on a fresh connection."""

        async def run() -> Any:
            headers = {"Authorization": f"Bearer {self.token if token is None else token}"}
            socket = await ws.connect(f"ws://127.0.0.1:{self.site.port}/agent/ws/", headers)
            try:
                return await asyncio.wait_for(conversation(socket), PATIENCE)
            finally:
                socket.abort()

        return asyncio.run(run())

    async def greet(self, socket: ws.WebSocket) -> dict[str, Any]:
        await socket.send(json.dumps(self.hello))
        return await until(socket, "welcome")


async def until(socket: ws.WebSocket, kind: str) -> dict[str, Any]:
    """The next message of a kind."""
    while True:
        message: dict[str, Any] = json.loads(await socket.receive())
        if message["t"] == kind:
            return message


async def say(socket: ws.WebSocket, **message: Any) -> dict[str, Any] | None:
    """Send a message; the acknowledgement of a durable one."""
    await socket.send(json.dumps(message))
    return await until(socket, "ack") if "seq" in message else None


def voice(site: Site, name: str) -> Voice:
    code = enrolment_code_create(acting_user=SYSTEM, node_name=name)
    done = enrolment_redeem(code=code, hostname=name, machine_id=f"m-{name}", facts={})
    card = {"uuid": f"GPU-{name}", "index": 0, "name": "NVIDIA A100-SXM4-80GB", "memory_mib": 81920}
    hello = {
        "t": "hello",
        "v": 1,
        "hostname": name,
        "machine_id": f"m-{name}",
        "facts": {"nvml": {"ok": True, "reason": None}, "cpu_milli": 8000, "memory_mib": 64000},
        "gpus": [card],
        "jobs": [],
    }
    return Voice(site, done.node, done.token, hello)


@pytest.fixture
def alpha(site: Site) -> Voice:
    return voice(site, "alpha")


@pytest.fixture
def beta(site: Site) -> Voice:
    return voice(site, "beta")
