"""Addresses of live sockets, below the installation's path prefix."""

from __future__ import annotations

from django.conf import settings
from django.http import HttpRequest


def socket_path(request: HttpRequest, path: str) -> str:
    """`/prefix/ws/<path>/`; the browser makes it ws: or wss: by the page it stands on."""
    prefix = (settings.FORCE_SCRIPT_NAME or request.META.get("SCRIPT_NAME", "")).rstrip("/")
    return f"{prefix}/ws/{path}/"
