"""What this room exposes under /api/v1/."""

from __future__ import annotations

from typing import Any

from pool.api import (
    cluster_views,
    dataset_views,
    decision_views,
    endpoint_views,
    reclaim_views,
    upload_views,
    views,
    what_if_views,
)

router_entries: list[tuple[str, Any, str]] = [
    ("nodes", views.NodeViewSet, "node"),
    ("gpus", views.GpuViewSet, "gpu"),
    ("allocations", views.AllocationViewSet, "allocation"),
    ("clusters", cluster_views.ClusterViewSet, "cluster"),
    ("queue", views.QueueViewSet, "queue"),
    ("service-endpoints", endpoint_views.ServiceEndpointViewSet, "service-endpoint"),
    ("work-uploads", upload_views.WorkUploadViewSet, "work-upload"),
    ("decisions", decision_views.DecisionViewSet, "decision"),
    ("policies", decision_views.PolicyViewSet, "policy"),
    ("datasets", dataset_views.DatasetViewSet, "dataset"),
    ("what-if", what_if_views.WhatIfViewSet, "what-if"),
    ("reclaim-cases", reclaim_views.ReclaimCaseViewSet, "reclaim-case"),
    ("reclaim-advice", reclaim_views.ReclaimAdviceViewSet, "reclaim-advice"),
    ("reclaim-modes", reclaim_views.ReclaimModeViewSet, "reclaim-mode"),
    ("reclaim-rules", reclaim_views.ReclaimRulesViewSet, "reclaim-rules"),
    ("maintenance-windows", reclaim_views.MaintenanceWindowViewSet, "maintenance-window"),
]
urlpatterns_v1: list[Any] = []
