"""API of approvals, delegations and the approval policy."""

from __future__ import annotations

import uuid
from typing import Any

from django.db.models import Q, QuerySet
from django.utils.translation import gettext_lazy as _
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import mixins
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from portal.accounts.api.base import ApiViewSet
from portal.accounts.api.params import choice_param
from portal.accounts.models import User
from portal.kernel.api import check_if_match, etag
from portal.kernel.errors import Invalid
from quotas.api import serializers as s
from quotas.api.request_views import body
from quotas.models import ApprovalPolicy, ApprovalStep, Delegation, UserLimit
from quotas.selectors.approvals import light_rows, open_steps, visible_steps
from quotas.selectors.user_limits import own_limits
from quotas.services.approval_policy import policy_default_ensure, policy_publish
from quotas.services.approvals import step_decide, steps_approve
from quotas.services.delegations import delegation_create, delegation_revoke
from quotas.services.user_limits import user_limit_set


class ApprovalViewSet(mixins.RetrieveModelMixin, ApiViewSet):
    """Approval steps. Reading never decides."""

    queryset = ApprovalStep.objects.none()
    serializer_class = s.StepSerializer
    token_scope = "approve"

    def get_queryset(self) -> QuerySet[ApprovalStep]:
        """Steps that the person sees."""
        return visible_steps(self.policy)

    @extend_schema(
        parameters=[
            OpenApiParameter(
                "queue", str, enum=["mine", "team", "all"], description="open steps; default mine"
            ),
            OpenApiParameter("state", str, enum=ApprovalStep.State.values, description="with queue=all"),
        ]
    )
    def list(self, request: Request) -> Response:
        """Open steps: those that wait for me (default), those I may decide, or all that I see."""
        queue = choice_param(request, "queue", ("mine", "team", "all"), "mine")
        state = choice_param(request, "state", ApprovalStep.State.values)
        if queue == "all":
            rows: Any = self.get_queryset().filter(state=state) if state else open_steps(self.policy)
        else:
            light = light_rows(self.policy)
            rows = self.get_queryset().filter(
                pk__in=[r.pk for r in light if (r.mine if queue == "mine" else r.may.ok)]
            )
        page = self.paginate_queryset(rows)
        return self.get_paginated_response(s.StepSerializer(page, many=True).data)

    def retrieve(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        """One step, with its ETag."""
        row = self.get_object()
        return Response(s.StepSerializer(row).data, headers=etag(row.version))

    @extend_schema(request=s.DecisionInput, responses=s.StepSerializer)
    @action(detail=True, methods=["post"])
    def decide(self, request: Request, uid: str) -> Response:
        """Approve, approve with a change, return or reject. 403 self_approval, 409 already_decided."""
        row = self.get_object()
        check_if_match(request, row.version)
        sent = body(request)
        changed = sent.get("changed")
        if changed is not None and not isinstance(changed, dict):
            raise Invalid.field("changed", _("An object with the changed amounts is needed here."))
        done = step_decide(
            acting_user=self.actor,
            policy=self.policy,
            step=row,
            decision=str(sent.get("decision", "")),
            comment=str(sent.get("comment", "") or ""),
            changed=changed,
            override=sent.get("override") is True,
        )
        return Response(
            s.StepSerializer(self.get_queryset().get(pk=done.pk)).data, headers=etag(done.version)
        )

    @extend_schema(request=s.BulkInput, responses={200: dict})
    @action(detail=False, methods=["post"])
    def bulk(self, request: Request) -> Response:
        """Approve several requests of one small shape; a result per row."""
        sent = body(request)
        uids: list[uuid.UUID] = []
        rows = sent.get("steps")
        if not isinstance(rows, list):
            raise Invalid.field("steps", _("A list of step uids is needed here."))
        for text in rows:
            try:
                uids.append(uuid.UUID(str(text)))
            except ValueError:
                raise Invalid.field("steps", _("A list of step uids is needed here.")) from None
        results = steps_approve(
            acting_user=self.actor,
            policy=self.policy,
            step_uids=uids,
            comment=str(sent.get("comment", "") or ""),
        )
        return Response(
            {
                "done": sum(r.ok for r in results),
                "refused": sum(not r.ok for r in results),
                "results": [
                    {"uid": str(r.uid), "subject": r.label, "ok": r.ok, "code": r.code, "detail": r.detail}
                    for r in results
                ],
            }
        )


class DelegationViewSet(ApiViewSet):
    """Delegations, given and received."""

    queryset = Delegation.objects.none()
    serializer_class = s.DelegationSerializer
    token_scope = "approve"

    def get_queryset(self) -> QuerySet[Delegation]:
        """Own ones."""
        user = self.request.user
        rows = Delegation.objects.filter(Q(principal=user) | Q(deputy=user))
        return rows.select_related("principal", "deputy").order_by("-id")

    def list(self, request: Request) -> Response:
        """Newest first."""
        page = self.paginate_queryset(self.get_queryset())
        return self.get_paginated_response(s.DelegationSerializer(page, many=True).data)

    @extend_schema(request=s.DelegationInput, responses={201: s.DelegationSerializer})
    def create(self, request: Request) -> Response:
        """Let somebody decide in one's place for a time."""
        self.policy.require(self.policy.has("lead", "pool_admin", "finance"))
        sent = s.DelegationInput(data=request.data)
        sent.is_valid(raise_exception=True)
        data = sent.validated_data
        deputy = User.objects.filter(username=data["deputy"], is_active=True).first()
        if deputy is None:
            raise Invalid.field("deputy", _("There is no active person with this user name."))
        made = delegation_create(
            acting_user=self.actor,
            policy=self.policy,
            deputy=deputy,
            starts_at=data.get("starts_at"),
            ends_at=data["ends_at"],
        )
        return Response(s.DelegationSerializer(made).data, status=201)

    @extend_schema(request=None, responses=s.DelegationSerializer)
    @action(detail=True, methods=["post"])
    def revoke(self, request: Request, uid: str) -> Response:
        """End it at once."""
        done = delegation_revoke(acting_user=self.actor, policy=self.policy, delegation=self.get_object())
        return Response(s.DelegationSerializer(done).data)


class PolicyViewSet(ApiViewSet):
    """The approval policy in force."""

    queryset = ApprovalPolicy.objects.none()
    serializer_class = s.PolicySerializer
    pagination_class = None
    token_scope = "admin"

    def list(self, request: Request) -> Response:
        """The version in force."""
        self.policy.require(self.policy.has("pool_admin", "auditor", "lead", "finance"))
        row = policy_default_ensure()
        return Response(s.PolicySerializer(row).data, headers=etag(row.pk))

    @extend_schema(request=s.PolicySerializer, responses={201: s.PolicySerializer})
    def create(self, request: Request) -> Response:
        """Publish a new version. If-Match names the version that it was made from."""
        current = policy_default_ensure()
        check_if_match(request, current.pk)
        sent = body(request)
        made = policy_publish(
            acting_user=self.actor,
            policy=self.policy,
            rules=sent.get("rules"),
            name=str(sent.get("name", "") or ""),
            base_version=current.pk if request.headers.get("If-Match") else None,
        )
        return Response(s.PolicySerializer(made).data, status=201, headers=etag(made.pk))


class UserLimitViewSet(ApiViewSet):
    """Limits of single people; the row without a person holds for everybody who has none of their own."""

    queryset = UserLimit.objects.none()
    serializer_class = s.UserLimitSerializer
    token_scope = "admin"

    def list(self, request: Request) -> Response:
        """All limits; for pool administrators and auditors."""
        self.policy.require(self.policy.administers_pool or self.policy.audits)
        rows = UserLimit.objects.select_related("user").order_by("user__username", "id")
        return self.get_paginated_response(
            s.UserLimitSerializer(self.paginate_queryset(rows), many=True).data
        )

    @extend_schema(request=s.UserLimitSerializer, responses=s.UserLimitSerializer)
    def create(self, request: Request) -> Response:
        """Set the limits of a person (``user``: a user name), or of everybody else (null). Null is
        unlimited; what is left out stays.
        """
        self.policy.require(self.policy.administers_pool)
        sent = s.UserLimitSerializer(data=request.data)
        sent.is_valid(raise_exception=True)
        data = dict(sent.validated_data)
        name = (data.pop("user", None) or {}).get("username")
        user = User.objects.filter(username=name).first() if name else None
        if name and user is None:
            raise Invalid.field("user", _("There is no active person with this user name."))
        row = user_limit_set(acting_user=self.actor, policy=self.policy, user=user, **own_limits(user) | data)
        return Response(s.UserLimitSerializer(row).data, headers=etag(row.version))
