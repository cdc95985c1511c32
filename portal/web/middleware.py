"""Errors with a meaning become pages: a ``DomainError`` that a page view lets through, and a database that is away."""

from __future__ import annotations

from collections.abc import Callable

import redis
import structlog
from django.db import InterfaceError, OperationalError
from django.http import HttpRequest, HttpResponse

from portal.kernel.errors import DomainError
from portal.web import counts

log = structlog.get_logger(__name__)


class DomainErrorMiddleware:
    """Shows what services refuse, with their own status and words. Views that show a form catch the error
    themselves to keep what was typed; this is for all others."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        response = self.get_response(request)
        user = getattr(request, "user", None)
        if request.method not in {"GET", "HEAD", "OPTIONS"} and user is not None and user.pk:
            counts.forget(user.pk)
        return response

    def process_exception(self, request: HttpRequest, exception: Exception) -> HttpResponse | None:
        """The page for an error with a meaning; None leaves the rest to Django's 500."""
        from portal.web.views import error_page, unavailable

        if isinstance(exception, DomainError):
            known = exception.status in {400, 403, 404, 409, 412}
            return error_page(
                request,
                exception.status,
                code=exception.code,
                detail=exception.detail,
                template=f"errors/{exception.status}.html" if known else "errors/400.html",
                extra={"errors": exception.errors, "blocking": exception.blocking},
            )
        if isinstance(exception, OperationalError | InterfaceError | redis.ConnectionError):
            log.warning("backend_unavailable", error=type(exception).__name__, path=request.path)
            return unavailable(request)
        return None
