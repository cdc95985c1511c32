"""One GET of bounded time and size. Never raises: the answer says what came and why the rest did not.

Redirects are not followed (credentials go to the address that was set, nowhere else). Two kinds of failure are told
apart: the other side refuses us (`unauthorized`), or it cannot be reached or answers badly.
"""

from __future__ import annotations

import base64
import http.client
import ssl
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

CONNECT_S = 4.0
TOTAL_S = 10.0
LIMIT = 32 * 1024 * 1024
_PIECE = 256 * 1024


@dataclass(frozen=True)
class Fetched:
    """`code` is empty for a whole body, `cut` for a part of one, else why there is none: unauthorized, refused,
    unreachable, timeout, too_large, bad_address. `detail` is a status or the name of an error."""

    body: bytes
    code: str
    detail: str = ""
    ms: int = 0

    @property
    def readable(self) -> bool:
        """Whether there is something to parse."""
        return self.code in ("", "cut")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is followed."""


_opener = urllib.request.build_opener(_NoRedirect)


def fetch(
    url: str,
    *,
    auth: str = "none",
    username: str = "",
    secret: str = "",
    limit: int = LIMIT,
    total_s: float = TOTAL_S,
) -> Fetched:
    """The body behind `url`, at most `limit` bytes within `total_s` seconds."""
    began = time.monotonic()
    if not url.startswith(("http://", "https://")):
        return Fetched(b"", "bad_address")
    headers = {
        "User-Agent": "gpupool",
        "Accept": "text/plain, application/json;q=0.9",
        "Accept-Encoding": "identity",
    }
    if auth == "bearer":
        headers["Authorization"] = f"Bearer {secret}"
    elif auth == "basic":
        headers["Authorization"] = "Basic " + base64.b64encode(f"{username}:{secret}".encode()).decode()

    def done(body: bytes, code: str, detail: str = "") -> Fetched:
        return Fetched(body, code, detail, round((time.monotonic() - began) * 1000))

    pieces: list[bytes] = []
    try:
        with _opener.open(urllib.request.Request(url, headers=headers), timeout=CONNECT_S) as answer:
            size = 0
            while True:
                if time.monotonic() - began > total_s:
                    return done(b"", "timeout")
                piece = answer.read1(_PIECE)
                if not piece:
                    break
                pieces.append(piece)
                size += len(piece)
                if size > limit:
                    return done(b"", "too_large", str(size))
            promised = answer.headers.get("Content-Length")
        body = b"".join(pieces)
        short = promised is not None and promised.isdecimal() and len(body) < int(promised)
        return done(body, "cut" if short else "")
    except urllib.error.HTTPError as error:
        return done(b"", "unauthorized" if error.code in (401, 403) else "refused", str(error.code))
    except (http.client.IncompleteRead, ConnectionResetError):
        return done(b"".join(pieces), "cut") if pieces else done(b"", "unreachable", "reset")
    except TimeoutError:
        return done(b"", "timeout")
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        late = isinstance(reason, TimeoutError)
        kind = "tls" if isinstance(reason, ssl.SSLError) else type(reason).__name__
        return done(b"", "timeout" if late else "unreachable", kind)
