"""What this room exposes under /api/v1/."""

from __future__ import annotations

from typing import Any

from pool.api import views

router_entries: list[tuple[str, Any, str]] = [
    ("nodes", views.NodeViewSet, "node"),
    ("gpus", views.GpuViewSet, "gpu"),
    ("allocations", views.AllocationViewSet, "allocation"),
    ("queue", views.QueueViewSet, "queue"),
]
urlpatterns_v1: list[Any] = []
