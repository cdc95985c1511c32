"""The outbox: what must be told to others, written in the transaction of the change itself."""

from __future__ import annotations

from django.db import models

from portal.kernel.clock import now


class OutboxEvent(models.Model):
    """One fact for subscribers. Delivered at least once, in order of id per topic; handlers are idempotent."""

    id = models.BigAutoField(primary_key=True)
    topic = models.CharField(max_length=64)
    key = models.CharField(max_length=100, blank=True, help_text="what it is about, for reading")
    payload = models.JSONField(default=dict)
    created_at = models.DateTimeField(default=now)
    available_at = models.DateTimeField(default=now)
    attempts = models.PositiveSmallIntegerField(default=0)
    done_at = models.DateTimeField(null=True)
    last_error = models.TextField(blank=True)

    class Meta:
        indexes = [
            models.Index(fields=["available_at", "id"], name="outbox_open", condition=models.Q(done_at=None)),
            models.Index(fields=["topic", "-id"], name="outbox_topic"),
        ]

    def __str__(self) -> str:
        return f"{self.topic} {self.key}"
