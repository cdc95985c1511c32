"""API of alert rules and of what they found. Pool administrators write; those who audit the pool read."""

from __future__ import annotations

from typing import Any

from django.db.models import QuerySet
from drf_spectacular.utils import extend_schema, extend_schema_view
from rest_framework import mixins, serializers, status
from rest_framework.request import Request
from rest_framework.response import Response

from monitoring.models import AlertFiring, AlertRule
from monitoring.services.alerts import FIELDS, alert_rule_save
from portal.accounts.api.base import ApiViewSet
from portal.accounts.api.params import choice_param, query, uuid_param
from portal.kernel.api import check_if_match, etag


class AlertRuleSerializer(serializers.ModelSerializer[AlertRule]):
    """A rule."""

    class Meta:
        model = AlertRule
        fields = ["uid", *FIELDS, "changed_by_name", "evaluated_at", "updated_at", "version"]


class AlertRuleInput(serializers.Serializer[Any]):
    """A rule as it shall be. `threshold` is in the unit that the metric names; `for_s` in seconds."""

    name = serializers.CharField(max_length=120)
    metric = serializers.ChoiceField(choices=AlertRule.Metric.choices)
    direction = serializers.ChoiceField(choices=AlertRule.Above.choices, required=False)
    threshold = serializers.IntegerField(min_value=-10_000_000, max_value=10_000_000)
    for_s = serializers.IntegerField(min_value=0, max_value=7 * 86_400, required=False)
    severity = serializers.ChoiceField(choices=AlertRule.Severity.choices, required=False)
    site_code = serializers.CharField(max_length=48, required=False, allow_blank=True)
    tell_holder = serializers.BooleanField(required=False)
    active = serializers.BooleanField(required=False)


class AlertSerializer(serializers.ModelSerializer[AlertFiring]):
    """One subject of a rule: pending until `opened_at`, over from `closed_at` on."""

    rule: Any = serializers.SlugRelatedField(slug_field="uid", read_only=True)
    name = serializers.CharField(source="rule.name", read_only=True)

    class Meta:
        model = AlertFiring
        fields = ["id", "rule", "name", "label", "value", "worst", "pending_since", "opened_at", "closed_at"]


class _Readers(ApiViewSet):
    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super().initial(request, *args, **kwargs)
        self.policy.require(self.policy.administers_pool or self.policy.audits)


class AlertRuleViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, _Readers):
    """Alert rules."""

    serializer_class = AlertRuleSerializer
    queryset = AlertRule.objects.order_by("name", "id")

    def retrieve(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        """One rule; its version is the ETag."""
        rule = self.get_object()
        return Response(AlertRuleSerializer(rule).data, headers=etag(rule.version))

    @extend_schema(request=AlertRuleInput, responses={201: AlertRuleSerializer})
    def create(self, request: Request) -> Response:
        """Make one."""
        body = AlertRuleInput(data=request.data)
        body.is_valid(raise_exception=True)
        rule = alert_rule_save(acting_user=self.actor, policy=self.policy, values=body.validated_data)
        return Response(
            AlertRuleSerializer(rule).data, status=status.HTTP_201_CREATED, headers=etag(rule.version)
        )

    @extend_schema(request=AlertRuleInput(partial=True), responses=AlertRuleSerializer)
    def partial_update(self, request: Request, uid: str) -> Response:
        """Change fields of one; what fires under it ends when the condition is another one."""
        rule = self.get_object()
        check_if_match(request, rule.version)
        body = AlertRuleInput(data=request.data, partial=True)
        body.is_valid(raise_exception=True)
        done = alert_rule_save(
            acting_user=self.actor, policy=self.policy, values=body.validated_data, rule=rule
        )
        return Response(AlertRuleSerializer(done).data, headers=etag(done.version))


@extend_schema_view(
    list=extend_schema(
        parameters=[
            query("state", "state", enum=("pending", "open", "closed")),
            query("rule", "uid of a rule"),
        ]
    )
)
class AlertViewSet(mixins.ListModelMixin, _Readers):
    """What rules found, newest first."""

    serializer_class = AlertSerializer
    queryset = AlertFiring.objects.none()

    def get_queryset(self) -> QuerySet[AlertFiring]:
        """By state and rule."""
        rows = AlertFiring.objects.select_related("rule").order_by("-id")
        state = choice_param(self.request, "state", ("pending", "open", "closed"))
        if state == "closed":
            rows = rows.filter(closed_at__isnull=False)
        elif state:
            rows = rows.filter(closed_at=None, opened_at__isnull=state == "pending")
        rule = uuid_param(self.request, "rule")
        return rows.filter(rule__uid=rule) if rule else rows
