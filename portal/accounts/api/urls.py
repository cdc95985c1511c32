"""What this room exposes under /api/v1/."""

from __future__ import annotations

from typing import Any

from django.urls import path

from portal.accounts.api import imports, schema, views

router_entries: list[tuple[str, Any, str]] = [
    ("users", views.UserViewSet, "user"),
    ("departments", views.DepartmentViewSet, "department"),
    ("role-bindings", views.RoleBindingViewSet, "role-binding"),
    ("tokens", views.TokenViewSet, "token"),
]
urlpatterns_v1: list[Any] = [
    path("me/", views.MeViewSet.as_view({"get": "list", "patch": "partial_update"}), name="me"),
    path("imports/<str:kind>/", imports.ImportViewSet.as_view({"post": "create"}), name="import"),
]
__all__ = ["router_entries", "schema", "urlpatterns_v1"]
