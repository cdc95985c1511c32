"""Errors with a meaning become pages: a ``DomainError`` that a page view lets through, and a database that is away."""

from __future__ import annotations

import json
from collections.abc import Callable
from http import HTTPStatus
from urllib.parse import urlsplit, urlunsplit

import redis
import structlog
from django.conf import settings
from django.contrib import messages
from django.contrib.auth.views import redirect_to_login
from django.core.exceptions import RequestDataTooBig
from django.db import InterfaceError, OperationalError
from django.http import HttpRequest, HttpResponse, HttpResponseBadRequest, JsonResponse, UnreadablePostError
from django.shortcuts import resolve_url
from django.utils.translation import gettext_lazy as _

from portal.kernel.api import PROBLEM_TYPE, problem
from portal.kernel.errors import DomainError
from portal.web import counts

log = structlog.get_logger(__name__)


def _sign_in_first(request: HttpRequest, response: HttpResponse) -> HttpResponse:
    """Where a session ended under an open page: a fragment gets 401 instead of the sign-in page in its place (the
    page says so), and after a form the way leads back to the page that it stood on, not to an address that only
    takes forms.
    """
    leads_to = response.headers.get("Location", "")
    if not leads_to or not leads_to.startswith(f"{resolve_url(settings.LOGIN_URL)}?next="):
        return response
    if request.headers.get("HX-Request") == "true":
        return HttpResponse(status=HTTPStatus.UNAUTHORIZED)
    if request.method in {"GET", "HEAD"}:
        return response
    came = urlsplit(request.headers.get("Referer", ""))
    messages.warning(request, _("You were signed out: nothing was done. Sign in and do it again."))
    return redirect_to_login(urlunsplit(("", "", came.path, came.query, "")) or "/")


def _only_forms(request: HttpRequest, response: HttpResponse) -> HttpResponse:
    """405 to a browser's GET, from a bookmark or Back: a page instead of Django's empty answer."""
    from portal.web.views import error_page

    if request.path_info.startswith(("/api/", "/agent/")):
        return response
    detail = _("Nothing is shown at this address: it only takes what a form sends.")
    page = error_page(request, response.status_code, detail=detail, template="errors/400.html")
    page["Allow"] = response["Allow"]
    return page


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
        if user is None or not user.is_authenticated:
            return _sign_in_first(request, response)
        if response.status_code == HTTPStatus.METHOD_NOT_ALLOWED and request.method == "GET":
            return _only_forms(request, response)
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


def _odd_within(value: object) -> bool:
    """Whether a text anywhere in decoded JSON holds a NUL or half a surrogate pair (UnicodeEncodeError)."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            if "\x00" in one:
                return True
            one.encode()
        elif isinstance(one, dict):
            left += [*one.keys(), *one.values()]
        elif isinstance(one, list):
            left += one
    return False


class PlainTextMiddleware:
    """Refuses text that no field can hold: NUL characters, halves of surrogate pairs, JSON nested without end.

    They come from probes or broken programs; the database would fail on them, so they end here with a clear 400.
    """

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        if self._is_odd(request):
            detail = _("The text holds characters that cannot be kept.")
            if request.path_info.startswith(("/api/", "/agent/")):
                error = DomainError(code="text_invalid", detail=detail)
                return JsonResponse(problem(request, error), status=400, content_type=PROBLEM_TYPE)
            return HttpResponseBadRequest(str(detail), content_type="text/plain; charset=utf-8")
        return self.get_response(request)

    @staticmethod
    def _is_odd(request: HttpRequest) -> bool:
        if "%00" in request.META.get("QUERY_STRING", "") or "\x00" in request.path_info:
            return True
        if request.method in {"GET", "HEAD", "OPTIONS"}:
            return False
        kind = request.content_type or ""
        try:
            if kind.endswith("json"):
                body = request.body
                if b"\\u" in body or body.count(b"[") + body.count(b"{") > 200:
                    return _odd_within(json.loads(body))
                return b"\x00" in body
            form = kind in {"application/x-www-form-urlencoded", "multipart/form-data"}
            if form and not request.path_info.startswith(
                ("/api/", "/agent/")
            ):  # these read the stream themselves
                return any("\x00" in value for values in request.POST.lists() for value in values[1])
        except (UnicodeEncodeError, RecursionError):
            return True
        except (ValueError, RequestDataTooBig, UnreadablePostError):
            return False  # whoever reads it next says what is wrong
        return False
