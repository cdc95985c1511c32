"""API of waste findings: the same rows and acts as the pages."""

from __future__ import annotations

from typing import Any

from django.db.models import QuerySet
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import (
    OpenApiParameter,
    extend_schema,
    extend_schema_serializer,
    extend_schema_view,
)
from rest_framework import mixins, serializers
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from monitoring.models import Finding, FindingDay, FindingEntry
from monitoring.selectors.findings import SORTS, finding_for, findings_visible
from monitoring.services.finding_acts import ACTS, acts_of, finding_act
from portal.accounts.api.base import ApiViewSet
from portal.accounts.api.params import choice_param, department_param, query, sort_param
from portal.kernel.api import check_if_match, etag


class FindingSerializer(serializers.ModelSerializer[Finding]):
    """A finding. `gpu_ms`: GPU-milliseconds wasted; `micro`: millionths of the currency; `waste_milli`: milli-GPU."""

    ref = serializers.CharField(read_only=True)
    allocation: Any = serializers.SlugRelatedField(slug_field="uid", read_only=True)
    gpu: Any = serializers.SlugRelatedField(slug_field="uid", read_only=True)
    holder: Any = serializers.SlugRelatedField(slug_field="username", read_only=True)
    department: Any = serializers.SlugRelatedField(slug_field="code", read_only=True)
    flavour: Any = serializers.SlugRelatedField(slug_field="code", read_only=True)

    class Meta:
        model = Finding
        fields = [
            "uid", "ref", "kind", "rule", "state", "outcome", "confidence", "subject_label", "allocation", "gpu",
            "holder", "department", "flavour", "site_code", "since", "seen_at", "closed_at", "waste_milli", "gpu_ms",
            "micro", "evidence", "told_at", "version",
        ]  # fmt: skip


class DaySerializer(serializers.ModelSerializer[FindingDay]):
    """A day of a finding."""

    class Meta:
        model = FindingDay
        fields = ["local_day", "gpu_ms", "micro"]


@extend_schema_serializer(component_name="FindingEntry")
class EntrySerializer(serializers.ModelSerializer[FindingEntry]):
    """A line of a finding's history."""

    class Meta:
        model = FindingEntry
        fields = ["at", "kind", "actor_name", "text", "facts"]


class FindingDetailSerializer(FindingSerializer):
    """A finding with its days, its history, and the acts that are open to the caller."""

    days = DaySerializer(many=True, read_only=True)
    entries = EntrySerializer(many=True, read_only=True)
    acts = serializers.SerializerMethodField()

    class Meta(FindingSerializer.Meta):
        fields = [*FindingSerializer.Meta.fields, "days", "entries", "acts"]

    def get_acts(self, finding: Finding) -> list[str]:
        """Names for `act`."""
        return acts_of(self.context["view"].policy, finding)


class ActInput(serializers.Serializer[Any]):
    """One act; `dismiss` needs a reason."""

    act = serializers.ChoiceField(choices=ACTS)
    reason = serializers.CharField(required=False, allow_blank=True, max_length=500, default="")


@extend_schema_view(
    list=extend_schema(
        parameters=[
            query("kind", "kind of waste", enum=Finding.Kind.values),
            query("state", "state", enum=Finding.State.values),
            query("department", "uid or code; its subtree"),
            OpenApiParameter("ordering", OpenApiTypes.STR, enum=list(SORTS)),
        ]
    )
)
class FindingViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, ApiViewSet):
    """Waste findings of one's own work and of departments that one reads."""

    serializer_class = FindingSerializer
    queryset = Finding.objects.none()

    def get_queryset(self) -> QuerySet[Finding]:
        """Visible rows by the filters."""
        rows = findings_visible(self.policy).select_related(
            "allocation", "gpu", "holder", "department", "flavour"
        )
        if getattr(self, "action", "") != "list":
            return rows
        if kind := choice_param(self.request, "kind", Finding.Kind.values):
            rows = rows.filter(kind=kind)
        if state := choice_param(self.request, "state", Finding.State.values):
            rows = rows.filter(state=state)
        department = department_param(self.request, self.policy.tree)
        if department is not None:
            rows = rows.filter(department_id__in=self.policy.tree.subtree(department.pk))
        return rows.order_by(SORTS[sort_param(self.request, SORTS, "money")], "-id")

    @extend_schema(responses=FindingDetailSerializer)
    def retrieve(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        """One finding with all that belongs to it."""
        finding = self.get_object()
        body = FindingDetailSerializer(finding, context=self.get_serializer_context()).data
        return Response(body, headers=etag(finding.version))

    @extend_schema(request=ActInput, responses=FindingDetailSerializer)
    @action(detail=True, methods=["post"])
    def act(self, request: Request, uid: str) -> Response:
        """Tell who wastes, dismiss, take up again, open an incident."""
        finding = self.get_object()
        check_if_match(request, finding.version)
        body = ActInput(data=request.data)
        body.is_valid(raise_exception=True)
        done = finding_act(acting_user=self.actor, policy=self.policy, finding=finding, **body.validated_data)
        found = finding_for(self.policy, done.uid)
        return Response(
            FindingDetailSerializer(found, context=self.get_serializer_context()).data,
            headers=etag(found.version),
        )
