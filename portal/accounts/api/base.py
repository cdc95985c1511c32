"""What every API view of the installation stands on: token or session, policy, idempotent writes."""

from __future__ import annotations

from django.utils.functional import SimpleLazyObject
from rest_framework import viewsets
from rest_framework.authentication import SessionAuthentication

from portal.accounts.api.auth import TokenAuthentication, TokenScope, token_hash
from portal.accounts.policy import Policy, policy_of
from portal.kernel.api import Pages
from portal.kernel.api_documented import AsDocumented
from portal.ops.actor import Actor, actor_of
from portal.ops.api.idempotency import IdempotentWrites


class ApiViewSet(IdempotentWrites, AsDocumented, viewsets.GenericViewSet):
    """Base of our view sets. What `@extend_schema` describes is what a call may hold, see `AsDocumented`."""

    authentication_classes = [TokenAuthentication, SessionAuthentication]
    permission_classes = [TokenScope]
    pagination_class = Pages
    lookup_field = "uid"
    lookup_value_regex = "[0-9a-fA-F-]{32,36}"
    token_scope: str = "admin"

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


__all__ = ["ApiViewSet", "TokenAuthentication", "TokenScope", "token_hash"]
