"""API of the audit trail and of incidents. This room lies below people: authentication comes from the settings,
and the policy from the request (set by the middleware, or by the token's authentication)."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.db.models import QuerySet
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema, extend_schema_view
from rest_framework import mixins, serializers, viewsets
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from portal.kernel.api import Cursor, Pages, check_if_match, etag, time_param
from portal.kernel.api_documented import AsDocumented
from portal.ops.actor import Actor, actor_of
from portal.ops.api.idempotency import IdempotentWrites
from portal.ops.kinds import kind_of
from portal.ops.models import AuditEvent, Incident, IncidentEntry
from portal.ops.selectors import audit_filtered, audit_visible, incidents_visible
from portal.ops.services import incident_acknowledge, incident_close, incident_note

INCIDENT_STATES = ("open", "closed", "all")


class AuditSerializer(serializers.ModelSerializer):
    """One change. `before` and `after` hold what changed."""

    class Meta:
        model = AuditEvent
        fields = (
            "id",
            "at",
            "action",
            "actor_name",
            "via",
            "object_type",
            "object_uid",
            "object_label",
            "before",
            "after",
            "reason",
            "request_id",
        )
        read_only_fields = fields


class EntrySerializer(serializers.ModelSerializer):
    """One entry of an incident's story."""

    class Meta:
        model = IncidentEntry
        fields = ("at", "kind", "actor_name", "text", "facts")
        read_only_fields = fields


class IncidentSerializer(serializers.ModelSerializer):
    """An incident. `ref` is what people call it."""

    ref = serializers.SerializerMethodField()
    title = serializers.SerializerMethodField()

    class Meta:
        model = Incident
        fields = (
            "uid",
            "ref",
            "kind",
            "title",
            "severity",
            "state",
            "subject_type",
            "subject_uid",
            "subject_label",
            "facts",
            "opened_at",
            "last_seen_at",
            "occurrences",
            "closed_at",
            "closed_by_name",
            "note",
            "version",
        )
        read_only_fields = fields

    def get_ref(self, row: Incident) -> str:
        """I-<number>."""
        return f"I-{row.pk}"

    def get_title(self, row: Incident) -> str:
        """What the kind is called."""
        return str(kind_of(row.kind).title)


class NoteSerializer(serializers.Serializer):
    """A remark."""

    note = serializers.CharField(max_length=2000)


class OpsViewSet(IdempotentWrites, AsDocumented, viewsets.GenericViewSet):
    """Base of this room's view sets: strict input, the person's policy, who acts."""

    lookup_field = "uid"
    lookup_value_regex = "[0-9a-fA-F-]{32,36}"
    token_scope = "admin"

    @property
    def policy(self) -> Any:
        """The person's policy."""
        return self.request.policy  # type: ignore[attr-defined]

    @property
    def actor(self) -> Actor:
        """Who acts, for services."""
        return actor_of(self.request)  # type: ignore[arg-type]


def _text(name: str, text: str) -> OpenApiParameter:
    return OpenApiParameter(name, OpenApiTypes.STR, description=text)


@extend_schema_view(
    list=extend_schema(
        parameters=[
            _text("q", "request id, words of the object, a person's name, an act"),
            _text("action", "an act, or the beginning of one: user, user.suspended"),
            _text("object_type", "exact kind of object"),
            OpenApiParameter("object", OpenApiTypes.UUID, description="uid of an object"),
            OpenApiParameter(
                "via", OpenApiTypes.STR, enum=["page", "api", "token", "agent", "task", "command"]
            ),
            OpenApiParameter("since", OpenApiTypes.DATETIME, description="from this instant on"),
            OpenApiParameter("until", OpenApiTypes.DATETIME, description="before this instant"),
        ]
    )
)
class AuditViewSet(mixins.ListModelMixin, OpsViewSet):
    """The audit trail, newest first, by cursor. For auditors and pool administrators."""

    queryset = AuditEvent.objects.none()
    serializer_class = AuditSerializer
    pagination_class = Cursor

    def get_queryset(self) -> QuerySet[AuditEvent]:
        """Visible rows, filtered."""
        self.policy.require(bool(self.policy.scope("auditor", "pool_admin")))
        asked = self.request.query_params
        rows = audit_filtered(
            audit_visible(self.policy),
            search=asked.get("q", "").strip()[:100],
            action=asked.get("action", "").strip()[:64],
            object_type=asked.get("object_type", "").strip()[:48],
            via=asked.get("via", "").strip()[:16],
            since=time_param(self.request, "since"),
            until=time_param(self.request, "until"),
        )
        uid = asked.get("object", "")  # judged by its description before
        return rows.filter(object_uid=UUID(uid)) if uid else rows


@extend_schema_view(
    list=extend_schema(
        parameters=[
            OpenApiParameter(
                "state", OpenApiTypes.STR, enum=list(INCIDENT_STATES), description="open by default"
            ),
            _text("kind", "exact kind"),
            OpenApiParameter("severity", OpenApiTypes.STR, enum=Incident.Severity.values),
        ]
    )
)
class IncidentViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, OpsViewSet):
    """Incidents. Pool administrators and auditors of the installation see them; the former act."""

    queryset = Incident.objects.none()
    serializer_class = IncidentSerializer
    pagination_class = Pages

    def get_queryset(self) -> QuerySet[Incident]:
        """Visible incidents, filtered."""
        if self.action != "list":
            return incidents_visible(self.policy, "all")
        asked = self.request.query_params
        state = asked.get("state", "") or "open"
        rows = incidents_visible(self.policy, state)
        if kind := asked.get("kind", ""):
            rows = rows.filter(kind=kind)
        if severity := asked.get("severity", ""):
            rows = rows.filter(severity=severity)
        return rows

    def retrieve(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        """One incident, with its ETag."""
        return self._one(self.get_object())

    def _one(self, row: Incident) -> Response:
        return Response(self.get_serializer(row).data, headers=etag(row.version))

    @extend_schema(responses=EntrySerializer(many=True), filters=False)
    @action(detail=True, methods=["get"], pagination_class=None)
    def entries(self, request: Request, uid: str) -> Response:
        """Its story, newest first."""
        rows = self.get_object().entries.order_by("-id")[:500]
        return Response(EntrySerializer(rows, many=True).data)

    def _acting(self, request: Request) -> Incident:
        row: Incident = self.get_object()
        self.policy.require(self.policy.administers_pool)
        check_if_match(request, row.version)
        return row

    @extend_schema(request=None, responses=IncidentSerializer)
    @action(detail=True, methods=["post"])
    def acknowledge(self, request: Request, uid: str) -> Response:
        """Take it."""
        return self._one(incident_acknowledge(acting_user=self.actor, incident=self._acting(request)))

    @extend_schema(request=NoteSerializer, responses=IncidentSerializer)
    @action(detail=True, methods=["post"])
    def note(self, request: Request, uid: str) -> Response:
        """Add a remark."""
        row = self._acting(request)
        data = NoteSerializer(data=request.data)
        data.is_valid(raise_exception=True)
        incident_note(incident=row, kind="note", actor=self.actor, text=data.validated_data["note"])
        return self._one(row)

    @extend_schema(request=NoteSerializer, responses=IncidentSerializer)
    @action(detail=True, methods=["post"])
    def close(self, request: Request, uid: str) -> Response:
        """Close it with a note."""
        row = self._acting(request)
        data = NoteSerializer(data=request.data)
        data.is_valid(raise_exception=True)
        return self._one(
            incident_close(acting_user=self.actor, incident=row, note=data.validated_data["note"])
        )
