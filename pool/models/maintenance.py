"""Planned maintenance: when which nodes are out of service."""

from __future__ import annotations

from django.db import models
from django.db.models import F, Q
from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy

from pool.models.place import Node, Site
from portal.kernel.models import PublicModel


class MaintenanceWindow(PublicModel):
    """A time [`starts_at`, `ends_at`) in which nodes are out of service: some by name, or a whole site.

    States (pool/transitions.py): planned → announced (who is on the nodes was told) → running → ended, or
    cancelled before its end. Nothing that would still run at `starts_at` is placed there.
    """

    class State(models.TextChoices):
        PLANNED = "planned", pgettext_lazy("maintenance", "Planned")
        ANNOUNCED = "announced", _("Announced")
        RUNNING = "running", pgettext_lazy("maintenance", "Under way")
        ENDED = "ended", pgettext_lazy("maintenance", "Over")
        CANCELLED = "cancelled", pgettext_lazy("maintenance", "Called off")

    title = models.CharField(max_length=120)
    reason = models.TextField(help_text="people with work there read it")
    site = models.ForeignKey(
        Site, on_delete=models.PROTECT, null=True, blank=True, related_name="maintenance_windows"
    )
    nodes = models.ManyToManyField(
        Node, through="MaintenanceNode", blank=True, related_name="maintenance_windows"
    )
    starts_at = models.DateTimeField()
    ends_at = models.DateTimeField()
    notice_s = models.PositiveIntegerField(help_text="people are told so long before its start")
    state = models.CharField(max_length=10, choices=State.choices, default=State.PLANNED)
    announced_at = models.DateTimeField(null=True, blank=True)
    began_at = models.DateTimeField(null=True, blank=True)
    ended_at = models.DateTimeField(null=True, blank=True)
    made_by_name = models.CharField(max_length=200, blank=True)
    ended_by_name = models.CharField(max_length=200, blank=True)
    end_reason = models.TextField(blank=True)

    class Meta:
        constraints = [
            models.CheckConstraint(condition=Q(ends_at__gt=F("starts_at")), name="maintenance_ends_after"),
        ]
        indexes = [
            models.Index(
                fields=["starts_at"],
                name="maintenance_open",
                condition=Q(state__in=["planned", "announced", "running"]),
            ),
        ]

    def __str__(self) -> str:
        return self.ref

    @property
    def ref(self) -> str:
        """The reference for people."""
        return f"M-{self.pk}"


class MaintenanceNode(models.Model):
    """A node of a window, and whether it is the window that took it out of service."""

    id = models.BigAutoField(primary_key=True)
    window = models.ForeignKey(MaintenanceWindow, on_delete=models.PROTECT, related_name="node_rows")
    node = models.ForeignKey(Node, on_delete=models.PROTECT, related_name="maintenance_rows")
    closed_at = models.DateTimeField(null=True, blank=True)
    reopened_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["window", "node"], name="maintenance_node_once"),
        ]

    def __str__(self) -> str:
        return f"{self.window} {self.node}"
