"""API of reports: the figures of the pages, as integers."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.conf import settings
from django.utils.translation import gettext_lazy as _
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import serializers, status
from rest_framework.request import Request
from rest_framework.response import Response

from monitoring.models import ReportRun
from monitoring.selectors.reports.base import PARAMS, Answer, Ask, Kind, ask_from
from monitoring.selectors.reports.kinds import KINDS, kind_of
from monitoring.selectors.reports.runs import run_for
from monitoring.services.report_runs import clean_params, may_read, report_run
from portal.accounts.api.base import ApiViewSet
from portal.kernel.errors import Invalid
from portal.kernel.tables import machine_columns
from quotas.selectors.billing_time import billing_zone
from quotas.selectors.month_report import ledger_mark
from quotas.selectors.running import one_look

FILTERS = [
    OpenApiParameter("period", str, description="2026-05, last7, last30, last90, or days with from and to"),
    OpenApiParameter("from", str, description="first day, with period=days"),
    OpenApiParameter("to", str, description="last day, with period=days"),
    OpenApiParameter("by", str, description="grouping; each kind lists its own"),
    OpenApiParameter("department", str, description="uid or code; its subtree"),
    OpenApiParameter("flavour", str, description="code"),
    OpenApiParameter("user", str, description="uid"),
    OpenApiParameter("site", str, description="code"),
]


def answer_json(kind: Kind, ask: Ask, answer: Answer, mark: int) -> dict[str, Any]:
    """Figures under their machine names; totals are sums of the rows."""
    return {
        "report": kind.code,
        "from": ask.period.start,
        "until": ask.period.until,
        "by": ask.by,
        "zone": billing_zone().key,
        "currency": settings.GPUPOOL_CURRENCY,
        "ledger_to_entry": mark,
        "covered_gpu_ms": answer.covered[0] if answer.covered else None,
        "tables": [
            {
                "title": table.title,
                "columns": machine_columns(table),
                "rows": table.rows,
                "total": table.total(),
            }
            for table in answer.tables
        ],
    }


class RunSerializer(serializers.ModelSerializer[ReportRun]):
    """A kept run."""

    class Meta:
        model = ReportRun
        fields = ["uid", "ref", "kind", "params", "language", "ledger_mark", "made_at"]


@extend_schema(tags=["reports"])
class ReportViewSet(ApiViewSet):
    """Reports as on the pages."""

    queryset = ReportRun.objects.none()
    serializer_class = RunSerializer
    pagination_class = None

    @extend_schema(operation_id="reports_kinds", responses={200: dict})
    def list(self, request: Request) -> Response:
        """The kinds, and what each can be grouped by."""
        everything = self.policy.reads_money.everything
        rows = [
            {"report": k.code, "title": str(k.title), "groupings": list(k.groupings)}
            for k in KINDS.values()
            if everything or not k.pool_only
        ]
        return Response({"count": len(rows), "results": rows})

    def _ask(self, request: Request, code: str) -> tuple[Kind, Ask]:
        kind = kind_of(code)
        may_read(kind, self.policy)
        unknown = sorted(set(request.query_params) - set(PARAMS) - {"format"})
        if unknown:
            raise Invalid.field(unknown[0], _("This filter is not known here."))
        return kind, ask_from(kind, request.query_params.dict(), self.policy)

    @extend_schema(parameters=FILTERS, responses={200: dict})
    @one_look()
    def retrieve(self, request: Request, code: str) -> Response:
        """One report as of now."""
        kind, ask = self._ask(request, code)
        return Response(answer_json(kind, ask, kind.make(ask), ledger_mark()[0]))

    @extend_schema(request=None, parameters=FILTERS, responses={201: RunSerializer})
    def keep(self, request: Request, code: str) -> Response:
        """Keep the report as it is now."""
        kind = kind_of(code)
        ask = ask_from(kind, clean_params(request.query_params.dict()), self.policy)
        run = report_run(acting_user=self.actor, kind=kind, ask=ask)
        return Response(RunSerializer(run).data, status=status.HTTP_201_CREATED)

    @extend_schema(operation_id="reports_run", responses={200: dict})
    def run(self, request: Request, uid: str) -> Response:
        """A kept run with all its figures, the same each time."""
        run = run_for(self.policy, UUID(str(uid)))
        return Response({**RunSerializer(run).data, "content": run.content})
