"""Routing of WebSockets. Browser sockets check origin and session; the agent socket checks its node token."""

from __future__ import annotations

from channels.auth import AuthMiddlewareStack
from channels.routing import URLRouter
from channels.security.websocket import AllowedHostsOriginValidator
from django.urls import path

from monitoring.live.ingest_sink import samples_sink
from monitoring.live.routing import websocket_urlpatterns
from pool.live.agent_socket import AgentConsumer

_browser = AllowedHostsOriginValidator(AuthMiddlewareStack(URLRouter(websocket_urlpatterns)))

websocket_application = URLRouter(
    [
        path("agent/ws/", AgentConsumer.as_asgi(on_samples=samples_sink)),
        path("", _browser),
        path("<path:rest>", _browser),
    ]
)
