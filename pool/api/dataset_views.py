"""API of data sets."""

from __future__ import annotations

from typing import Any

from django.db.models import QuerySet
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema, extend_schema_view
from rest_framework import mixins, serializers
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from pool.models import Dataset
from pool.selectors.datasets import datasets_visible
from pool.services.datasets import dataset_retire, dataset_save
from portal.accounts.api.base import ApiViewSet
from portal.accounts.api.params import bool_param
from portal.kernel.api import check_if_match, etag


class DatasetSerializer(serializers.ModelSerializer[Dataset]):
    """A named data set: where it lies, on which nodes it is cached ; all nodes of its site reach it."""

    site = serializers.CharField(source="site.code", default=None)
    department = serializers.CharField(source="department.code", default=None)
    nodes = serializers.SerializerMethodField()

    class Meta:
        model = Dataset
        fields = [
            "uid", "code", "name", "size_gib", "site", "location", "nodes", "department", "retired_at", "version",
        ]  # fmt: skip

    def get_nodes(self, dataset: Dataset) -> list[str]:
        """Names of the nodes that have it cached."""
        return sorted(node.name for node in dataset.cached_on.all())


class DatasetInput(serializers.Serializer[Any]):
    """A data set to make or change. Its code stays."""

    code = serializers.CharField(required=False)
    name = serializers.CharField(required=False)
    size_gib = serializers.IntegerField(required=False, min_value=0)
    site = serializers.CharField(required=False, allow_null=True, allow_blank=True, help_text="code")
    location = serializers.CharField(required=False, allow_blank=True)
    nodes = serializers.ListField(child=serializers.CharField(), required=False, help_text="names")
    department = serializers.CharField(
        required=False, allow_null=True, allow_blank=True, help_text="code; null: anybody"
    )


class DatasetReason(serializers.Serializer[Any]):
    """A reason."""

    reason = serializers.CharField(required=False, allow_blank=True)


@extend_schema_view(
    list=extend_schema(
        parameters=[
            OpenApiParameter("site", OpenApiTypes.STR, description="site code"),
            OpenApiParameter("code", OpenApiTypes.STR, description="exact code"),
            OpenApiParameter("retired", OpenApiTypes.BOOL, description="true: also those off the list"),
        ]
    )
)
class DatasetViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, ApiViewSet):
    """Data sets that requests may name."""

    serializer_class = DatasetSerializer
    token_scope = "admin"
    queryset = Dataset.objects.none()

    def get_queryset(self) -> QuerySet[Dataset]:
        """Those that the person may use or administers."""
        rows = datasets_visible(self.policy).prefetch_related("cached_on")
        if self.action != "list":
            return rows
        if site := self.request.query_params.get("site"):
            rows = rows.filter(site__code=site)
        if code := self.request.query_params.get("code"):
            rows = rows.filter(code=code)
        return rows if bool_param(self.request, "retired") else rows.filter(retired_at=None)

    def _answer(self, row: Dataset, status: int = 200) -> Response:
        fresh = datasets_visible(self.policy).prefetch_related("cached_on").get(pk=row.pk)
        return Response(DatasetSerializer(fresh).data, status=status, headers=etag(fresh.version))

    @extend_schema(request=DatasetInput, responses={201: DatasetSerializer})
    def create(self, request: Request) -> Response:
        """Make one."""
        return self._answer(dataset_save(acting_user=self.actor, values=_sent(request)), 201)

    @extend_schema(request=DatasetInput, responses=DatasetSerializer)
    def partial_update(self, request: Request, uid: str) -> Response:
        """Change one; what is not sent stays. Honours If-Match."""
        row = self.get_object()
        check_if_match(request, row.version)
        known: dict[str, Any] = {
            "name": row.name,
            "size_gib": row.size_gib,
            "site": row.site.code if row.site is not None else "",
            "location": row.location,
            "nodes": [node.name for node in row.cached_on.all()],
            "department": row.department.code if row.department is not None else "",
        }
        made = dataset_save(
            acting_user=self.actor, values=known | _sent(request), dataset=row, version=row.version
        )
        return self._answer(made)

    @extend_schema(request=DatasetReason, responses=DatasetSerializer)
    @action(detail=True, methods=["post"])
    def retire(self, request: Request, uid: str) -> Response:
        """Take it off the list: no new request may name it."""
        row = self.get_object()
        check_if_match(request, row.version)
        sent = DatasetReason(data=request.data)
        sent.is_valid(raise_exception=True)
        reason = str(sent.validated_data.get("reason", ""))[:500]
        return self._answer(dataset_retire(acting_user=self.actor, dataset=row, reason=reason))


def _sent(request: Request) -> dict[str, Any]:
    sent = DatasetInput(data=request.data)
    sent.is_valid(raise_exception=True)
    return dict(sent.validated_data)
