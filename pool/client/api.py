"""Calls to the installation's API: JSON in, JSON out, problems as ``Problem``, lost connections as ``Away``."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from pool.agent.ws import tls_context
from pool.client import VERSION
from pool.client.settings import Settings
from pool.client.words import language, say

SECONDS = 60
PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)


class Problem(Exception):
    """The installation refused: ``status``, ``code``, and its own words in the reader's language."""

    def __init__(self, status: int, body: dict[str, Any]) -> None:
        self.status = status
        self.code = str(body.get("code") or f"http_{status}")
        self.body = body
        super().__init__(str(body.get("detail") or body.get("title") or f"HTTP {status}"))

    def lines(self) -> list[str]:
        """What to print."""
        fields = [f"  {one.get('pointer')}: {one.get('detail')}" for one in self.body.get("errors") or []]
        return [f"{self} [{self.code}]", *fields]


class Away(Exception):
    """Nobody answers, or something on the way does not."""


class Api:
    """One installation, one token."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        handlers: list[Any] = []
        if settings.url.startswith("https:"):
            handlers.append(urllib.request.HTTPSHandler(context=tls_context(settings.ca_file or None)))
        self._opener = urllib.request.build_opener(*handlers)

    def call(
        self, method: str, path: str, body: Any = None, raw: Any = None, size: int = 0, **query: Any
    ) -> Any:
        """One call below ``/api/v1``. ``raw``: a file of ``size`` bytes to send as it is (gzip)."""
        url = f"{self.settings.url}/api/v1{path}"
        wanted = {name: value for name, value in query.items() if value not in (None, "")}
        if wanted:
            url += "?" + urllib.parse.urlencode(wanted)
        headers = {
            "Authorization": f"Bearer {self.settings.token}",
            "Accept": "application/json",
            "Accept-Language": language(),
            "User-Agent": f"gpupool/{VERSION}",
        }
        data = raw
        if body is not None:
            data = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        elif raw is not None:
            headers["Content-Type"] = "application/gzip"
            headers["Content-Length"] = str(size)
        request = urllib.request.Request(url, data=data, headers=headers, method=method)
        try:
            with self._opener.open(request, timeout=SECONDS) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            raise _problem(error) from error
        except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
            raise Away(str(getattr(error, "reason", error) or type(error).__name__)) from error
        try:
            return json.loads(text.decode("utf-8")) if text else None
        except ValueError as error:
            raise Away("the answer is not of this installation") from error

    def get(self, path: str, **query: Any) -> Any:
        """Read; a connection that is lost is tried again for as long as it takes, and said once."""
        failures = 0
        while True:
            try:
                return self.call("GET", path, **query)
            except Away as away:
                if failures == 0:
                    say("connection lost ({why}); trying again", why=away)
            except Problem as problem:
                if problem.status not in (429, 502, 503, 504):
                    raise
            time.sleep(PAUSES[min(failures, len(PAUSES) - 1)])
            failures += 1

    def post(self, path: str, body: Any) -> Any:
        """Write once."""
        return self.call("POST", path, body)

    def socket_url(self, uid: str) -> str:
        """Where sessions of an allocation are opened."""
        return "ws" + self.settings.url[4:] + f"/client/ws/{uid}/"


def _problem(error: urllib.error.HTTPError) -> Exception:
    text = error.read(1 << 20)
    try:
        body = json.loads(text.decode("utf-8"))
    except (ValueError, UnicodeDecodeError):
        body = {}
    if error.code in (502, 503, 504) and not body:
        return Away(f"HTTP {error.code}")
    return Problem(error.code, body if isinstance(body, dict) else {})
