"""What this room exposes under /api/v1/."""

from __future__ import annotations

from typing import Any

from django.urls import path

from portal.notify.api import settings_views, views

router_entries: list[tuple[str, Any, str]] = [
    ("notifications", views.NotificationViewSet, "notification"),
    ("webhooks", settings_views.WebhookViewSet, "webhook"),
]
urlpatterns_v1: list[Any] = [
    path(
        "notification-preferences/",
        settings_views.PreferencesViewSet.as_view({"get": "list", "put": "update"}),
        name="notification-preferences",
    ),
]
