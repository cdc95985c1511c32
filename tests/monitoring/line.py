"""A WebSocket client for tests, straight on the ASGI application (channels' own needs daphne)."""

from __future__ import annotations

import json
from typing import Any

from asgiref.testing import ApplicationCommunicator


class Line(ApplicationCommunicator):
    """One connection to `path` as `user`."""

    def __init__(self, application: Any, path: str, user: Any = None) -> None:
        scope = {
            "type": "websocket",
            "path": path,
            "query_string": b"",
            "headers": [],
            "subprotocols": [],
            "user": user,
        }
        super().__init__(application, scope)

    async def connect(self) -> bool:
        await self.send_input({"type": "websocket.connect"})
        return bool((await self.receive_output(15))["type"] == "websocket.accept")

    async def disconnect(self) -> None:
        await self.send_input({"type": "websocket.disconnect", "code": 1000})
        await self.wait(15)

    async def receive(self, timeout: float = 3) -> str | bytes:
        got = await self.receive_output(timeout)
        assert got["type"] == "websocket.send", got
        return got.get("text") or got["bytes"]

    async def receive_json(self, timeout: float = 3) -> dict[str, Any]:
        data: dict[str, Any] = json.loads(await self.receive(timeout))
        return data

    async def send_json(self, message: dict[str, Any]) -> None:
        await self.send_input({"type": "websocket.receive", "text": json.dumps(message)})
