"""What this room exposes under /api/v1/."""

from __future__ import annotations

from typing import Any

from portal.notify.api import views

router_entries: list[tuple[str, Any, str]] = [("notifications", views.NotificationViewSet, "notification")]
urlpatterns_v1: list[Any] = []
