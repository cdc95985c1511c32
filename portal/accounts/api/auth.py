"""Who calls the API: token or session, and what a token's scopes allow. Apart from the view sets, because REST
framework imports these classes while its own views are still loading."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.db.models import Q
from django.utils.functional import SimpleLazyObject
from django.utils.translation import gettext_lazy as _
from rest_framework import exceptions, permissions
from rest_framework.authentication import BaseAuthentication
from rest_framework.request import Request

from portal.accounts.hashes import token_hash
from portal.accounts.models import ApiToken
from portal.accounts.policy import policy_of
from portal.kernel.clock import now


class TokenAuthentication(BaseAuthentication):
    """`Authorization: Bearer gpp_…`. Revoked, expired, or of an inactive person: 401 at once."""

    def authenticate(self, request: Request) -> tuple[Any, ApiToken] | None:
        header = request.headers.get("Authorization", "")
        if not header.startswith("Bearer "):
            return None
        moment = now()
        token = (
            ApiToken.objects.select_related("user")
            .filter(hash=token_hash(header[7:].strip()), revoked_at=None, user__is_active=True)
            .filter(Q(expires_at=None) | Q(expires_at__gt=moment))
            .first()
        )
        if token is None:
            raise exceptions.AuthenticationFailed(
                _("This token is not valid, or no longer."), code="token_invalid"
            )
        if token.last_used_at is None or moment - token.last_used_at > timedelta(minutes=1):
            ApiToken.objects.filter(pk=token.pk).update(last_used_at=moment)
        user = token.user
        target = getattr(request, "_request", request)  # also plain Django views ask here
        target.policy = SimpleLazyObject(lambda: policy_of(user))
        return user, token

    def authenticate_header(self, request: Request) -> str:
        return 'Bearer realm="gpupool"'


SAFE = {"GET", "HEAD", "OPTIONS"}


class TokenScope(permissions.BasePermission):
    """Reading needs `read`; writing needs the view's `token_scope` (default `admin`). Sessions have no scope."""

    def has_permission(self, request: Request, view: Any) -> bool:
        if not request.user or not request.user.is_authenticated:
            return False
        if not isinstance(request.auth, ApiToken):
            return not getattr(request.user, "must_change_password", False)
        scopes = set(request.auth.scopes)
        if request.method in SAFE:
            return bool(scopes)
        needed = getattr(view, "token_scope", "admin")
        if callable(needed):
            needed = needed(request)
        return needed in scopes
