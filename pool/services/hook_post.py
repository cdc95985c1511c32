"""A signed post to the address of a checkpoint hook, safe against being sent inside the network.

People choose these addresses, the installation calls them: so an address that resolves to a private, loopback,
link-local or otherwise not public one is refused unless an administrator allowed it (GPUPOOL_HOOK_ALLOW: host
names, `.suffix`, networks). The name is resolved once and that very address is connected to; redirects are not
followed; little of the answer is read.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import json
import socket
import ssl
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from django.conf import settings

from portal.kernel.addresses import may_be_called
from portal.kernel.clock import now
from portal.notify.services.signing import SIGNATURE, TIMESTAMP, signature

MOST_READ = 2000


@dataclass(frozen=True, slots=True)
class PostAnswer:
    """`ok`: the checkpoint is written (2xx but 202). `later`: 202, it is being written. `text` names the rest."""

    ok: bool
    later: bool
    text: str


class AddressRefused(Exception):
    """The address may not be called; the text says why."""


def hook_secret(request_uid: str) -> str:
    """The key that a request's checkpoint posts are signed with; its holder may read it."""
    return hmac.new(
        settings.SECRET_KEY.encode(), f"checkpoint:{request_uid}".encode(), hashlib.sha256
    ).hexdigest()


def allowed_address(host: str, port: int) -> str:
    """The address to connect to. Raises AddressRefused for one that is not public and not allowed by name or
    network, and where the name is unknown."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise AddressRefused(f"unknown host: {host}") from error
    addresses = [str(row[4][0]) for row in found]
    for address in addresses:
        if not may_be_called(host, address, settings.GPUPOOL_HOOK_ALLOW):
            raise AddressRefused(f"not a public address: {address}")
    return addresses[0]


def post_hook(*, url: str, secret: str, body: dict[str, Any], delivery: str, timeout_s: float) -> PostAnswer:
    """POST the body as JSON with its signature. Never raises."""
    parts = urlsplit(url)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if parts.scheme not in ("http", "https") or not host or parts.username:
        return PostAnswer(False, False, "not an http address")
    port = port or (443 if parts.scheme == "https" else 80)
    data = json.dumps(body, ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode()
    timestamp = str(int(now().timestamp()))
    headers = {
        "Host": host if parts.port is None else f"{host}:{port}",
        "Content-Type": "application/json; charset=utf-8",
        "User-Agent": f"gpupool/{settings.GPUPOOL_VERSION}",
        TIMESTAMP: timestamp,
        SIGNATURE: signature(secret, timestamp, data),
        "X-GPUPool-Delivery": delivery,
    }
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    try:
        with _connect(allowed_address(host, port), port, timeout_s) as raw:
            secure = parts.scheme == "https"
            stream = ssl.create_default_context().wrap_socket(raw, server_hostname=host) if secure else raw
            connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
            connection.sock = stream
            try:
                connection.request("POST", target, body=data, headers=headers)
                answer = connection.getresponse()
                answer.read(MOST_READ)
                return PostAnswer(
                    200 <= answer.status < 300 and answer.status != 202,
                    answer.status == 202,
                    str(answer.status),
                )
            finally:
                connection.close()
    except AddressRefused as refusal:
        return PostAnswer(False, False, str(refusal))
    except (OSError, ValueError, http.client.HTTPException) as error:
        return PostAnswer(False, False, f"{type(error).__name__}: {error}"[:300])


def _connect(address: str, port: int, timeout_s: float) -> socket.socket:
    return socket.create_connection((address, port), timeout=timeout_s)
