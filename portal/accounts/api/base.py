"""What every API view of the installation stands on: token or session, policy, idempotent writes."""

from __future__ import annotations

import hashlib
from datetime import timedelta
from typing import Any

from django.db.models import Q
from django.utils.functional import SimpleLazyObject
from django.utils.translation import gettext_lazy as _
from rest_framework import exceptions, permissions, viewsets
from rest_framework.authentication import BaseAuthentication, SessionAuthentication
from rest_framework.request import Request

from portal.accounts.models import ApiToken
from portal.accounts.policy import Policy, policy_of
from portal.kernel.api import Pages, refuse_unknown_filters
from portal.kernel.clock import now
from portal.ops.actor import Actor, actor_of
from portal.ops.api.idempotency import IdempotentWrites


def token_hash(value: str) -> str:
    """What is stored of a token value (SHA-256; the value has 256 random bits, so no salt is needed)."""
    return hashlib.sha256(value.encode()).hexdigest()


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
            raise exceptions.AuthenticationFailed(_("This token is not valid, or no longer."), code="token_invalid")
        if token.last_used_at is None or moment - token.last_used_at > timedelta(minutes=1):
            ApiToken.objects.filter(pk=token.pk).update(last_used_at=moment)
        return token.user, token

    def authenticate_header(self, request: Request) -> str:
        return 'Bearer realm="gpupool"'


SAFE = {"GET", "HEAD", "OPTIONS"}


class TokenScope(permissions.BasePermission):
    """Reading needs `read`; writing needs the view's `token_scope` (default `admin`). Sessions have no scope."""

    def has_permission(self, request: Request, view: Any) -> bool:
        if not request.user or not request.user.is_authenticated:
            return False
        if not isinstance(request.auth, ApiToken):
            return True
        scopes = set(request.auth.scopes)
        if request.method in SAFE:
            return bool(scopes)
        needed = getattr(view, "token_scope", "admin")
        if callable(needed):
            needed = needed(request)
        return needed in scopes


class ApiViewSet(IdempotentWrites, viewsets.GenericViewSet):
    """Base of our view sets. Set `filter_params` to the names of query parameters the list knows."""

    authentication_classes = [TokenAuthentication, SessionAuthentication]
    permission_classes = [TokenScope]
    pagination_class = Pages
    lookup_field = "uid"
    lookup_value_regex = "[0-9a-fA-F-]{32,36}"
    filter_params: set[str] = set()
    token_scope: str = "admin"

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super().initial(request, *args, **kwargs)
        if self.action == "list":
            refuse_unknown_filters(request, self.filter_params)

    @property
    def policy(self) -> Policy:
        """The person's policy (also for tokens, whose user the middleware could not know)."""
        if not hasattr(self, "_policy"):
            self._policy = SimpleLazyObject(lambda: policy_of(self.request.user))
        return self._policy  # type: ignore[return-value]

    @property
    def actor(self) -> Actor:
        """Who acts, for services."""
        return actor_of(self.request)
