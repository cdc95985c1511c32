"""API of what departments let their people choose."""

from __future__ import annotations

from typing import Any

from django.utils.translation import gettext_lazy as _
from drf_spectacular.utils import extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from portal.accounts.api.base import ApiViewSet
from portal.accounts.models import Department
from portal.kernel.errors import Invalid
from quotas.api import serializers as s
from quotas.models import AskRule
from quotas.services.ask_rules import ask_rule_set


class AskRuleViewSet(ApiViewSet):
    """The highest priority that people of a department may ask."""

    queryset = AskRule.objects.none()
    serializer_class = s.AskRuleSerializer
    token_scope = "admin"

    def list(self, request: Request) -> Response:
        """All rules; a department without one follows the nearest above, else 100."""
        rows = AskRule.objects.select_related("department").order_by("department__name", "id")
        return self.get_paginated_response(s.AskRuleSerializer(self.paginate_queryset(rows), many=True).data)

    @extend_schema(request=s.AskRuleSerializer, responses=s.AskRuleSerializer)
    def create(self, request: Request) -> Response:
        """Set a department's rule; null takes it away."""
        sent = s.AskRuleSerializer(data=request.data)
        sent.is_valid(raise_exception=True)
        code = sent.validated_data["department"]["code"]
        department = Department.objects.without_tree_fields().filter(code=code).first()
        if department is None:
            raise Invalid.field("department", _("There is no department with this code."))
        most: Any = sent.validated_data["priority_most"]
        ask_rule_set(acting_user=self.actor, policy=self.policy, department=department, priority_most=most)
        return Response({"department": code, "priority_most": most})
