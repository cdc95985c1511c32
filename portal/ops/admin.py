"""The stock data admin: the operations log to look at; undelivered outbox events may be set to be tried again."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from portal.kernel.clock import now
from portal.ops.models import AuditEvent, Incident, OutboxEvent, TaskRun


class ReadOnly(admin.ModelAdmin):
    """Shows rows; adds, changes and deletes nothing."""

    list_per_page = 50
    show_full_result_count = False

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


@admin.register(AuditEvent)
class AuditEventAdmin(ReadOnly):
    """The audit trail."""

    list_display = ("at", "action", "actor_name", "via", "object_label")
    list_filter = ("via",)


@admin.register(OutboxEvent)
class OutboxEventAdmin(ReadOnly):
    """Outbox events."""

    list_display = ("id", "topic", "key", "attempts", "created_at", "available_at", "done_at")
    list_filter = ("topic",)
    actions = ("try_again",)

    @admin.action(description=_("Try again now"))
    def try_again(self, request: HttpRequest, rows: QuerySet[OutboxEvent]) -> None:
        """Undelivered events get their attempts back and are due now."""
        rows.filter(done_at=None).update(attempts=0, available_at=now())


@admin.register(Incident)
class IncidentAdmin(ReadOnly):
    """Incidents."""

    list_display = ("id", "kind", "severity", "state", "subject_label", "opened_at", "occurrences")
    list_filter = ("state", "severity")


@admin.register(TaskRun)
class TaskRunAdmin(ReadOnly):
    """Runs of periodic work."""

    list_display = ("name", "started_at", "ended_at", "outcome")
    list_filter = ("name", "outcome")
