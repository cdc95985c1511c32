"""What every API of the installation shares: problem+json, paging, strict filters, preconditions."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.core.exceptions import PermissionDenied
from django.http import Http404
from django.utils import timezone
from django.utils.dateparse import parse_datetime
from django.utils.translation import gettext as _
from rest_framework import exceptions, status
from rest_framework.pagination import CursorPagination, PageNumberPagination
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import set_rollback

from portal.kernel.errors import DomainError, Invalid, PreconditionFailed

PROBLEM_TYPE = "application/problem+json"


def problem(request: Any, error: DomainError) -> dict[str, Any]:
    """RFC 9457 body of `error` with our members: code, errors, blocking, request_id."""
    body: dict[str, Any] = {
        "type": f"urn:gpupool:error:{error.code}",
        "title": error.code.replace("_", " "),
        "status": error.status,
        "detail": str(error.detail),
        "code": error.code,
        "errors": [{"pointer": e["pointer"], "detail": str(e["detail"])} for e in error.errors],
        "request_id": getattr(request, "request_id", None),
    }
    if error.blocking:
        body["blocking"] = dict(error.blocking)
    body.update(error.extra)
    return body


def _flatten(detail: Any, pointer: str = "") -> list[dict[str, Any]]:
    if isinstance(detail, dict):
        return [p for key, value in detail.items() for p in _flatten(value, f"{pointer}/{key}".strip("/"))]
    if isinstance(detail, list):
        return [p for value in detail for p in _flatten(value, pointer)]
    return [{"pointer": pointer or "non_field_errors", "detail": str(detail)}]


def problem_handler(exc: Exception, context: dict[str, Any]) -> Response | None:
    """DRF exception handler: everything a client did wrong comes back as problem+json with a stable code."""
    request: Request = context["request"]
    error: DomainError
    headers: dict[str, str] = {}
    if isinstance(exc, DomainError):
        error = exc
    elif isinstance(exc, Http404):
        error = DomainError(code="not_found", detail=_("There is no such thing here."), status=404)
    elif isinstance(exc, PermissionDenied):
        error = DomainError(code="forbidden", detail=_("Your roles do not allow this."), status=403)
    elif isinstance(exc, exceptions.ValidationError):
        problems = _flatten(exc.detail)
        error = Invalid(code="invalid", detail=_("Some fields need a change."), errors=problems)  # type: ignore[arg-type]
    elif isinstance(exc, exceptions.APIException):
        code = exc.get_codes()
        error = DomainError(
            code=code if isinstance(code, str) else "error", detail=exc.detail, status=exc.status_code
        )
        if getattr(exc, "wait", None):
            headers["Retry-After"] = str(int(exc.wait))  # type: ignore[attr-defined]
        if getattr(exc, "auth_header", None):
            headers["WWW-Authenticate"] = exc.auth_header  # type: ignore[attr-defined]
    else:
        return None
    set_rollback()
    return Response(problem(request, error), status=error.status, headers=headers, content_type=PROBLEM_TYPE)


def _asked_size(request: Request, name: str, cap: int) -> int | None:
    """Rows a page as asked for, None where nothing is; beyond the cap the cap counts, all else is 400."""
    text = request.query_params.get(name, "")
    if not text:
        return None
    if not text.isascii() or not text.isdecimal() or not int(text[:9]):
        raise Invalid.field(name, _("A whole number from 1 to %(cap)d is needed here.") % {"cap": cap})
    return min(int(text[:9]), cap)


class Pages(PageNumberPagination):
    """Page numbers with a cap: ?page=2&page_size=50 (at most 200). A page after the last is 404."""

    page_size = 50
    page_size_query_param = "page_size"
    max_page_size = 200

    def get_page_size(self, request: Request) -> int:
        """Rows a page."""
        return _asked_size(request, self.page_size_query_param, self.max_page_size) or self.page_size

    def get_page_number(self, request: Request, paginator: Any) -> int:
        """Which page; the first where none is asked for."""
        text = request.query_params.get(self.page_query_param, "") or "1"
        if not text.isascii() or not text.isdecimal() or not int(text[:9]):
            raise Invalid.field(self.page_query_param, _("A whole number from 1 on is needed here."))
        return int(text[:9])


class Cursor(CursorPagination):
    """For streams that only grow (audit, telemetry): newest first."""

    page_size = 50
    page_size_query_param = "page_size"
    max_page_size = 500
    ordering = "-id"

    def get_page_size(self, request: Request) -> int:
        """Rows a page."""
        return _asked_size(request, self.page_size_query_param, self.max_page_size) or self.page_size

    def decode_cursor(self, request: Request) -> Any:
        """The place in the list that `cursor` names."""
        try:
            return super().decode_cursor(request)
        except exceptions.NotFound:
            raise Invalid.field("cursor", _("This is no cursor of ours.")) from None


def time_param(request: Request, name: str) -> datetime | None:
    """A query parameter as an ISO instant with its zone (`Z` or an offset); None where it is not sent."""
    value = request.query_params.get(name, "")
    if not value:
        return None
    try:
        parsed = parse_datetime(value.replace(" ", "+"))
    except ValueError:
        parsed = None
    if parsed is None or timezone.is_naive(parsed):
        raise Invalid.field(name, _("An instant like 2026-06-16T06:03:12Z."))
    return parsed


def check_if_match(request: Request, version: int) -> None:
    """Compare `If-Match` (where sent) with the object's version; the ETag is the quoted version number."""
    sent = request.headers.get("If-Match")
    if sent and sent.strip() != "*" and sent.strip().strip('W/"') != str(version):
        raise PreconditionFailed(
            code="version_changed",
            detail=_("It was changed by somebody else meanwhile. Load it again and repeat the change."),
            extra={"current_version": version},
        )


def etag(version: int) -> dict[str, str]:
    """Response headers that name the object's version."""
    return {"ETag": f'"{version}"'}


__all__ = [
    "PROBLEM_TYPE",
    "Cursor",
    "Pages",
    "check_if_match",
    "etag",
    "problem",
    "problem_handler",
    "status",
    "time_param",
]
