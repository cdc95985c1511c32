"""`Idempotency-Key` for API writes: a mixin for view sets."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from django.core.files.base import File
from django.db import IntegrityError, transaction
from django.utils.translation import gettext_lazy as _
from rest_framework.renderers import JSONRenderer
from rest_framework.request import Request
from rest_framework.response import Response

from portal.kernel.errors import Conflict, Invalid
from portal.ops.models import IdempotencyRecord

WRITES = {"POST", "PUT", "PATCH", "DELETE"}


class IdempotentWrites:
    """Put before a DRF view class. A write with a key seen before answers as it did then.

    The record is written in the transaction of the write (the mixin opens it), so a crash in between leaves
    neither. The same key with another body or route is 409 `idempotency_key_reused`.
    """

    secret_fields: frozenset[str] = frozenset()
    """Members of an answer that are shown once and never kept: a replay has null there."""

    def dispatch(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        key = request.headers.get("Idempotency-Key", "")
        if not key or request.method not in WRITES:
            return super().dispatch(request, *args, **kwargs)  # type: ignore[misc]
        with transaction.atomic():
            return super().dispatch(request, *args, **kwargs)  # type: ignore[misc]

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super().initial(request, *args, **kwargs)  # type: ignore[misc]
        self._record: IdempotencyRecord | None = None
        key = request.headers.get("Idempotency-Key", "")
        if not key or request.method not in WRITES:
            return
        if len(key) > 128:
            raise Invalid(
                code="idempotency_key_too_long", detail=_("Idempotency-Key takes up to 128 characters.")
            )
        route = f"{request.method} {request.path}"[:300]
        body = hashlib.sha256(json.dumps(request.data, sort_keys=True, default=_plain).encode()).hexdigest()
        try:
            with transaction.atomic():
                self._record = IdempotencyRecord.objects.create(
                    user_id=request.user.pk, key=key, route=route, body_hash=body
                )
        except IntegrityError:
            kept = IdempotencyRecord.objects.get(user_id=request.user.pk, key=key)
            if (kept.route, kept.body_hash) != (route, body):
                raise Conflict(
                    code="idempotency_key_reused",
                    detail=_("This Idempotency-Key was used for another write. Use a new one."),
                ) from None
            raise _Replay(kept) from None

    def handle_exception(self, exc: Exception) -> Response:
        if isinstance(exc, _Replay):
            return Response(exc.kept.response, status=exc.kept.status, headers={"Idempotent-Replay": "true"})
        return super().handle_exception(exc)  # type: ignore[misc]

    def finalize_response(self, request: Request, response: Response, *args: Any, **kwargs: Any) -> Response:
        record = getattr(self, "_record", None)
        if record is not None and response.status_code < 400:
            kept = json.loads(JSONRenderer().render(response.data))  # as it goes out, times too
            if isinstance(kept, dict):
                kept |= dict.fromkeys(self.secret_fields & kept.keys())
            IdempotencyRecord.objects.filter(pk=record.pk).update(status=response.status_code, response=kept)
        elif record is not None:  # nothing was done (services undo their own writes): the key stays free
            IdempotencyRecord.objects.filter(pk=record.pk).delete()
        return super().finalize_response(request, response, *args, **kwargs)  # type: ignore[misc]


def _plain(value: Any) -> str:
    """A file by what is in it, whatever it is called; all else as text."""
    if not isinstance(value, File):
        return str(value)
    value.seek(0)
    found = hashlib.sha256()
    for chunk in value.chunks():
        found.update(chunk)
    value.seek(0)
    return f"sha256:{found.hexdigest()}"


class _Replay(Exception):
    def __init__(self, kept: IdempotencyRecord) -> None:
        self.kept = kept
