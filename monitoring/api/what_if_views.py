"""API of what-ifs: ask, look, share, take away. Answers are integers."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from drf_spectacular.utils import extend_schema
from rest_framework import serializers, status
from rest_framework.request import Request
from rest_framework.response import Response

from monitoring.models import Scenario
from monitoring.selectors.what_if import may_look, scenario_for, scenarios_for
from monitoring.services.what_if import scenario_ask, scenario_forget, scenario_share
from portal.accounts.api.base import ApiViewSet


class WhatIfQuestion(serializers.Serializer[Any]):
    """A past period and what would be different. Amounts in milli-GPU and micro currency."""

    name = serializers.CharField(max_length=120)
    source = serializers.ChoiceField(choices=["pool", "trace"], default="pool", required=False)
    flavour = serializers.CharField(
        required=False, allow_blank=True, default="", help_text="code; empty: all"
    )
    price = serializers.IntegerField(required=False, default=0, help_text="of a GPU-hour, for a trace")
    changes = serializers.DictField(
        required=False,
        default=dict,
        help_text="quotas [{department, flavour, guaranteed, borrow_limit, hard_cap}], nodes {flavour: n}, policy "
        "(uid) or switches {}, borrowing (bool), prices {flavour: micro}",
    )
    jobs = serializers.CharField(required=False, help_text="CSV text of a trace", trim_whitespace=False)
    quotas = serializers.CharField(required=False, help_text="CSV text of a trace", trim_whitespace=False)

    def get_fields(self) -> dict[str, Any]:
        """`from` and `to` are words of Python."""
        return {
            **super().get_fields(),
            "from": serializers.DateField(required=False, help_text="first day, with source pool"),
            "to": serializers.DateField(required=False, help_text="last day, with source pool"),
        }


class WhatIfShare(serializers.Serializer[Any]):
    """Who sees it."""

    shared = serializers.BooleanField()


class ScenarioRow(serializers.ModelSerializer[Scenario]):
    """A what-if without its answer."""

    owner = serializers.CharField(source="owner.username")

    class Meta:
        model = Scenario
        fields = [
            "uid", "ref", "name", "owner", "shared", "params", "state", "done", "total", "seconds", "error_code",
            "created_at", "ready_at",
        ]  # fmt: skip


class ScenarioAnswer(ScenarioRow):
    """A what-if with its answer: sides recorded (not for a trace), a and b."""

    result = serializers.JSONField()

    class Meta(ScenarioRow.Meta):
        fields = [*ScenarioRow.Meta.fields, "result"]


@extend_schema(tags=["reports"])
class WhatIfReportViewSet(ApiViewSet):
    """A past period played again under other quotas, policy, fleet or prices."""

    queryset = Scenario.objects.none()
    serializer_class = ScenarioRow

    @extend_schema(operation_id="what_ifs_list", responses={200: ScenarioRow(many=True)})
    def list(self, request: Request) -> Response:
        """The caller's own and the shared ones, newest first."""
        self.policy.require(may_look(self.policy))
        page = self.paginate_queryset(scenarios_for(self.policy))
        return self.get_paginated_response(ScenarioRow(page, many=True).data)

    @extend_schema(operation_id="what_ifs_ask", request=WhatIfQuestion, responses={201: ScenarioRow})
    def create(self, request: Request) -> Response:
        """Ask; a worker plays it. With source trace, jobs and quotas are the texts of two CSV files."""
        given = WhatIfQuestion(data=request.data)
        given.is_valid(raise_exception=True)
        data = dict(given.validated_data)
        jobs, quotas = data.pop("jobs", None), data.pop("quotas", None)
        for name in ("from", "to"):
            if name in data:
                data[name] = data[name].isoformat()
        scenario = scenario_ask(
            acting_user=self.actor,
            name=data.pop("name"),
            params=data,
            jobs=jobs.encode() if jobs is not None else None,
            quotas=quotas.encode() if quotas is not None else None,
        )
        return Response(ScenarioRow(scenario).data, status=status.HTTP_201_CREATED)

    @extend_schema(operation_id="what_ifs_answer", responses={200: ScenarioAnswer})
    def retrieve(self, request: Request, uid: str) -> Response:
        """One with its answer; while it is played, how far it is."""
        return Response(ScenarioAnswer(scenario_for(self.policy, UUID(str(uid)))).data)

    @extend_schema(operation_id="what_ifs_share", request=WhatIfShare, responses={200: ScenarioRow})
    def share(self, request: Request, uid: str) -> Response:
        """Show it to all who read all books, or no longer. For its owner."""
        given = WhatIfShare(data=request.data)
        given.is_valid(raise_exception=True)
        scenario = scenario_for(self.policy, UUID(str(uid)))
        scenario_share(acting_user=self.actor, scenario=scenario, shared=given.validated_data["shared"])
        return Response(ScenarioRow(scenario).data)

    @extend_schema(operation_id="what_ifs_forget", responses={204: None})
    def destroy(self, request: Request, uid: str) -> Response:
        """Take it away; one that is being played ends. For its owner."""
        scenario_forget(acting_user=self.actor, scenario=scenario_for(self.policy, UUID(str(uid))))
        return Response(status=status.HTTP_204_NO_CONTENT)
