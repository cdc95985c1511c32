"""Allocations: the leases of one request, and what runs on them."""

from __future__ import annotations

from django.conf import settings
from django.db import models
from django.db.models import Q
from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy

from pool.models.place import Node
from portal.kernel.clock import now
from portal.kernel.models import PublicModel


class Allocation(PublicModel):
    """What a request got. At most one open allocation per request (database constraint).

    `uid` is the idempotency key towards executors. States (pool/transitions.py):
    reserved → starting → running → stopping → ended; `ended` means every GPU was seen free (or fenced).
    """

    class State(models.TextChoices):
        RESERVED = "reserved", _("Reserved")
        STARTING = "starting", _("Starting")
        RUNNING = "running", _("Running")
        STOPPING = "stopping", _("Stopping")
        ENDED = "ended", _("Ended")

    class EndReason(models.TextChoices):
        FINISHED = "finished", _("Finished by itself")
        FAILED = "failed", _("Ended with an error")
        RELEASED = "released", _("Released by its holder")
        EXPIRED = "expired", _("Time was up")
        REVOKED = "revoked", _("Revoked by an administrator")
        RECLAIMED = "reclaimed", _("Reclaimed")
        PREEMPTED = "preempted", _("Preempted")
        NODE_LOST = "node_lost", _("Node lost")
        START_FAILED = "start_failed", _("Could not start")
        SUSPENDED = "suspended", _("Holder suspended")
        IDLE = "idle", _("Idle")
        OVER_QUOTA = "over_quota", _("Over quota")
        MAINTENANCE = "maintenance", pgettext_lazy("cause", "Maintenance")

    request = models.ForeignKey(
        "quotas.CapacityRequest", on_delete=models.PROTECT, related_name="allocations"
    )
    holder = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.PROTECT, related_name="allocations")
    department = models.ForeignKey(
        "accounts.Department", on_delete=models.PROTECT, related_name="allocations"
    )
    flavour = models.ForeignKey(
        "quotas.GpuFlavour", on_delete=models.PROTECT, null=True, blank=True, related_name="allocations"
    )
    charge_milli = models.BigIntegerField(help_text="sum of its leases; debited once, released once")
    quota_debited = models.BooleanField(default=False)
    quota_released_at = models.DateTimeField(null=True, blank=True)
    interruptible = models.BooleanField(default=True)
    priority = models.PositiveSmallIntegerField(default=50)
    state = models.CharField(max_length=10, choices=State.choices, default=State.RESERVED)
    state_since = models.DateTimeField(default=now)
    end_reason = models.CharField(max_length=16, choices=EndReason.choices, blank=True)
    end_rule = models.CharField(max_length=64, blank=True)
    reserved_at = models.DateTimeField(default=now)
    started_at = models.DateTimeField(null=True, blank=True, help_text="the executor saw it run")
    expires_at = models.DateTimeField(null=True, blank=True, help_text="null: a service without an end")
    stop_asked_at = models.DateTimeField(null=True, blank=True)
    grace_until = models.DateTimeField(null=True, blank=True)
    ended_at = models.DateTimeField(null=True, blank=True)
    exit_code = models.IntegerField(null=True, blank=True)
    error_code = models.CharField(max_length=64, blank=True)
    error_detail = models.TextField(blank=True)
    start_attempts = models.PositiveSmallIntegerField(default=0)
    retry_at = models.DateTimeField(null=True, blank=True)
    extensions = models.PositiveSmallIntegerField(default=0)
    cycle = models.ForeignKey(
        "pool.SchedulerCycle", on_delete=models.PROTECT, null=True, blank=True, related_name="allocations"
    )

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["request"], condition=~Q(state="ended"), name="allocation_one_open_per_request"
            ),
            models.CheckConstraint(condition=Q(charge_milli__gte=0), name="allocation_charge"),
        ]
        indexes = [
            models.Index(fields=["holder", "-id"], name="allocation_holder"),
            models.Index(fields=["department", "-id"], name="allocation_department"),
            models.Index(fields=["state", "expires_at"], name="allocation_open", condition=~Q(state="ended")),
        ]

    def __str__(self) -> str:
        return self.ref

    @property
    def ref(self) -> str:
        """The reference for people."""
        return f"A-{self.pk}"

    @property
    def is_open(self) -> bool:
        """Whether it still holds anything."""
        return self.state != self.State.ENDED


