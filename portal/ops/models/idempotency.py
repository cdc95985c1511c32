"""Answers kept for `Idempotency-Key`: a write sent twice is done once and answered alike."""

from __future__ import annotations

from django.db import models

from portal.kernel.clock import now


class IdempotencyRecord(models.Model):
    """One keyed write of one person; `body_hash` guards against a key used for another write."""

    id = models.BigAutoField(primary_key=True)
    user_id = models.BigIntegerField()
    key = models.CharField(max_length=128)
    route = models.CharField(max_length=300)
    body_hash = models.CharField(max_length=64)
    status = models.PositiveSmallIntegerField(null=True)
    response = models.JSONField(null=True)
    created_at = models.DateTimeField(default=now)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["user_id", "key"], name="idempotency_once")]

    def __str__(self) -> str:
        return f"{self.route} {self.key}"
