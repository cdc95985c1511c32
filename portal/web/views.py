"""Pages of the front door: home by role, help, the living design page, error pages, health."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from django.conf import settings
from django.contrib.auth.decorators import login_required
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect, JsonResponse
from django.shortcuts import render
from django.template.loader import render_to_string
from django.utils.translation import gettext as _
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from portal.kernel import clock
from portal.web import health
from portal.web.nav import ADMIN, AUDITOR, FINANCE, LEAD, RESEARCHER, resolve, roles_of

# The first role a person holds decides the home; the first name that is mounted is used.
HOMES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (ADMIN, ("pool:operations", "monitoring:wall")),
    (FINANCE, ("quotas:finance-home", "quotas:month")),
    (LEAD, ("quotas:approvals", "quotas:home")),
    (RESEARCHER, ("quotas:home",)),
    (AUDITOR, ("quotas:month", "monitoring:wall")),
)


@login_required
@require_safe
def home(request: HttpRequest) -> HttpResponse:
    """``/``: the home of the person's role. Someone without a role sees what to do about it."""
    roles = roles_of(request)
    for role, names in HOMES:
        if role in roles and (url := resolve(*names)):
            return HttpResponseRedirect(url)
    return render(request, "portal/home.html", {"has_role": bool(roles)})


@require_safe
def help_page(request: HttpRequest) -> HttpResponse:
    """``/help/``: words and first steps; open to people who are not signed in."""
    return render(
        request, "portal/help.html" if request.user.is_authenticated else "portal/help_signed_out.html"
    )


@require_safe
def design(request: HttpRequest) -> HttpResponse:
    """``/design/``: every component in every state. For staff, and for all in the demo or development."""
    open_to_all = settings.GPUPOOL_DEMO or settings.GPUPOOL_ENV != "production"
    if not (open_to_all or (request.user.is_authenticated and request.user.is_staff)):
        raise Http404
    from portal.web.design import samples

    return render(request, "portal/design.html", samples(request))


# Errors ---------------------------------------------------------------------------------------------------


def error_page(
    request: HttpRequest,
    status: int,
    *,
    code: str = "",
    title: object = "",
    detail: object = "",
    template: str = "",
    extra: dict[str, Any] | None = None,
) -> HttpResponse:
    """A page that says what happened, why, and what next, with the request id. An htmx fragment gets the short
    form; a call that wants JSON gets problem+json."""
    context = {
        "status": status,
        "code": code or HTTPStatus(status).phrase.lower().replace(" ", "_"),
        "heading": title,
        "detail": detail,
        "request_id": getattr(request, "request_id", ""),
        "moment": clock.now(),
        "what": f"{request.method} {request.path}",
        **(extra or {}),
    }
    if request.path_info.startswith("/api/") or "application/json" in request.headers.get("Accept", ""):
        return JsonResponse(
            {
                "type": f"urn:gpupool:error:{context['code']}",
                "title": str(context["code"]).replace("_", " "),
                "status": status,
                "detail": str(detail or title or HTTPStatus(status).phrase),
                "code": context["code"],
                "errors": [],
                "request_id": context["request_id"],
            },
            status=status,
            content_type="application/problem+json",
        )
    if request.headers.get("HX-Request") == "true":
        return render(request, "errors/fragment.html", context, status=status)
    return render(request, template or f"errors/{status}.html", context, status=status)


def bad_request(request: HttpRequest, exception: Exception | None = None) -> HttpResponse:
    """400."""
    return error_page(request, 400, template="errors/400.html")


def forbidden(request: HttpRequest, exception: Exception | None = None) -> HttpResponse:
    """403: who may grant it stands on the page."""
    detail = str(exception) if exception is not None and str(exception) else ""
    return error_page(request, 403, detail=detail)


def not_found(request: HttpRequest, exception: Exception | None = None) -> HttpResponse:
    """404: does not exist, or may not be seen; the two look alike on purpose."""
    return error_page(request, 404)


def server_error(request: HttpRequest) -> HttpResponse:
    """500. Must work when the database does not: the template needs no person and no query."""
    try:
        return error_page(request, 500)
    except Exception:  # the shell itself may be what failed: answer with the bare page
        body = render_to_string("errors/500_bare.html", {"request_id": getattr(request, "request_id", "")})
        return HttpResponse(body, status=500)


def unavailable(request: HttpRequest, detail: object = "") -> HttpResponse:
    """503: the database or Redis is away; running work is not touched."""
    response = error_page(request, 503, detail=detail)
    response["Retry-After"] = "15"
    return response


def csrf_failure(request: HttpRequest, reason: str = "") -> HttpResponse:
    """403 of the CSRF check: mostly a form from a page that was open since before a new sign-in."""
    return error_page(
        request,
        403,
        code="csrf_failed",
        title=_("The form was too old"),
        detail=_(
            "It came from a page opened before you last signed in, or cookies are off. Nothing was changed."
        ),
        template="errors/csrf.html",
    )


# Health ---------------------------------------------------------------------------------------------------


@never_cache
@require_safe
def healthz(request: HttpRequest) -> JsonResponse:
    """The process answers. No database, no Redis: a restart would not mend those."""
    return JsonResponse({"status": "ok", "version": settings.GPUPOOL_VERSION})


@never_cache
@require_safe
def readyz(request: HttpRequest) -> JsonResponse:
    """The process can serve: database, migrations, Redis; 503 with the part that is away."""
    checks = health.checks()
    ready = all(row["ok"] for row in checks)
    return JsonResponse(
        {"status": "ready" if ready else "unavailable", "checks": checks}, status=200 if ready else 503
    )
