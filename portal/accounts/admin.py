"""The stock data admin: people's tables to look at. Changes go through the pages, which check and record them."""

from __future__ import annotations

from django.contrib import admin

from portal.accounts.models import ApiToken, Department, DepartmentName, RoleBinding, User
from portal.ops.admin import ReadOnly


@admin.register(User)
class UserAdmin(ReadOnly):
    """People."""

    list_display = ("username", "display_name", "home_department", "is_active", "last_login")
    search_fields = ("username", "display_name", "email")
    list_filter = ("is_active",)
    list_select_related = ("home_department",)
    exclude = ("password",)


@admin.register(Department)
class DepartmentAdmin(ReadOnly):
    """Departments."""

    list_display = ("code", "name", "parent", "cost_center", "closed_at")
    search_fields = ("code", "name")
    list_select_related = ("parent",)


@admin.register(DepartmentName)
class DepartmentNameAdmin(ReadOnly):
    """Names over time."""

    list_display = ("path", "during")
    search_fields = ("path",)


@admin.register(RoleBinding)
class RoleBindingAdmin(ReadOnly):
    """Role bindings."""

    list_display = ("user", "role", "department", "valid_from", "valid_to")
    list_filter = ("role",)
    list_select_related = ("user", "department")


@admin.register(ApiToken)
class ApiTokenAdmin(ReadOnly):
    """Tokens, without their hashes."""

    list_display = ("name", "user", "prefix", "expires_at", "revoked_at", "last_used_at")
    list_select_related = ("user",)
    exclude = ("hash",)
