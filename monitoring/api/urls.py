"""What this room exposes under /api/v1/."""

from __future__ import annotations

from typing import Any

from django.urls import path

from monitoring.api.alert_views import AlertRuleViewSet, AlertViewSet
from monitoring.api.export_views import ExportViewSet
from monitoring.api.finding_views import FindingViewSet
from monitoring.api.report_views import ReportViewSet
from monitoring.api.source_views import SourceViewSet
from monitoring.api.views import (
    AllocationHistoryView,
    DetailsView,
    FleetHistoryView,
    HistoryView,
    SamplesView,
    StateView,
)
from monitoring.api.what_if_views import WhatIfReportViewSet

_LIST: Any = {"get": "list"}
router_entries: list[tuple[str, Any, str]] = [
    ("telemetry/sources", SourceViewSet, "metric-source"),
    ("findings", FindingViewSet, "finding"),
    ("alert-rules", AlertRuleViewSet, "alert-rule"),
    ("alerts", AlertViewSet, "alert"),
    ("exports", ExportViewSet, "export"),
]
urlpatterns_v1: list[Any] = [
    path("telemetry/state/", StateView.as_view(_LIST), name="telemetry-state"),
    path("telemetry/history/", FleetHistoryView.as_view(_LIST), name="telemetry-history"),
    path("gpus/<uuid:uid>/samples/", SamplesView.as_view(_LIST), name="gpu-samples"),
    path("gpus/<uuid:uid>/details/", DetailsView.as_view(_LIST), name="gpu-details"),
    path("gpus/<uuid:uid>/history/", HistoryView.as_view(_LIST), name="gpu-history"),
    path("allocations/<uuid:uid>/history/", AllocationHistoryView.as_view(_LIST), name="allocation-history"),
    path("reports/", ReportViewSet.as_view(_LIST), name="report-kinds"),
    path("reports/runs/<uuid:uid>/", ReportViewSet.as_view({"get": "run"}), name="report-run"),
    path("exports/<uuid:uid>/file/", ExportViewSet.as_view({"get": "download"}), name="export-download"),
    path("what-ifs/", WhatIfReportViewSet.as_view({"get": "list", "post": "create"}), name="what-ifs"),
    path(
        "what-ifs/<uuid:uid>/",
        WhatIfReportViewSet.as_view({"get": "retrieve", "patch": "share", "delete": "destroy"}),
        name="what-if",
    ),
    path("reports/<slug:code>/", ReportViewSet.as_view({"get": "retrieve", "post": "keep"}), name="report"),
]
