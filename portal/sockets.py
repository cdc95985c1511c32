"""Routing of WebSockets. Browser sockets check origin and session; the agent socket checks its node token."""

from __future__ import annotations

from typing import Any

from channels.auth import AuthMiddlewareStack
from channels.generic.websocket import AsyncWebsocketConsumer
from channels.routing import URLRouter
from channels.security.websocket import AllowedHostsOriginValidator
from django.urls import path, re_path

from monitoring.live.ingest_sink import samples_sink
from monitoring.live.routing import websocket_urlpatterns
from pool.live.agent_socket import AgentConsumer
from pool.live.routing import machine_urlpatterns


class NoSuchSocket(AsyncWebsocketConsumer):
    """Refuses an address that no room serves, instead of failing on it."""

    async def connect(self) -> None:
        """Close with our code for "not found"."""
        await self.close(code=4404)


_routes = [*websocket_urlpatterns, re_path(r"", NoSuchSocket.as_asgi())]
_browser = AllowedHostsOriginValidator(AuthMiddlewareStack(URLRouter(_routes)))
_agent = AgentConsumer.as_asgi(on_samples=samples_sink)
_machines = URLRouter(
    [path("agent/ws/", _agent), *machine_urlpatterns, re_path(r"", NoSuchSocket.as_asgi())]  # type: ignore[arg-type]
)


async def websocket_application(scope: Any, receive: Any, send: Any) -> None:
    """Agents and people's own machines come with tokens and without a browser's origin and session, so their sockets
    stand beside the browsers' stack."""
    asked = scope["path"].removeprefix(scope.get("root_path", "").rstrip("/"))
    await (_machines if asked.startswith(("/agent/", "/client/")) else _browser)(scope, receive, send)