class AllocationMember(models.Model):
    """The part of an allocation on one node (a gang has several): what the executor runs and saw there."""

    class State(models.TextChoices):
        RESERVED = "reserved", _("Reserved")
        STARTING = "starting", _("Starting")
        RUNNING = "running", _("Running")
        EXITED = "exited", _("Exited")
        FREE = "free", _("Seen free")
        LOST = "lost", _("Lost")

    id = models.BigAutoField(primary_key=True)
    allocation = models.ForeignKey(Allocation, on_delete=models.PROTECT, related_name="members")
    number = models.PositiveSmallIntegerField(help_text="rank in the gang, from 0")
    node = models.ForeignKey(Node, on_delete=models.PROTECT, related_name="members")
    cpu_milli = models.PositiveIntegerField(default=0)
    memory_mib = models.PositiveIntegerField(default=0)
    state = models.CharField(max_length=10, choices=State.choices, default=State.RESERVED)
    external_id = models.CharField(max_length=120, blank=True, help_text="job id in the outside system")
    ordered_at = models.DateTimeField(
        null=True, blank=True, help_text="last order to start that went to an outside system, answered or not"
    )
    stop_ordered_at = models.DateTimeField(
        null=True, blank=True, help_text="last order to stop that an outside system took"
    )
    read_bytes = models.BigIntegerField(default=0, help_text="of its output, read from an outside system")
    pid = models.PositiveIntegerField(null=True, blank=True)
    account = models.CharField(max_length=64, blank=True, help_text="system account it really runs as")
    started_at = models.DateTimeField(null=True, blank=True)
    ended_at = models.DateTimeField(null=True, blank=True)
    exit_code = models.IntegerField(null=True, blank=True)
    exit_signal = models.PositiveSmallIntegerField(null=True, blank=True)
    seen_free_at = models.DateTimeField(null=True, blank=True)
    fenced_at = models.DateTimeField(null=True, blank=True)
    given_up_at = models.DateTimeField(
        null=True, blank=True, help_text="taken back alone: the rest of the gang goes on without it"
    )

    class Meta:
        constraints = [models.UniqueConstraint(fields=["allocation", "number"], name="member_once")]
        indexes = [models.Index(fields=["node", "state"], name="member_node")]

    def __str__(self) -> str:
        return f"{self.allocation} [{self.number}]"


class AllocationEvent(models.Model):
    """One line of an allocation's history; also the steps of its reclaim ladder."""

    id = models.BigAutoField(primary_key=True)
    allocation = models.ForeignKey(Allocation, on_delete=models.PROTECT, related_name="events")
    at = models.DateTimeField(default=now)
    kind = models.CharField(max_length=32)
    actor_name = models.CharField(max_length=200, blank=True)
    facts = models.JSONField(default=dict)
    text = models.TextField(blank=True)

    class Meta:
        indexes = [models.Index(fields=["allocation", "-id"], name="allocation_event")]

    def __str__(self) -> str:
        return f"{self.kind} {self.at:%H:%M}"


class AllocationLog(models.Model):
    """A piece of a member's output. `offset` is in bytes of the whole output; pieces do not overlap."""

    id = models.BigAutoField(primary_key=True)
    allocation = models.ForeignKey(Allocation, on_delete=models.PROTECT, related_name="log_pieces")
    member = models.PositiveSmallIntegerField(default=0)
    offset = models.BigIntegerField()
    data = models.TextField()
    at = models.DateTimeField(default=now)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["allocation", "member", "offset"], name="log_piece_once")
        ]

    def __str__(self) -> str:
        return f"{self.allocation_id}[{self.member}]@{self.offset}"
