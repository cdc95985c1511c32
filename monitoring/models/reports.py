"""What reports are made of: the states of cards, and the sums of cards and of uses per local day."""

from __future__ import annotations

from django.db import models
from django.db.models import F, Q
from django.utils.translation import gettext_lazy as _

from portal.kernel.clock import now


class CardSpan(models.Model):
    """A state of a card during a time; open while it lasts. A card that left the pool has no open one.

    Flavour, site and node are those of that time: a card that moves begins a new row.
    """

    class State(models.TextChoices):
        OK = "ok", _("In service")
        DOWN = "down", _("Down")
        MAINTENANCE = "maintenance", _("Maintenance")

    id = models.BigAutoField(primary_key=True)
    gpu = models.ForeignKey("pool.Gpu", on_delete=models.PROTECT, related_name="card_spans")
    state = models.CharField(max_length=12, choices=State.choices)
    flavour = models.ForeignKey("quotas.GpuFlavour", on_delete=models.PROTECT, null=True, related_name="+")
    site_code = models.CharField(max_length=48, blank=True)
    node_name = models.CharField(max_length=120, blank=True)
    started_at = models.DateTimeField()
    ended_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["gpu"], condition=Q(ended_at=None), name="card_span_one_open"),
            models.CheckConstraint(
                condition=Q(ended_at=None) | Q(ended_at__gte=F("started_at")), name="card_span_order"
            ),
        ]
        indexes = [models.Index(fields=["gpu", "started_at"], name="card_span_history")]

    def __str__(self) -> str:
        return f"{self.gpu_id} {self.state}"


class CardDay(models.Model):
    """Where a card's GPU-milliseconds of one local day went (monitoring.engine.fleet_day has the identities).

    `gpu` null: uses whose card is not known; they count as installed as long as they were held.
    """

    id = models.BigAutoField(primary_key=True)
    local_day = models.DateField()
    gpu = models.ForeignKey("pool.Gpu", on_delete=models.PROTECT, null=True, related_name="+")
    flavour = models.ForeignKey("quotas.GpuFlavour", on_delete=models.PROTECT, null=True, related_name="+")
    site_code = models.CharField(max_length=48, blank=True)
    node_name = models.CharField(max_length=120, blank=True)
    installed_ms = models.BigIntegerField()
    down_ms = models.BigIntegerField(default=0)
    maintenance_ms = models.BigIntegerField(default=0)
    allocated_ms = models.BigIntegerField(default=0)
    stranded_ms = models.BigIntegerField(default=0)

    class Meta:
        constraints = [
            models.CheckConstraint(
                condition=Q(installed_ms__gte=F("down_ms") + F("maintenance_ms") + F("allocated_ms")),
                name="card_day_adds_up",
            ),
            models.CheckConstraint(
                condition=Q(
                    stranded_ms__lte=F("installed_ms")
                    - F("down_ms")
                    - F("maintenance_ms")
                    - F("allocated_ms")
                ),
                name="card_day_stranded_is_free",
            ),
        ]
        indexes = [models.Index(fields=["local_day"], name="card_day_day")]

    def __str__(self) -> str:
        return f"{self.local_day} {self.gpu_id}"


class UseDay(models.Model):
    """What one lease held and wasted on one local day, and what the ledger says it cost. Names as they were then."""

    id = models.BigAutoField(primary_key=True)
    local_day = models.DateField()
    span = models.ForeignKey("quotas.UsageSpan", on_delete=models.PROTECT, related_name="use_days")
    request_id_ref = models.BigIntegerField(null=True)
    department_id_ref = models.BigIntegerField()
    department_path = models.CharField(max_length=600)
    user_id_ref = models.BigIntegerField(null=True)
    user_name = models.CharField(max_length=200, blank=True)
    cost_code = models.CharField(max_length=48, blank=True)
    flavour = models.ForeignKey("quotas.GpuFlavour", on_delete=models.PROTECT, related_name="+")
    site_code = models.CharField(max_length=48, blank=True)
    node_name = models.CharField(max_length=120, blank=True)
    gpu_label = models.CharField(max_length=120, blank=True)
    allocated_ms = models.BigIntegerField()
    idle_ms = models.BigIntegerField(default=0)
    unknown_ms = models.BigIntegerField(default=0)
    amount_micro = models.BigIntegerField(default=0)
    idle_micro = models.BigIntegerField(default=0)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["local_day", "span"], name="use_day_once"),
            models.CheckConstraint(
                condition=Q(idle_ms__gte=0)
                & Q(unknown_ms__gte=0)
                & Q(allocated_ms__gte=F("idle_ms") + F("unknown_ms")),
                name="use_day_adds_up",
            ),
        ]
        indexes = [models.Index(fields=["local_day", "department_id_ref"], name="use_day_department")]

    def __str__(self) -> str:
        return f"{self.local_day} {self.span_id}"


class BuiltDay(models.Model):
    """A day whose sums were made: up to which ledger entry, and when."""

    local_day = models.DateField(primary_key=True)
    ledger_mark = models.BigIntegerField(default=0)
    built_at = models.DateTimeField(default=now)
    whole = models.BooleanField(default=False, help_text="built after the day had ended")

    def __str__(self) -> str:
        return f"{self.local_day}"
