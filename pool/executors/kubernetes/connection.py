"""One connection to a cluster's API server: who we are, time-outs on everything, and its answers as our two failures.

It uses the official client for TLS and HTTP, and plain dictionaries for objects: clusters of many versions answer, and
lists of thousands are read in a fraction of the time. A kubeconfig comes from people: what in it would run programs or
read files here is refused.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import os
import ssl
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlencode

import urllib3
import yaml
from cryptography import x509
from kubernetes import client
from kubernetes.client.exceptions import ApiException

from pool.executors.base import RetryableFailure, TerminalFailure
from portal.kernel.clock import now

CONNECT_S, READ_S = 3.0, 10.0
LONGEST_PAUSE_S = 60.0
MERGE_PATCH = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"
_FORBIDDEN_USER = (
    "exec",
    "auth-provider",
    "tokenFile",
    "client-certificate",
    "client-key",
    "username",
    "password",
)


@dataclass(frozen=True)
class Access:
    """Where and as whom: an https address, the authority's certificates (PEM; empty: the system's), and a token or a
    client certificate with its key (PEM)."""

    server: str
    ca: str = ""
    server_name: str = ""
    token: str = ""
    certificate: str = ""
    key: str = ""


class Problem(Exception):
    """An answer of the API server that is no success: status code, reason, message and causes of its ``Status``."""

    def __init__(
        self, code: int, reason: str, message: str, causes: tuple[str, ...] = (), retry_after: float = 0.0
    ):
        super().__init__(f"{code} {reason}: {message}")
        self.code = code
        self.reason = reason
        self.message = message
        self.causes = causes
        self.retry_after = retry_after


def access_of(kubeconfig: str, context: str = "") -> Access:
    """What a kubeconfig says, of its current context. Only inline data: `credential_refused` (terminal) where it would
    run a program, read a file, turn off TLS checks, or is no kubeconfig."""
    try:
        document = yaml.safe_load(kubeconfig)
        name = context or document["current-context"]
        chosen = _named(document, "contexts", name)["context"]
        cluster = _named(document, "clusters", chosen["cluster"])["cluster"]
        user = _named(document, "users", chosen["user"])["user"] or {}
    except (yaml.YAMLError, KeyError, TypeError, StopIteration) as error:
        raise TerminalFailure("credential_refused", "this is no complete kubeconfig") from error
    for field in _FORBIDDEN_USER:
        if field in user:
            raise TerminalFailure(
                "credential_refused", f"a kubeconfig with {field!r} is not taken: inline data only"
            )
    if (
        cluster.get("insecure-skip-tls-verify")
        or "certificate-authority" in cluster
        or "proxy-url" in cluster
    ):
        raise TerminalFailure(
            "credential_refused", "certificate-authority-data must be in the kubeconfig itself"
        )
    server = str(cluster.get("server") or "")
    if not server.startswith("https://"):
        raise TerminalFailure("credential_refused", "the server's address must begin with https://")
    return Access(
        server=server.rstrip("/"),
        ca=_plain(cluster.get("certificate-authority-data")),
        server_name=str(cluster.get("tls-server-name") or ""),
        token=str(user.get("token") or ""),
        certificate=_plain(user.get("client-certificate-data")),
        key=_plain(user.get("client-key-data")),
    )


def _named(document: Any, part: str, name: str) -> Any:
    return next(item for item in document[part] if item["name"] == name)


def _plain(data: object) -> str:
    try:
        return base64.b64decode(str(data or ""), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError) as error:
        raise TerminalFailure("credential_refused", "certificates and keys are base64 of PEM") from error


def expires_at(access: Access) -> datetime | None:
    """When the credential ends, as far as it says: a JWT's `exp` or the certificate's last day."""
    if access.token.count(".") == 2:
        part = access.token.split(".")[1]
        with contextlib.suppress(ValueError, KeyError, TypeError):
            said = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
            return datetime.fromtimestamp(int(said["exp"]), UTC)
    if access.certificate:
        with contextlib.suppress(ValueError):
            return x509.load_pem_x509_certificate(access.certificate.encode()).not_valid_after_utc
    return None


class Connection:
    """Calls to one cluster. After a 429 nothing is asked before its `Retry-After` is over."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self.server = access.server
        self._pause_until = 0.0
        configuration = client.Configuration()
        configuration.host = access.server
        configuration.retries = urllib3.Retry(0, redirect=False)
        self._client = client.ApiClient(configuration)
        named: dict[str, Any] = {"server_hostname": access.server_name} if access.server_name else {}
        self._client.rest_client.pool_manager = urllib3.PoolManager(
            ssl_context=_context(access),
            retries=urllib3.Retry(0, redirect=False),
            maxsize=8,
            **named,
        )
        self._headers = {"Accept": "application/json", "User-Agent": "gpu-pool-portal"}
        if access.token:
            self._headers["Authorization"] = f"Bearer {access.token}"

    def close(self) -> None:
        """Give back its sockets."""
        self._client.rest_client.pool_manager.clear()

    # -- what is asked ---------------------------------------------------------------------------------------

    def get(self, path: str, **query: object) -> dict[str, Any]:
        """An object or a list; ``Problem`` with 404 where there is none."""
        return self._json("GET", path, query)

    def create(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Make an object; ``Problem`` with 409 where its name is taken."""
        return self._json("POST", path, {}, body)

    def patch(self, path: str, body: object, kind: str = MERGE_PATCH) -> dict[str, Any]:
        """Change an object."""
        return self._json("PATCH", path, {}, body, kind)

    def replace(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Put an object in place of the one with its resource version."""
        return self._json("PUT", path, {}, body)

    def delete(self, path: str, grace_s: int | None = None, uid: str = "") -> None:
        """Remove an object, of this uid if one is named; nothing where it is gone already."""
        body: dict[str, Any] = {"propagationPolicy": "Background"}
        if grace_s is not None:
            body["gracePeriodSeconds"] = grace_s
        if uid:
            body["preconditions"] = {"uid": uid}
        try:
            self._json("DELETE", path, {}, body)
        except Problem as problem:
            if problem.code not in (404, 409):
                raise

    def text(self, path: str, limit: int, **query: object) -> bytes:
        """A body that is no JSON (logs), at most ``limit`` bytes."""
        answer = self._call("GET", path, query, None, "", (CONNECT_S, READ_S))
        try:
            return bytes(answer.response.read(limit, decode_content=True))
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise RetryableFailure("cluster_away", _short(error)) from error
        finally:
            answer.response.close()

    def events(self, path: str, quiet_s: float, **query: object) -> Iterator[dict[str, Any]]:
        """Events of a watch, until none came for ``quiet_s``."""
        answer = self._call("GET", path, {**query, "watch": "1"}, None, "", (CONNECT_S, READ_S))
        response = answer.response
        rest = b""
        try:
            # The answer itself may take its time; only the events after it are waited for so shortly.
            response.connection.sock.settimeout(quiet_s)
            while True:
                try:
                    data = response.read1(256 * 1024)
                except (urllib3.exceptions.ReadTimeoutError, TimeoutError):
                    return
                if not data:
                    return
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    if line.strip():
                        yield json.loads(line)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise RetryableFailure("cluster_away", _short(error)) from error
        finally:
            response.close()

    # -- how ---------------------------------------------------------------------------------------------------

    def _json(
        self, method: str, path: str, query: Mapping[str, object], body: object = None, kind: str = ""
    ) -> dict[str, Any]:
        answer = self._call(method, path, query, body, kind or "application/json", (CONNECT_S, READ_S))
        try:
            data = answer.response.read(decode_content=True)
            return dict(json.loads(data)) if data else {}
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            # Perhaps it was done and only the answer is lost: asking again finds out.
            raise RetryableFailure("cluster_away", _short(error)) from error
        finally:
            answer.response.release_conn()

    def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, object],
        body: object,
        kind: str,
        timeout: tuple[float, float],
    ) -> Any:
        left = self._pause_until - time.monotonic()
        if left > 0:
            raise RetryableFailure("throttled", f"the API server asked for a pause; {left:.0f} s are left")
        url = self.server + path + (f"?{urlencode(query)}" if query else "")
        headers = dict(self._headers)
        if method not in ("GET", "HEAD"):
            headers["Content-Type"] = kind
        try:
            answer = self._client.call_api(method, url, headers, body, None, timeout)
        except ApiException as error:
            raise RetryableFailure("cluster_away", _short(error.reason or error)) from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise RetryableFailure("cluster_away", _short(error)) from error
        if 200 <= answer.status < 300:
            return answer
        raise self._problem(answer)

    def _problem(self, answer: Any) -> Exception:
        try:
            data = answer.response.read(64 * 1024, decode_content=True)
        except (urllib3.exceptions.HTTPError, OSError):
            data = b""
        finally:
            answer.response.release_conn()
        try:
            said = json.loads(data)
        except ValueError:
            said = {}
        if not isinstance(said, dict):
            said = {}
        details = said.get("details") or {}
        problem = Problem(
            answer.status,
            str(said.get("reason") or ""),
            str(said.get("message") or data[:200].decode("utf-8", "replace")),
            tuple(str(cause.get("reason") or "") for cause in details.get("causes") or []),
            _seconds(answer.headers.get("Retry-After")),
        )
        if problem.code == 401:
            return self._not_known()
        if problem.code == 429 and "DisruptionBudget" not in problem.causes:
            pause = min(LONGEST_PAUSE_S, max(1.0, problem.retry_after))
            self._pause_until = time.monotonic() + pause
            return RetryableFailure("throttled", f"too many requests: the API server asks for {pause:.0f} s")
        if problem.code >= 500:
            return RetryableFailure("cluster_away", f"{problem.code}: {problem.message[:300]}")
        return problem

    def _not_known(self) -> RetryableFailure:
        end = expires_at(self.access)
        if end is not None and end <= now():
            return RetryableFailure("credential_expired", f"the credential ended on {end:%Y-%m-%d %H:%M} UTC")
        return RetryableFailure(
            "credential_refused", "the API server does not know this credential (any more)"
        )


def _seconds(text: str | None) -> float:
    return float(text) if text and text.strip().isdecimal() else 0.0


def _short(error: object) -> str:
    return str(error).replace("\n", " ")[:300]


def _context(access: Access) -> ssl.SSLContext:
    """TLS by the named authority alone. A client key lies in a file of ours for the moment that OpenSSL reads it."""
    try:
        context = ssl.create_default_context(cadata=access.ca or None)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if access.certificate:
            handle, name = tempfile.mkstemp(prefix="gpupool-")  # 0600
            try:
                with os.fdopen(handle, "w") as file:
                    file.write(access.certificate + "\n" + access.key)
                context.load_cert_chain(name)
            finally:
                os.unlink(name)
    except (ssl.SSLError, ValueError) as error:
        raise TerminalFailure(
            "credential_refused", f"certificate or key cannot be used: {_short(error)}"
        ) from error
    return context
