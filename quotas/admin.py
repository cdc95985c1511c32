"""The stock admin for rare data: flavours' names and order. All else is read there and changed by
services.
"""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.http import HttpRequest

from quotas.models import (
    ApprovalPolicy,
    ApprovalStep,
    CapacityRequest,
    Delegation,
    FlavourCapacity,
    GpuFlavour,
    QuotaChange,
    QuotaGrant,
    QuotaUsage,
    UserLimit,
)


class ReadOnly(admin.ModelAdmin):
    """Looked at, never changed here."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


@admin.register(GpuFlavour)
class FlavourAdmin(admin.ModelAdmin):
    """Name, order and whether it is on offer; the facts of the card stay."""

    list_display = ("code", "name", "memory_mib", "active", "position")
    fields = ("name", "active", "position")

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


for model, columns in (
    (FlavourCapacity, ("flavour", "installed_milli", "healthy_milli", "largest_node_gpus", "updated_at")),
    (QuotaGrant, ("department", "flavour", "guaranteed", "during", "granted_by_name")),
    (QuotaUsage, ("department", "flavour", "total", "charged", "guaranteed", "granted")),
    (UserLimit, ("user", "gpus_at_once_milli", "longest_lease_s")),
    (CapacityRequest, ("id", "requester", "department", "state", "state_since")),
    (ApprovalStep, ("id", "request", "quota_change", "role", "state", "due_at")),
    (ApprovalPolicy, ("id", "name", "active", "published_at")),
    (QuotaChange, ("id", "department", "flavour", "state")),
    (Delegation, ("principal", "deputy", "starts_at", "ends_at", "revoked_at")),
):
    admin.site.register(model, type(f"{model.__name__}Admin", (ReadOnly,), {"list_display": columns}))
