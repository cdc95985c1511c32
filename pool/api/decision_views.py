"""API of the scheduler's decisions and policy: the same services as the pages. For administrators and auditors."""

from __future__ import annotations

from typing import Any

from django.db.models import QuerySet
from django.utils.translation import gettext_lazy as _
from drf_spectacular.utils import OpenApiParameter, extend_schema, extend_schema_view
from rest_framework import mixins
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from pool.api import decision_serializers as s
from pool.api.views import _text
from pool.models import SchedulerCycle, SchedulingPolicy
from pool.selectors.decisions import cycles_listed
from pool.services.decisions import decision_replay
from pool.services.nodes import require_pool_admin
from pool.services.policies import (
    policy_change,
    policy_discard,
    policy_draft,
    policy_publish,
    policy_roll_back,
)
from pool.tasks import preview_policy
from portal.accounts.api.base import ApiViewSet
from portal.kernel.api import check_if_match, etag
from portal.kernel.errors import Invalid


@extend_schema_view(
    list=extend_schema(
        parameters=[
            OpenApiParameter("kind", str, enum=["placed", "evicted", "refused"]),
            _text("request", "number of a request, as R-17"),
        ]
    )
)
class DecisionViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, ApiViewSet):
    """Cycles that started or took back something, newest first."""

    serializer_class = s.DecisionSerializer
    queryset = SchedulerCycle.objects.none()

    def get_queryset(self) -> QuerySet[SchedulerCycle]:
        self.policy.require(self.policy.administers_pool or self.policy.audits)
        if self.action == "list":
            wanted = self.request.query_params
            return cycles_listed(kind=wanted.get("kind", ""), request=wanted.get("request", ""))
        return SchedulerCycle.objects.select_related("policy", "snapshot")

    @extend_schema(responses=s.DecisionDetailSerializer)
    def retrieve(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        """One decision with its operations."""
        return Response(s.DecisionDetailSerializer(self.get_object()).data)

    @extend_schema(request=None, responses=s.ReplaySerializer)
    @action(detail=True, methods=["post"])
    def replay(self, request: Request, uid: str) -> Response:
        """Decide it again from what was kept of it, and compare."""
        return Response(s.ReplaySerializer(decision_replay(cycle=self.get_object())).data)


class PolicyViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, ApiViewSet):
    """Versions of the scheduler's policy."""

    serializer_class = s.PolicySerializer
    queryset = SchedulingPolicy.objects.none()

    def get_queryset(self) -> QuerySet[SchedulingPolicy]:
        self.policy.require(self.policy.administers_pool or self.policy.audits)
        return SchedulingPolicy.objects.select_related("based_on").order_by("-active", "-id")

    def retrieve(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        found = self.get_object()
        return Response(self.get_serializer(found).data, headers=etag(found.version))

    @extend_schema(request=s.PolicyInput, responses={201: s.PolicySerializer})
    def create(self, request: Request) -> Response:
        """Begin a draft."""
        require_pool_admin(self.actor, self.policy)
        body = s.PolicyInput(data=request.data)
        body.is_valid(raise_exception=True)
        values = dict(body.validated_data)
        base = values.pop("based_on")
        found = SchedulingPolicy.objects.filter(uid=base).first() if base else None
        if base and found is None:
            raise Invalid.field("based_on", _("There is no such version."))
        made = policy_draft(acting_user=self.actor, based_on=found, **values)
        return Response(self.get_serializer(made).data, status=201, headers=etag(made.version))

    @extend_schema(request=s.PolicyChange, responses=s.PolicySerializer)
    def partial_update(self, request: Request, uid: str) -> Response:
        """Other switches for a draft: `values` replace those it has."""
        require_pool_admin(self.actor, self.policy)
        body = s.PolicyChange(data=request.data)
        body.is_valid(raise_exception=True)
        found = self.get_object()
        check_if_match(request, found.version)
        changed = policy_change(
            acting_user=self.actor,
            policy=found,
            values=dict(body.validated_data["values"]),
            note=body.validated_data.get("note"),
            version=found.version,
        )
        return Response(self.get_serializer(changed).data, headers=etag(changed.version))

    @extend_schema(responses={204: None})
    def destroy(self, request: Request, uid: str) -> Response:
        """Throw a draft away."""
        require_pool_admin(self.actor, self.policy)
        policy_discard(acting_user=self.actor, policy=self.get_object())
        return Response(status=204)

    @extend_schema(request=None, responses={202: s.PolicySerializer})
    @action(detail=True, methods=["post"])
    def preview(self, request: Request, uid: str) -> Response:
        """Have the last stored decisions decided again under it; the answer appears in `preview`."""
        require_pool_admin(self.actor, self.policy)
        found = self.get_object()
        preview_policy.apply_async((found.pk,), retry=False)
        return Response(self.get_serializer(found).data, status=202)

    @extend_schema(request=s.PolicyReason, responses=s.PolicySerializer)
    @action(detail=True, methods=["post"])
    def publish(self, request: Request, uid: str) -> Response:
        """Put it in force from the next cycle on."""
        return self._decided(request, lambda reason: policy_publish(
            acting_user=self.actor, policy=self.get_object(), reason=reason
        ))  # fmt: skip

    @extend_schema(request=s.PolicyReason, responses=s.PolicySerializer)
    @action(detail=False, methods=["post"], url_path="roll-back")
    def roll_back(self, request: Request) -> Response:
        """Put the version before the present one in force again."""
        return self._decided(request, lambda reason: policy_roll_back(acting_user=self.actor, reason=reason))

    def _decided(self, request: Request, act: Any) -> Response:
        require_pool_admin(self.actor, self.policy)
        body = s.PolicyReason(data=request.data)
        body.is_valid(raise_exception=True)
        row = act(body.validated_data["reason"])
        return Response(self.get_serializer(row).data, headers=etag(row.version))
