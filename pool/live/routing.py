"""Sockets of machines, which carry tokens and no session of a browser."""

from __future__ import annotations

from typing import Any

from django.urls import path

from pool.live.remote_sockets import NodeSocket, PersonSocket

machine_urlpatterns: list[Any] = [
    path("agent/remote/<uuid:session>/", NodeSocket.as_asgi()),
    path("client/ws/<uuid:uid>/", PersonSocket.as_asgi()),
]
