"""Browser sockets of this room."""

from __future__ import annotations

from typing import Any

from django.urls import path

from monitoring.live.sockets import CellsSocket, WallSocket

websocket_urlpatterns: list[Any] = [
    path("ws/wall/", WallSocket.as_asgi()),
    path("ws/gpus/<uuid:uid>/", CellsSocket.as_asgi(), {"kind": "gpu"}),
    path("ws/nodes/<uuid:uid>/", CellsSocket.as_asgi(), {"kind": "node"}),
    path("ws/allocations/<uuid:uid>/", CellsSocket.as_asgi(), {"kind": "allocation"}),
]
