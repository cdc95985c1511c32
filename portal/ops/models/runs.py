"""Runs of periodic work, so that a sweep that does not come is seen."""

from __future__ import annotations

from django.db import models

from portal.kernel.clock import now


class TaskRun(models.Model):
    """One run of a periodic task."""

    id = models.BigAutoField(primary_key=True)
    name = models.CharField(max_length=64)
    started_at = models.DateTimeField(default=now)
    ended_at = models.DateTimeField(null=True)
    outcome = models.CharField(max_length=16, blank=True, help_text="ok, failed, skipped")
    facts = models.JSONField(default=dict)

    class Meta:
        indexes = [models.Index(fields=["name", "-started_at"], name="taskrun_name")]

    def __str__(self) -> str:
        return f"{self.name} {self.started_at:%Y-%m-%dT%H:%M:%SZ}"
