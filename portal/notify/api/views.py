"""API of one's own notices."""

from __future__ import annotations

from typing import Any

from django.db.models import QuerySet
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import extend_schema, extend_schema_view
from rest_framework import mixins, serializers
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from portal.accounts.api.base import ApiViewSet
from portal.accounts.api.params import bool_param, query
from portal.notify.models import Notification
from portal.notify.selectors import own_notices
from portal.notify.services import mark_all_read, mark_read
from portal.notify.texts import absolute, words_of


class NotificationSerializer(serializers.ModelSerializer):
    """A notice, in the language that the request asks for."""

    title = serializers.SerializerMethodField()
    body = serializers.SerializerMethodField()
    url = serializers.SerializerMethodField()

    class Meta:
        model = Notification
        fields = (
            "uid",
            "kind",
            "threshold",
            "title",
            "body",
            "url",
            "urgent",
            "subject_type",
            "subject_uid",
            "created_at",
            "read_at",
        )
        read_only_fields = fields

    def get_title(self, row: Notification) -> str:
        """Its title."""
        return words_of(row).title

    def get_body(self, row: Notification) -> str:
        """What it says further."""
        return words_of(row).body

    def get_url(self, row: Notification) -> str:
        """Full address of what it is about, or ""."""
        return absolute(row.url)


class ReadSerializer(serializers.Serializer):
    """How many were new."""

    read = serializers.IntegerField()


@extend_schema_view(
    list=extend_schema(
        parameters=[
            query("unread", "true: those not read yet", OpenApiTypes.BOOL),
            query("urgent", "true: urgent ones", OpenApiTypes.BOOL),
            query("kind", "exact kind"),
        ]
    )
)
class NotificationViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, ApiViewSet):
    """One's own notices, newest first."""

    queryset = Notification.objects.none()
    serializer_class = NotificationSerializer
    token_scope = "request"

    def get_queryset(self) -> QuerySet[Notification]:
        """Own notices, filtered."""
        rows = own_notices(self.request.user.pk)
        if self.action != "list":
            return rows
        if (unread := bool_param(self.request, "unread")) is not None:
            rows = rows.filter(read_at__isnull=unread)
        if (urgent := bool_param(self.request, "urgent")) is not None:
            rows = rows.filter(urgent=urgent)
        if kind := self.request.query_params.get("kind", ""):
            rows = rows.filter(kind=kind)
        return rows

    @extend_schema(request=None, responses=NotificationSerializer)
    @action(detail=True, methods=["post"])
    def read(self, request: Request, uid: str) -> Response:
        """Mark as read."""
        return Response(self.get_serializer(mark_read(acting_user=self.actor, notice=self.get_object())).data)

    @extend_schema(request=None, responses=ReadSerializer)
    @action(detail=False, methods=["post"], url_path="read-all")
    def read_all(self, request: Request, **kwargs: Any) -> Response:
        """Mark all as read."""
        return Response({"read": mark_all_read(acting_user=self.actor)})
