"""Per request: the person's policy (lazy), language, time zone, and the duty to change a first password."""

from __future__ import annotations

import zoneinfo
from collections.abc import Callable
from datetime import UTC
from typing import Any

from django.conf import settings
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import NoReverseMatch, reverse
from django.utils import timezone, translation
from django.utils.functional import SimpleLazyObject

from portal.accounts.policy import Policy, policy_of


def zone_of(user: Any) -> zoneinfo.ZoneInfo:
    """The zone in which times are shown to this person."""
    name = getattr(user, "time_zone", "") or settings.GPUPOOL_BILLING_TIME_ZONE
    try:
        return zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError):
        return zoneinfo.ZoneInfo(settings.GPUPOOL_BILLING_TIME_ZONE)


def policy_of_request(request: HttpRequest) -> Policy:
    """The policy that the middleware put on the request."""
    return request.policy  # type: ignore[attr-defined,no-any-return]


def pool_reader(request: HttpRequest) -> Policy:
    """The same, for pages of those who keep the pool or audit it; Refused for others."""
    policy = policy_of_request(request)
    policy.require(policy.administers_pool or policy.audits)
    return policy


class PersonMiddleware:
    """After authentication: `request.policy`, the zone, and the language where no cookie chose one."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        user = request.user
        request.policy = SimpleLazyObject(lambda: policy_of(user))  # type: ignore[attr-defined]
        if user.is_authenticated:
            if settings.LANGUAGE_COOKIE_NAME not in request.COOKIES and user.language:
                translation.activate(user.language)
                request.LANGUAGE_CODE = translation.get_language()  # type: ignore[attr-defined]
            if user.must_change_password and not self._may_pass(request):
                return HttpResponseRedirect(reverse("accounts:password_change"))
        zone = UTC if request.path_info.startswith("/api/") else zone_of(user)  # programs read UTC
        with timezone.override(zone):
            return self.get_response(request)

    @staticmethod
    def _may_pass(request: HttpRequest) -> bool:
        path = request.path_info
        if path.startswith(("/static/", "/api/", "/i18n/", "/healthz", "/readyz", "/agent/")):
            return True
        try:
            allowed = {reverse("accounts:password_change"), reverse("accounts:logout")}
        except NoReverseMatch:
            return True
        return request.path in allowed
