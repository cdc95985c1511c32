"""Waste that was found: each finding with its evidence, what it cost by day, and what became of it."""

from __future__ import annotations

from django.conf import settings
from django.db import models
from django.db.models import Q
from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy

from portal.kernel.clock import now
from portal.kernel.models import PublicModel


class Finding(PublicModel):
    """Waste of one kind on one subject, from when it began until it ended. Reference: `F-<id>`.

    At most one is open per subject, so that a GPU-hour counts in one kind only. `gpu_ms` and `micro` grow while it
    holds and are the sums of its days. Who held it, in which department, is kept as it was.
    """

    class Kind(models.TextChoices):
        IDLE = "idle", _("Held but idle")
        OVER_ASKED = "over_asked", _("Over-asked")
        DATA = "waiting_data", _("Waiting for data")
        THROTTLED = "throttled", _("Throttled")
        NO_LEASE = "no_lease", _("Without a lease")
        STRANDED = "stranded", _("Stranded fragments")

    class State(models.TextChoices):
        OPEN = "open", pgettext_lazy("state", "Open")
        DISMISSED = "dismissed", pgettext_lazy("finding", "Dismissed")
        CLOSED = "closed", pgettext_lazy("state", "Closed")

    class Outcome(models.TextChoices):
        USED = "used", _("used again")
        ENDED = "ended", _("its lease ended")
        RECLAIMED = "reclaimed", _("taken back")
        GONE = "gone", _("no longer so")
        CHANGED = "changed", _("another kind now")
        UNKNOWN = "unknown", _("no data any more")

    class Confidence(models.TextChoices):
        HIGH = "high", pgettext_lazy("confidence", "High")
        MEDIUM = "medium", pgettext_lazy("confidence", "Medium")
        LOW = "low", pgettext_lazy("confidence", "Low")

    kind = models.CharField(max_length=12, choices=Kind.choices)
    rule = models.CharField(max_length=24, blank=True, help_text="what of the kind: count, part, io, heat …")
    subject_key = models.CharField(max_length=48, help_text="a:<allocation id> or g:<GPU id>")
    allocation = models.ForeignKey(
        "pool.Allocation", on_delete=models.PROTECT, null=True, related_name="findings"
    )
    gpu = models.ForeignKey("pool.Gpu", on_delete=models.PROTECT, null=True, related_name="findings")
    holder = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.PROTECT, null=True, related_name="findings"
    )
    department = models.ForeignKey(
        "accounts.Department", on_delete=models.PROTECT, null=True, related_name="findings"
    )
    flavour = models.ForeignKey("quotas.GpuFlavour", on_delete=models.PROTECT, null=True, related_name="+")
    site_code = models.CharField(max_length=48, blank=True)
    subject_label = models.CharField(max_length=200)
    state = models.CharField(max_length=10, choices=State.choices, default=State.OPEN)
    outcome = models.CharField(max_length=12, choices=Outcome.choices, blank=True)
    confidence = models.CharField(max_length=8, choices=Confidence.choices, default=Confidence.HIGH)
    evidence = models.JSONField(default=dict)
    since = models.DateTimeField(help_text="begin of the evidence")
    seen_at = models.DateTimeField(default=now, help_text="counted up to then")
    closed_at = models.DateTimeField(null=True, blank=True)
    waste_milli = models.PositiveIntegerField(default=0, help_text="milli-GPU wasted while it holds")
    gpu_ms = models.BigIntegerField(default=0)
    micro = models.BigIntegerField(default=0, help_text="at the prices in force then")
    told_at = models.DateTimeField(null=True, blank=True)
    told_by_name = models.CharField(max_length=200, blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["subject_key"], condition=~Q(state="closed"), name="finding_one_open"
            ),
            models.CheckConstraint(
                condition=Q(closed_at=None) ^ Q(state="closed"), name="finding_closed_with_its_time"
            ),
            models.CheckConstraint(condition=Q(gpu_ms__gte=0) & Q(micro__gte=0), name="finding_amounts"),
        ]
        indexes = [
            models.Index(fields=["state", "kind"], name="finding_state"),
            models.Index(fields=["department", "state"], name="finding_department"),
            models.Index(fields=["allocation"], name="finding_allocation"),
        ]

    def __str__(self) -> str:
        return f"{self.ref} {self.kind}"

    @property
    def ref(self) -> str:
        """The reference for people."""
        return f"F-{self.pk}"


class FindingDay(models.Model):
    """What one finding wasted on one day of the billing zone."""

    id = models.BigAutoField(primary_key=True)
    finding = models.ForeignKey(Finding, on_delete=models.CASCADE, related_name="days")
    local_day = models.DateField()
    gpu_ms = models.BigIntegerField(default=0)
    micro = models.BigIntegerField(default=0)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["finding", "local_day"], name="finding_day_once")]
        indexes = [models.Index(fields=["local_day"], name="finding_day_day")]

    def __str__(self) -> str:
        return f"{self.finding_id} {self.local_day}"


class FindingEntry(models.Model):
    """One line of a finding's history: found, told, still needed, advised, dismissed, closed."""

    id = models.BigAutoField(primary_key=True)
    finding = models.ForeignKey(Finding, on_delete=models.CASCADE, related_name="entries")
    at = models.DateTimeField(default=now)
    kind = models.CharField(max_length=24)
    actor_name = models.CharField(max_length=200, blank=True)
    text = models.TextField(blank=True)
    facts = models.JSONField(default=dict)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["finding", "kind", "at"], name="finding_entry_once"),
        ]

    def __str__(self) -> str:
        return f"{self.finding_id} {self.kind}"


class WatchHour(models.Model):
    """Looks at one held card in one UTC hour (monitoring.engine.waste.Tally): each a minute, with its host's load."""

    id = models.BigAutoField(primary_key=True)
    gpu = models.ForeignKey("pool.Gpu", on_delete=models.CASCADE, related_name="+")
    slot = models.SmallIntegerField(default=0)
    allocation = models.ForeignKey("pool.Allocation", on_delete=models.CASCADE, related_name="+")
    bucket = models.DateTimeField()
    looks = models.IntegerField(default=0)
    low = models.IntegerField(default=0)
    io = models.IntegerField(default=0)
    cpu = models.IntegerField(default=0)
    pcie = models.IntegerField(default=0)
    activity_pm = models.BigIntegerField(default=0, help_text="sum over the looks")
    busy = models.IntegerField(default=0, help_text="looks at work with known throttle reasons")
    hot = models.IntegerField(default=0)
    brake = models.IntegerField(default=0)
    capped = models.IntegerField(default=0)
    slow_n = models.IntegerField(default=0)
    slow_clock = models.BigIntegerField(default=0)
    free_n = models.IntegerField(default=0)
    free_clock = models.BigIntegerField(default=0)
    temp_max = models.SmallIntegerField(null=True)
    seen_at = models.DateTimeField(help_text="time of the last sample that was counted")

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["gpu", "slot", "allocation", "bucket"], name="watch_hour_once"),
        ]
        indexes = [models.Index(fields=["bucket"], name="watch_hour_bucket")]

    def __str__(self) -> str:
        return f"{self.gpu_id} {self.bucket}"
