"""Signed posts to webhooks.

The signature is `sha256=` and the hex HMAC-SHA256, under the endpoint's secret, of the timestamp header, a dot,
and the body's bytes. A receiver compares in constant time and refuses timestamps older than some minutes.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.utils import timezone, translation

from portal.accounts.middleware import zone_of
from portal.kernel.clock import now
from portal.notify.models import Notification
from portal.notify.texts import absolute, words_of

TIMEOUT_S = 10
SIGNATURE = "X-GPUPool-Signature"
TIMESTAMP = "X-GPUPool-Timestamp"


@dataclass(frozen=True)
class Answer:
    """What the other side said: a 2xx is ok; `text` names the status or the failure."""

    ok: bool
    text: str


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        """A signed body goes to the address that was set, nowhere else."""


_opener = urllib.request.build_opener(_NoRedirect)


def signature(secret: str, timestamp: str, body: bytes) -> str:
    """The value of the signature header."""
    digest = hmac.new(secret.encode(), timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()
    return f"sha256={digest}"


def webhook_body(notice: Notification) -> dict[str, Any]:
    """The JSON of one notice; words in the installation's language, times in UTC."""
    with translation.override(settings.LANGUAGE_CODE), timezone.override(zone_of(None)):
        words = words_of(notice)
    told = Notification.objects.filter(
        kind=notice.kind, subject_uid=notice.subject_uid, threshold=notice.threshold
    )
    if notice.subject_uid is None:
        told = told.filter(pk=notice.pk)
    return {
        "id": str(notice.uid),
        "kind": notice.kind,
        "threshold": notice.threshold,
        "urgent": notice.urgent,
        "title": words.title,
        "body": words.body,
        "url": absolute(notice.url),
        "subject": {"type": notice.subject_type, "uid": str(notice.subject_uid)}
        if notice.subject_uid
        else None,
        "params": notice.params,
        "users": list(told.order_by("user__username").values_list("user__username", flat=True)[:200]),
        "created_at": notice.created_at.isoformat().replace("+00:00", "Z"),
    }


def post_signed(*, url: str, secret: str, body: dict[str, Any], delivery: str) -> Answer:
    """POST the body as JSON with its signature; redirects are not followed. Never raises."""
    if urllib.parse.urlsplit(url).scheme not in {"http", "https"}:
        return Answer(False, "not an http address")
    data = json.dumps(body, ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode()
    timestamp = str(int(now().timestamp()))
    request = urllib.request.Request(
        url,
        data=data,
        method="POST",
        headers={
            "Content-Type": "application/json; charset=utf-8",
            "User-Agent": f"gpupool/{settings.GPUPOOL_VERSION}",
            TIMESTAMP: timestamp,
            SIGNATURE: signature(secret, timestamp, data),
            "X-GPUPool-Delivery": delivery,
        },
    )
    try:
        with _opener.open(request, timeout=TIMEOUT_S) as response:
            return Answer(200 <= response.status < 300, str(response.status))
    except urllib.error.HTTPError as error:
        return Answer(False, str(error.code))
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        return Answer(False, f"{type(error).__name__}: {reason}")
