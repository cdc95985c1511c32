"""What every API view of the installation stands on: token or session, policy, idempotent writes."""

from __future__ import annotations

from typing import Any

from django.utils.functional import SimpleLazyObject
from rest_framework import viewsets
from rest_framework.authentication import SessionAuthentication
from rest_framework.request import Request

from portal.accounts.api.auth import TokenAuthentication, TokenScope, token_hash
from portal.accounts.policy import Policy, policy_of
from portal.kernel.api import Pages, refuse_unknown_filters
from portal.ops.actor import Actor, actor_of
from portal.ops.api.idempotency import IdempotentWrites


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


__all__ = ["ApiViewSet", "TokenAuthentication", "TokenScope", "token_hash"]
