"""Decisions of the scheduler: cycles, and why each request waits."""

from __future__ import annotations

from django.db import models
from django.db.models import Q

from portal.kernel.clock import now
from portal.kernel.models import PublicModel


class SchedulingPolicy(PublicModel):
    """A version of the scheduler's policy as data; one is active."""

    name = models.CharField(max_length=80)
    values = models.JSONField(default=dict)
    active = models.BooleanField(default=False)
    published_at = models.DateTimeField(null=True, blank=True)
    published_by_name = models.CharField(max_length=200, blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["active"], condition=Q(active=True), name="scheduling_policy_one_active"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.name} v{self.pk}"


class SchedulerCycle(PublicModel):
    """One cycle that decided something, with what is needed to judge it later."""

    started_at = models.DateTimeField(default=now)
    took_ms = models.PositiveIntegerField(default=0)
    cause = models.CharField(max_length=48, blank=True)
    snapshot_hash = models.CharField(max_length=64, blank=True)
    policy = models.ForeignKey(SchedulingPolicy, on_delete=models.PROTECT, null=True, blank=True)
    considered = models.PositiveIntegerField(default=0)
    placed = models.PositiveIntegerField(default=0)
    refused_on_apply = models.PositiveIntegerField(default=0)
    ops = models.JSONField(default=list)

    class Meta:
        indexes = [models.Index(fields=["-started_at"], name="cycle_time")]

    def __str__(self) -> str:
        return f"cycle {self.pk}"


class QueueEntry(models.Model):
    """Why a queued request waits, as of the last cycle: a code with its figures, position, and a start range."""

    request = models.OneToOneField(
        "quotas.CapacityRequest", on_delete=models.PROTECT, primary_key=True, related_name="queue_entry"
    )
    position = models.PositiveIntegerField()
    ahead = models.JSONField(default=list, help_text="uids of the nearest requests before it")
    reason = models.CharField(max_length=48)
    figures = models.JSONField(default=dict)
    start_from = models.DateTimeField(null=True, blank=True)
    start_to = models.DateTimeField(null=True, blank=True)
    basis = models.CharField(
        max_length=48, blank=True, help_text="code of what the range rests on; empty: none"
    )
    planned_at = models.DateTimeField()

    def __str__(self) -> str:
        return f"{self.request_id}: {self.reason}"
