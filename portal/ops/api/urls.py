"""What this room exposes under /api/v1/."""

from __future__ import annotations

from typing import Any

from portal.ops.api import views

router_entries: list[tuple[str, Any, str]] = [
    ("audit", views.AuditViewSet, "audit"),
    ("incidents", views.IncidentViewSet, "incident"),
]
urlpatterns_v1: list[Any] = []
