"""Decisions of the scheduler: cycles, and why each request waits."""

from __future__ import annotations

from django.contrib.postgres.fields import ArrayField
from django.db import connection, models
from django.db.models import Q

from portal.kernel.clock import now
from portal.kernel.models import PublicModel

AHEAD_TOLD = 5


class SchedulingPolicy(PublicModel):
    """A version of the scheduler's policy as data; one is active.

    A draft (never published) may be changed; what was published once stays as it is, so that a decision can be
    replayed under the version that it names. `values` hold only the switches that differ from the defaults.
    """

    name = models.CharField(max_length=80)
    values = models.JSONField(default=dict)
    note = models.TextField(blank=True, help_text="why it is as it is")
    based_on = models.ForeignKey(
        "self", on_delete=models.PROTECT, null=True, blank=True, related_name="drafts"
    )
    made_by_name = models.CharField(max_length=200, blank=True)
    active = models.BooleanField(default=False)
    published_at = models.DateTimeField(null=True, blank=True)
    published_by_name = models.CharField(max_length=200, blank=True)
    preview = models.JSONField(default=dict, help_text="what stored decisions would have been under it")
    previewed_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["active"], condition=Q(active=True), name="scheduling_policy_one_active"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.name} v{self.pk}"


class SchedulerSnapshot(models.Model):
    """What a decision looked at, compressed: all of it (no `parent`), or what differs from `parent`.

    `hash` is that of the whole snapshot (pool/engine/canonical.py). A chain is removed as a whole once all its
    decisions are older than the retention.
    """

    id = models.BigAutoField(primary_key=True)
    hash = models.CharField(max_length=64)
    parent = models.ForeignKey(
        "self", on_delete=models.PROTECT, null=True, blank=True, related_name="children"
    )
    base = models.ForeignKey("self", on_delete=models.PROTECT, null=True, blank=True, related_name="chain")
    depth = models.PositiveSmallIntegerField(default=0)
    data = models.BinaryField()
    raw_bytes = models.PositiveIntegerField()
    created_at = models.DateTimeField(default=now)

    class Meta:
        indexes = [models.Index(fields=["created_at"], name="snapshot_time")]

    def __str__(self) -> str:
        return self.hash[:12]


class SchedulerCycle(PublicModel):
    """One cycle that decided something, with what is needed to judge and to replay it later.

    `decided_at_ms` is the moment given to the engine, `only` the requests it was asked about (null: all),
    `plan_hash` what came out. Without a policy row the built-in defaults were in force.
    """

    started_at = models.DateTimeField(default=now)
    took_ms = models.PositiveIntegerField(default=0)
    cause = models.CharField(max_length=48, blank=True)
    snapshot_hash = models.CharField(max_length=64, blank=True)
    snapshot = models.ForeignKey(
        SchedulerSnapshot, on_delete=models.SET_NULL, null=True, blank=True, related_name="cycles"
    )
    policy = models.ForeignKey(SchedulingPolicy, on_delete=models.PROTECT, null=True, blank=True)
    decided_at_ms = models.BigIntegerField(null=True, blank=True)
    only = models.JSONField(null=True, blank=True)
    plan_hash = models.CharField(max_length=64, blank=True)
    considered = models.PositiveIntegerField(default=0)
    placed = models.PositiveIntegerField(default=0)
    evicted = models.PositiveIntegerField(default=0)
    waiting = models.PositiveIntegerField(default=0)
    refused_on_apply = models.PositiveIntegerField(default=0)
    sizes = models.JSONField(default=dict, help_text="nodes, cards, running, pending, departments")
    timings = models.JSONField(default=dict, help_text="milliseconds by step")
    ops = models.JSONField(default=list)
    refusals = models.JSONField(default=list, help_text="request and code of what was left out on applying")

    class Meta:
        indexes = [models.Index(fields=["-started_at"], name="cycle_time")]

    def __str__(self) -> str:
        return f"cycle {self.pk}"


class QueueEntries(models.Manager["QueueEntry"]):
    """Entries with their place in line: ``position`` counts from 1, ``of`` is the length of the line."""

    def get_queryset(self) -> models.QuerySet[QueueEntry]:
        """Entries with position and length of their line; null where the line is not written yet."""
        rows = super().get_queryset()
        return rows.annotate(position=models.F("place__position"), of=models.F("place__size"))


class QueueEntry(models.Model):
    """Why a queued request waits, as of `planned_at`: a code with its figures, and a start range.

    Its place in line is in `QueueLine`: when the first of a line starts, all others move up by one row written.
    """

    request = models.OneToOneField(
        "quotas.CapacityRequest", on_delete=models.PROTECT, primary_key=True, related_name="queue_entry"
    )
    reason = models.CharField(max_length=48)
    figures = models.JSONField(default=dict)
    start_from = models.DateTimeField(null=True, blank=True)
    start_to = models.DateTimeField(null=True, blank=True)
    basis = models.CharField(
        max_length=48, blank=True, help_text="code of what the range rests on; empty: none"
    )
    planned_at = models.DateTimeField()
    signature = models.BigIntegerField(default=0, help_text="hash of what is told, to see what changed")

    rows = models.Manager["QueueEntry"]()
    objects = QueueEntries()

    class Meta:
        base_manager_name = "rows"
        default_manager_name = "objects"

    def __str__(self) -> str:
        return f"{self.request_id}: {self.reason}"

    @property
    def ahead(self) -> list[int]:
        """Ids of the nearest requests before it in its line, the nearest first (one query)."""
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT l.requests[GREATEST(1, p.position - %s):p.position - 1] FROM pool_queueplace p "
                "JOIN pool_queueline l ON l.line = p.line WHERE p.request_id = %s",
                [AHEAD_TOLD, self.pk],
            )
            row = cursor.fetchone()
        return list(reversed(row[0] or [])) if row else []


class QueueLine(models.Model):
    """Everybody who waits for one flavour, first first. `line` is the flavour's code, "" for work without GPUs."""

    line = models.CharField(max_length=48, primary_key=True)
    requests = ArrayField(models.BigIntegerField(), default=list)
    planned_at = models.DateTimeField()

    def __str__(self) -> str:
        return f"{self.line}: {len(self.requests)}"


class QueuePlace(models.Model):
    """A view of the lines by request (migration 0006)."""

    request = models.OneToOneField(
        QueueEntry, on_delete=models.DO_NOTHING, primary_key=True, related_name="place", db_constraint=False
    )
    line = models.CharField(max_length=48)
    position = models.BigIntegerField()
    size = models.IntegerField()

    class Meta:
        managed = False
        db_table = "pool_queueplace"

    def __str__(self) -> str:
        return f"{self.position} of {self.size}"
