"""API of webhooks and of what reaches one by mail."""

from __future__ import annotations

from typing import Any

from django.db.models import QuerySet
from drf_spectacular.utils import extend_schema
from rest_framework import mixins, serializers
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from portal.accounts.api.base import ApiViewSet
from portal.accounts.api.serializers import OptionalDepartment
from portal.kernel.api import check_if_match, etag
from portal.notify import kinds
from portal.notify.models import Channel, Preference, WebhookEndpoint
from portal.notify.services import preferences_save, webhook_create, webhook_test, webhook_update


class WebhookSerializer(serializers.ModelSerializer):
    """Where notices are posted. Empty `kinds`: all of them."""

    department = OptionalDepartment(read_only=True, allow_null=True)
    kinds = serializers.ListField(child=serializers.CharField(), read_only=True)

    class Meta:
        model = WebhookEndpoint
        fields = ("uid", "name", "url", "kinds", "department", "active", "last_status", "version")
        read_only_fields = fields


class WebhookMade(WebhookSerializer):
    """A webhook just made; `secret` is shown once."""

    secret = serializers.CharField(read_only=True, allow_null=True)

    class Meta(WebhookSerializer.Meta):
        fields = (*WebhookSerializer.Meta.fields, "secret")
        read_only_fields = fields


class WebhookNew(serializers.Serializer):
    """A webhook to make."""

    name = serializers.CharField(max_length=80)
    url = serializers.CharField(max_length=500)
    kinds = serializers.ListField(child=serializers.CharField(), required=False, default=list)
    department = OptionalDepartment(required=False, allow_null=True, default=None)


class WebhookChange(WebhookNew):
    """What may be changed of a webhook; what is left out stays."""

    name = serializers.CharField(max_length=80, required=False)
    url = serializers.CharField(max_length=500, required=False)
    kinds = serializers.ListField(child=serializers.CharField(), required=False)
    department = OptionalDepartment(required=False, allow_null=True)
    active = serializers.BooleanField(required=False)


class WebhookAnswer(serializers.Serializer):
    """What came back from a test."""

    ok = serializers.BooleanField()
    text = serializers.CharField()


class WebhookViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, ApiViewSet):
    """Webhooks, for pool administrators of the installation."""

    queryset = WebhookEndpoint.objects.none()
    serializer_class = WebhookSerializer
    secret_fields = frozenset({"secret"})

    def get_queryset(self) -> QuerySet[WebhookEndpoint]:
        """All, for those who may see any."""
        self.policy.require(self.policy.administers_pool)
        return WebhookEndpoint.objects.select_related("department").order_by("-active", "name", "id")

    @extend_schema(request=WebhookNew, responses={201: WebhookMade})
    def create(self, request: Request) -> Response:
        """Add one; its secret is in this answer only."""
        data = WebhookNew(data=request.data, context=self.get_serializer_context())
        data.is_valid(raise_exception=True)
        made = webhook_create(acting_user=self.actor, **data.validated_data)
        body = WebhookMade(made, context=self.get_serializer_context()).data
        return Response(body, status=201, headers={**etag(made.version), "Cache-Control": "no-store"})

    @extend_schema(request=WebhookChange, responses=WebhookSerializer)
    def partial_update(self, request: Request, uid: str) -> Response:
        """Change one, or switch it off and on; the secret stays."""
        row = self.get_object()
        check_if_match(request, row.version)
        data = WebhookChange(data=request.data, context=self.get_serializer_context(), partial=True)
        data.is_valid(raise_exception=True)
        present: dict[str, Any] = {
            "name": row.name,
            "url": row.url,
            "kinds": list(row.kinds),
            "department": row.department,
            "active": row.active,
        }
        fresh = webhook_update(acting_user=self.actor, endpoint=row, **(present | data.validated_data))
        return Response(self.get_serializer(fresh).data, headers=etag(fresh.version))

    @extend_schema(request=None, responses=WebhookAnswer)
    @action(detail=True, methods=["post"])
    def test(self, request: Request, uid: str) -> Response:
        """Post a signed test message now."""
        answer = webhook_test(acting_user=self.actor, endpoint=self.get_object())
        return Response({"ok": answer.ok, "text": answer.text})


class KindPreference(serializers.Serializer):
    """One kind of notice. Urgent ones always come."""

    kind = serializers.CharField()
    label = serializers.CharField()
    group = serializers.CharField()
    urgent = serializers.BooleanField()
    mail = serializers.BooleanField()


class MailOff(serializers.Serializer):
    """Kinds that shall not come by mail; all others do."""

    mail_off = serializers.ListField(child=serializers.CharField())


class PreferencesViewSet(ApiViewSet):
    """Which kinds of notices reach one by mail."""

    queryset = Preference.objects.none()
    serializer_class = KindPreference
    pagination_class = None
    token_scope = "request"

    @extend_schema(responses=KindPreference(many=True), operation_id="notification_preferences_list")
    def list(self, request: Request) -> Response:
        """Every kind with the present choice."""
        return self._all()

    @extend_schema(request=MailOff, responses=KindPreference(many=True))
    def update(self, request: Request) -> Response:
        """Set the kinds that shall not come by mail."""
        data = MailOff(data=request.data)
        data.is_valid(raise_exception=True)
        preferences_save(acting_user=self.actor, mail_off=set(data.validated_data["mail_off"]))
        return self._all()

    def _all(self) -> Response:
        off = set(
            Preference.objects.filter(
                user_id=self.request.user.pk, channel=Channel.MAIL, enabled=False
            ).values_list("kind", flat=True)
        )
        rows = [
            {
                "kind": k.name,
                "label": str(k.label or k.title),
                "group": k.group,
                "urgent": k.urgent,
                "mail": k.urgent or k.name not in off,
            }
            for k in kinds.known()
        ]
        return Response(KindPreference(rows, many=True).data)
