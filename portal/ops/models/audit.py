"""The audit trail: insert-only, held by a database trigger (migration 0002)."""

from __future__ import annotations

from django.db import models

from portal.kernel.clock import now


class AuditEvent(models.Model):
    """One change of authority, money or allocation. Names are kept as they were then; no foreign keys, so
    that nothing cascades into history."""

    id = models.BigAutoField(primary_key=True)
    at = models.DateTimeField(default=now)
    action = models.CharField(max_length=64, help_text="stable code, e.g. quota.grant_changed")
    actor_id = models.BigIntegerField(null=True, help_text="null: the system itself")
    actor_name = models.CharField(max_length=200, blank=True)
    via = models.CharField(max_length=16, help_text="page, api, token, agent, task, command")
    object_type = models.CharField(max_length=48)
    object_uid = models.UUIDField(null=True)
    object_label = models.CharField(max_length=300, blank=True)
    department_id = models.BigIntegerField(null=True)
    before = models.JSONField(default=dict)
    after = models.JSONField(default=dict)
    reason = models.TextField(blank=True)
    request_id = models.CharField(max_length=64, blank=True)
    address = models.GenericIPAddressField(null=True)

    class Meta:
        indexes = [
            models.Index(fields=["object_uid", "-id"], name="audit_object"),
            models.Index(fields=["department_id", "-id"], name="audit_department"),
            models.Index(fields=["actor_id", "-id"], name="audit_actor"),
            models.Index(fields=["-at"], name="audit_at"),
        ]

    def __str__(self) -> str:
        return f"{self.at:%Y-%m-%dT%H:%M:%SZ} {self.action} {self.object_label}"
