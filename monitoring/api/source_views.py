"""API of telemetry sources: exporters and Prometheus servers that are fetched. For pool administrators."""

from __future__ import annotations

from typing import Any

from django.db.models import QuerySet
from django.utils.translation import gettext_lazy as _
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema, extend_schema_view
from rest_framework import mixins, serializers
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from monitoring.models import MetricSource
from monitoring.services.source_check import ORDER, source_check
from monitoring.services.sources import source_hasten, source_save
from pool.models import Cluster
from portal.accounts.api.base import ApiViewSet
from portal.kernel.api import check_if_match, etag
from portal.kernel.errors import Invalid

MOST_MATCHES = 500


class SourceSerializer(serializers.ModelSerializer[MetricSource]):
    """A source and how its last fetch went. Its secret is never told."""

    cluster = serializers.CharField(source="cluster.code")

    class Meta:
        model = MetricSource
        fields = [
            "uid", "name", "cluster", "kind", "url", "query", "auth", "username", "every_s", "active",
            "last_at", "last_ok_at", "last_code", "last_facts", "version",
        ]  # fmt: skip


class SourceInput(serializers.Serializer[Any]):
    """A source to add or change. What is not sent stays; its cluster stays. A secret is written only."""

    name = serializers.CharField(required=False, max_length=80)
    cluster = serializers.CharField(required=False, help_text="code")
    kind = serializers.ChoiceField(MetricSource.Kind.choices, required=False)
    url = serializers.CharField(
        required=False,
        max_length=500,
        help_text="{node} or {address}: one fetch for each node of the cluster",
    )
    query = serializers.CharField(required=False, allow_blank=True, max_length=500)
    auth = serializers.ChoiceField(MetricSource.Auth.choices, required=False)
    username = serializers.CharField(required=False, allow_blank=True, max_length=120)
    secret = serializers.CharField(required=False, write_only=True, max_length=4096)
    every_s = serializers.IntegerField(required=False, min_value=5, max_value=3600)
    active = serializers.BooleanField(required=False)


class SourceLook(serializers.Serializer[Any]):
    """Nothing is sent with a fetch."""


class SourceMatch(serializers.Serializer[Any]):
    """A card that a source tells of, and what would become of it."""

    uuid = serializers.CharField()
    state = serializers.ChoiceField(
        ORDER,
        help_text="taken: known by UUID; placed: by node and index; covered: left to a better source; unknown: not in "
        "the inventory; foreign: of another node or cluster; double: claimed by others too",
    )
    gpu = serializers.UUIDField(source="gpu.uid", allow_null=True, default=None)
    told_by = serializers.ListField(child=serializers.CharField())
    others = serializers.ListField(child=serializers.CharField())
    model = serializers.CharField()
    instances = serializers.IntegerField()
    measures = serializers.ListField(child=serializers.CharField())


class SourceCheck(serializers.Serializer[Any]):
    """What a dry run saw; nothing of it is kept. `matches` has the first 500, those that need a look first."""

    code = serializers.CharField(help_text="ok, or why not, as last_code")
    targets = serializers.IntegerField(help_text="addresses asked")
    codes = serializers.DictField(
        child=serializers.IntegerField(), help_text="how many addresses answered how"
    )
    problems = serializers.DictField(child=serializers.IntegerField())
    states = serializers.DictField(child=serializers.IntegerField(), help_text="cards by state")
    matches = serializers.ListField(child=SourceMatch())


@extend_schema_view(
    list=extend_schema(parameters=[OpenApiParameter("cluster", OpenApiTypes.STR, description="cluster code")])
)
class SourceViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, ApiViewSet):
    """Where telemetry is fetched from."""

    serializer_class = SourceSerializer
    token_scope = "admin"
    queryset = MetricSource.objects.none()

    def get_queryset(self) -> QuerySet[MetricSource]:
        """All of them, for those who administer the pool."""
        self.policy.require(self.policy.administers_pool)
        rows = MetricSource.objects.select_related("cluster")
        if self.action == "list" and (code := self.request.query_params.get("cluster")):
            rows = rows.filter(cluster__code=code)
        return rows

    def _answer(self, row: MetricSource, status: int = 200) -> Response:
        fresh = MetricSource.objects.select_related("cluster").get(pk=row.pk)
        return Response(SourceSerializer(fresh).data, status=status, headers=etag(fresh.version))

    @extend_schema(request=SourceInput, responses={201: SourceSerializer})
    def create(self, request: Request) -> Response:
        """Add one."""
        values, secret = self._sent(request)
        self.policy.require(self.policy.administers_pool)
        cluster = Cluster.objects.filter(code=values.pop("cluster", "")).first()
        if cluster is None:
            raise Invalid.field("cluster", _("There is no such cluster."))
        return self._answer(
            source_save(acting_user=self.actor, cluster=cluster, values=values, secret=secret), 201
        )

    @extend_schema(request=SourceInput, responses=SourceSerializer)
    def partial_update(self, request: Request, uid: str) -> Response:
        """Change one. Honours If-Match."""
        row = self.get_object()
        check_if_match(request, row.version)
        values, secret = self._sent(request)
        if values.pop("cluster", row.cluster.code) != row.cluster.code:
            raise Invalid.field("cluster", _("A source stays with its cluster."))
        return self._answer(
            source_save(
                acting_user=self.actor,
                cluster=row.cluster,
                values=values,
                secret=secret,
                source=row,
                version=row.version,
            )
        )

    @extend_schema(request=SourceLook, responses={202: SourceSerializer})
    @action(detail=True, methods=["post"])
    def fetch(self, request: Request, uid: str) -> Response:
        """Fetch it within seconds, out of turn; how that went is in `last_code` and `last_facts` then."""
        row = self.get_object()
        source_hasten(acting_user=self.actor, source=row)
        return self._answer(row, 202)

    @extend_schema(request=SourceLook, responses=SourceCheck)
    @action(detail=True, methods=["post"])
    def check(self, request: Request, uid: str) -> Response:
        """A dry run: fetch it now, also where it is switched off, and say what would be matched. Takes up to 25 s."""
        look = source_check(acting_user=self.actor, source=self.get_object())
        told = {
            "code": look.code,
            "targets": look.targets,
            "codes": look.codes,
            "problems": look.problems,
            "states": look.states,
            "matches": look.matches[:MOST_MATCHES],
        }
        return Response(SourceCheck(told).data)

    def _sent(self, request: Request) -> tuple[dict[str, Any], str | None]:
        sent = SourceInput(data=request.data)
        sent.is_valid(raise_exception=True)
        values = dict(sent.validated_data)
        return values, values.pop("secret", None)
