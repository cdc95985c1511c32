"""Incidents: something is wrong, opened once, collects what belongs to it, closed with a note."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy

from portal.kernel.clock import now
from portal.kernel.models import PublicModel


class Incident(PublicModel):
    """At most one open incident per `dedupe_key` (database constraint)."""

    class Severity(models.TextChoices):
        INFO = "info", _("Info")
        WARNING = "warning", _("Warning")
        CRITICAL = "critical", _("Critical")

    class State(models.TextChoices):
        OPEN = "open", pgettext_lazy("incident", "Open")
        ACKNOWLEDGED = "acknowledged", _("Acknowledged")
        CLOSED = "closed", _("Closed")

    kind = models.CharField(
        max_length=48, help_text="stable code, e.g. node_lost, gpu_vanished, ledger_differs"
    )
    dedupe_key = models.CharField(max_length=200)
    severity = models.CharField(max_length=10, choices=Severity.choices, default=Severity.WARNING)
    state = models.CharField(max_length=14, choices=State.choices, default=State.OPEN)
    subject_type = models.CharField(max_length=48, blank=True)
    subject_uid = models.UUIDField(null=True)
    subject_label = models.CharField(max_length=200, blank=True)
    facts = models.JSONField(default=dict)
    opened_at = models.DateTimeField(default=now)
    last_seen_at = models.DateTimeField(default=now)
    occurrences = models.PositiveIntegerField(default=1)
    closed_at = models.DateTimeField(null=True)
    closed_by_name = models.CharField(max_length=200, blank=True)
    note = models.TextField(blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["dedupe_key"], condition=~models.Q(state="closed"), name="incident_one_open"
            ),
        ]
        indexes = [models.Index(fields=["state", "-opened_at"], name="incident_state")]

    def __str__(self) -> str:
        return f"{self.kind} {self.subject_label}"


class IncidentEntry(models.Model):
    """One thing that belongs to an incident: a repeated sighting, an action, a remark."""

    id = models.BigAutoField(primary_key=True)
    incident = models.ForeignKey(Incident, on_delete=models.PROTECT, related_name="entries")
    at = models.DateTimeField(default=now)
    kind = models.CharField(max_length=32)
    actor_name = models.CharField(max_length=200, blank=True)
    facts = models.JSONField(default=dict)
    text = models.TextField(blank=True)

    def __str__(self) -> str:
        return f"{self.kind} {self.at:%H:%M}"
