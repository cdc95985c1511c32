"""API of clusters: what carries them, a check, a discovery and its import. The same services as the pages."""

from __future__ import annotations

from typing import Any

from django.db.models import QuerySet
from drf_spectacular.utils import extend_schema, extend_schema_serializer
from rest_framework import mixins, serializers
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from pool.models import Cluster
from pool.services.adoption import work_adopt
from pool.services.clusters import cluster_check, cluster_discover, cluster_import, cluster_save
from pool.services.credentials import credential_set
from pool.services.outside_nodes import NodePlan
from portal.accounts.api.base import ApiViewSet
from portal.kernel.api import check_if_match, etag


class ClusterSerializer(serializers.ModelSerializer[Cluster]):
    """A cluster: what carries it and whether that answers. Credentials are never shown, only their names."""

    site = serializers.CharField(source="site.code")
    credentials = serializers.SerializerMethodField()

    class Meta:
        model = Cluster
        fields = [
            "uid", "code", "name", "site", "executor", "settings", "credentials", "looked_at",
            "away_since", "away_code", "version",
        ]  # fmt: skip

    def get_credentials(self, cluster: Cluster) -> list[str]:
        """Names of the credentials that are kept."""
        return sorted(row.name for row in cluster.credentials.all())


class ClusterInput(serializers.Serializer[Any]):
    """A cluster to make or change."""

    code = serializers.CharField(required=False)
    name = serializers.CharField(required=False)
    site = serializers.CharField(required=False, help_text="code")
    executor = serializers.ChoiceField(choices=Cluster.Executor.choices, required=False)
    settings = serializers.DictField(required=False, help_text="never secrets: those are credentials")


class CredentialInput(serializers.Serializer[Any]):
    """A credential to keep; an empty value removes it."""

    name = serializers.CharField()
    value = serializers.CharField(allow_blank=True, trim_whitespace=False)


@extend_schema_serializer(component_name="ClusterFinding")
class FindingSerializer(serializers.Serializer[Any]):
    """One finding of a check."""

    code = serializers.CharField()
    ok = serializers.BooleanField()
    detail = serializers.CharField()


class CheckSerializer(serializers.Serializer[Any]):
    """What a check found."""

    ok = serializers.BooleanField()
    findings = FindingSerializer(many=True)


class ImportInput(serializers.Serializer[Any]):
    """Which new nodes to take in; all where none is named. ``dry_run`` (default true) only tells."""

    dry_run = serializers.BooleanField(default=True)
    names = serializers.ListField(child=serializers.CharField(), required=False)


class AdoptInput(serializers.Serializer[Any]):
    """Running work to take in: its id over there, for whom, and the request it becomes."""

    work = serializers.CharField(help_text="as outside-work names it")
    person = serializers.CharField(help_text="user name")
    department = serializers.CharField(help_text="code")
    duration_s = serializers.IntegerField(help_text="from now on")
    purpose = serializers.CharField()
    interruptible = serializers.BooleanField(default=False)
    cost_code = serializers.CharField(required=False)


class AdoptedSerializer(serializers.Serializer[Any]):
    """What it is now."""

    allocation = serializers.UUIDField()
    request = serializers.UUIDField()
    ref = serializers.CharField()


class OutsideWorkSerializer(serializers.Serializer[Any]):
    """Work there that is not of this pool, as the last look saw it."""

    id = serializers.CharField()
    name = serializers.CharField()
    user = serializers.CharField()
    account = serializers.CharField()
    nodes = serializers.ListField(child=serializers.CharField())
    gpus = serializers.IntegerField()
    started_at = serializers.DateTimeField(allow_null=True)
    ends_at = serializers.DateTimeField(allow_null=True)


class PlanSerializer(serializers.Serializer[Any]):
    """What a discovery found against the inventory."""

    dry_run = serializers.BooleanField()
    new = serializers.ListField(child=serializers.CharField())
    known = serializers.ListField(child=serializers.CharField())
    gone = serializers.ListField(child=serializers.CharField())
    refused = serializers.DictField(child=serializers.CharField())
    gpus = serializers.IntegerField()


class ClusterViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, ApiViewSet):
    """Clusters; pool administrators."""

    serializer_class = ClusterSerializer
    token_scope = "admin"
    secret_fields = frozenset({"value"})
    queryset = Cluster.objects.none()

    def get_queryset(self) -> QuerySet[Cluster]:
        """All of them, for those who administer the pool."""
        self.policy.require(self.policy.administers_pool)
        return Cluster.objects.select_related("site").prefetch_related("credentials").order_by("name", "id")

    def _answer(self, row: Cluster, status: int = 200) -> Response:
        fresh = self.get_queryset().get(pk=row.pk)
        return Response(ClusterSerializer(fresh).data, status=status, headers=etag(fresh.version))

    @extend_schema(request=ClusterInput, responses={201: ClusterSerializer})
    def create(self, request: Request) -> Response:
        """Make one."""
        return self._answer(cluster_save(acting_user=self.actor, values=_sent(ClusterInput, request)), 201)

    @extend_schema(request=ClusterInput, responses=ClusterSerializer)
    def partial_update(self, request: Request, uid: str) -> Response:
        """Change one; what is not sent stays. Honours If-Match."""
        row = self.get_object()
        check_if_match(request, row.version)
        known = {"name": row.name, "site": row.site.code, "settings": row.settings}
        values = known | _sent(ClusterInput, request)
        return self._answer(
            cluster_save(acting_user=self.actor, values=values, cluster=row, version=row.version)
        )

    @extend_schema(request=None, responses=CheckSerializer)
    @action(detail=True, methods=["post"])
    def check(self, request: Request, uid: str) -> Response:
        """Ask the outside system whether all is set up; changes nothing."""
        result = cluster_check(acting_user=self.actor, cluster=self.get_object())
        rows = [{"code": code, "ok": ok, "detail": text} for code, ok, text in result.findings]
        return Response(CheckSerializer({"ok": result.ok, "findings": rows}).data)

    @extend_schema(request=ImportInput, responses=PlanSerializer)
    @action(detail=True, methods=["post"], url_path="import-nodes")
    def import_nodes(self, request: Request, uid: str) -> Response:
        """Look for nodes there and take the new ones in; by default only tell what it would do."""
        row, values = self.get_object(), _sent(ImportInput, request)
        if values["dry_run"]:
            plan, _found = cluster_discover(acting_user=self.actor, cluster=row)
        else:
            plan = cluster_import(acting_user=self.actor, cluster=row, names=values.get("names"))
        return Response(PlanSerializer(_plan(plan, values["dry_run"])).data)

    @extend_schema(responses=OutsideWorkSerializer(many=True))
    @action(detail=True, methods=["get"], url_path="outside-work", pagination_class=None)
    def outside_work(self, request: Request, uid: str) -> Response:
        """Work there that is not of this pool; at most 200."""
        return Response(self.get_object().foreign_work)

    @extend_schema(request=AdoptInput, responses={201: AdoptedSerializer})
    @action(detail=True, methods=["post"])
    def adopt(self, request: Request, uid: str) -> Response:
        """Take running work in as an allocation, on the cards it has; refused, it changes nothing."""
        values = _sent(AdoptInput, request)
        made = work_adopt(
            acting_user=self.actor,
            cluster=self.get_object(),
            external_id=values.pop("work"),
            person=values.pop("person"),
            values=values,
        )
        told = {"allocation": made.uid, "request": made.request.uid, "ref": made.ref}
        return Response(AdoptedSerializer(told).data, status=201)

    @extend_schema(request=CredentialInput, responses={204: None})
    @action(detail=True, methods=["post"])
    def credential(self, request: Request, uid: str) -> Response:
        """Keep a credential, sealed, in place of the one before."""
        values = _sent(CredentialInput, request)
        credential_set(
            acting_user=self.actor, cluster=self.get_object(), name=values["name"], value=values["value"]
        )
        return Response(status=204)


def _plan(plan: NodePlan, dry_run: bool) -> dict[str, Any]:
    return {
        "dry_run": dry_run,
        "new": [item.name for item in plan.new],
        "known": plan.known,
        "gone": plan.gone,
        "refused": plan.refused,
        "gpus": plan.gpus,
    }


def _sent(kind: type[serializers.Serializer[Any]], request: Request) -> dict[str, Any]:
    sent = kind(data=request.data)
    sent.is_valid(raise_exception=True)
    return dict(sent.validated_data)
