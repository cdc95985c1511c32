"""Health of cards as judged from their counters, and alert rules as data with what they found."""

from __future__ import annotations

from django.core.validators import MaxValueValidator
from django.db import models
from django.db.models import Q
from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy

from portal.kernel.clock import now
from portal.kernel.models import PublicModel


class CardHealth(models.Model):
    """What the last judgement knew of a card: counters to compare with, and problems with since when they are so."""

    gpu = models.OneToOneField(
        "pool.Gpu", on_delete=models.CASCADE, primary_key=True, related_name="card_health"
    )
    at = models.DateTimeField(help_text="time of the sample that was judged")
    counters = models.JSONField(default=dict)
    problems = models.JSONField(default=dict, help_text="code → ISO time since when it is seen")

    def __str__(self) -> str:
        return f"{self.gpu_id} {sorted(self.problems)}"


class AlertRule(PublicModel):
    """When a measure lies above or below a threshold for a while: an incident, once, that collects its subjects."""

    class Metric(models.TextChoices):
        GPU_TEMP = "gpu_temp_c", _("GPU temperature, °C")
        GPU_BUSY = "gpu_busy_percent", _("GPU busy (time), %")
        GPU_MEMORY = "gpu_memory_percent", _("GPU memory used, %")
        GPU_POWER = "gpu_power_w", _("GPU power, W")
        GPU_AGE = "gpu_age_s", _("Age of a GPU's last sample, s")
        NODE_CPU = "node_cpu_percent", _("CPU of a node, %")
        NODE_IOWAIT = "node_iowait_percent", _("I/O wait of a node, %")
        NODE_SKEW = "node_skew_ms", _("Clock skew of a node, ms")
        POOL_FREE = "pool_free_gpus", _("Free GPUs in the pool")
        POOL_DOWN = "pool_down_gpus", _("GPUs down in the pool")
        POOL_NO_DATA = "pool_no_data_gpus", _("GPUs without data in the pool")
        POOL_WASTE = "pool_waste_gpus", _("GPUs wasted now by open findings")

    class Above(models.TextChoices):
        ABOVE = "above", pgettext_lazy("threshold", "above")
        BELOW = "below", pgettext_lazy("threshold", "below")

    class Severity(models.TextChoices):
        INFO = "info", _("Info")
        WARNING = "warning", _("Warning")
        CRITICAL = "critical", _("Critical")

    name = models.CharField(max_length=120, unique=True)
    metric = models.CharField(max_length=24, choices=Metric.choices)
    direction = models.CharField(max_length=5, choices=Above.choices, default=Above.ABOVE)
    threshold = models.IntegerField(validators=[MaxValueValidator(10_000_000)])
    for_s = models.PositiveIntegerField(default=300, validators=[MaxValueValidator(7 * 86_400)])
    severity = models.CharField(max_length=8, choices=Severity.choices, default=Severity.WARNING)
    site_code = models.CharField(max_length=48, blank=True, help_text="only there; empty: everywhere")
    tell_holder = models.BooleanField(default=False, help_text="also the holder of the card")
    active = models.BooleanField(default=True)
    changed_by_name = models.CharField(max_length=200, blank=True)
    evaluated_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["name", "id"]
        constraints = [
            models.CheckConstraint(
                condition=Q(threshold__gte=-10_000_000) & Q(threshold__lte=10_000_000),
                name="alert_threshold_sane",
            ),
            models.CheckConstraint(condition=Q(for_s__lte=7 * 86_400), name="alert_for_sane"),
        ]

    def __str__(self) -> str:
        return self.name


class AlertFiring(models.Model):
    """A rule that holds for one subject: pending until it held long enough, then open, then closed."""

    id = models.BigAutoField(primary_key=True)
    rule = models.ForeignKey(AlertRule, on_delete=models.CASCADE, related_name="firings")
    subject_key = models.CharField(max_length=48, help_text="g:<GPU id>, n:<node id> or pool")
    label = models.CharField(max_length=200)
    value = models.BigIntegerField()
    worst = models.BigIntegerField()
    pending_since = models.DateTimeField(default=now)
    opened_at = models.DateTimeField(null=True, blank=True)
    closed_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["rule", "subject_key"], condition=Q(closed_at=None), name="alert_once"
            ),
        ]
        indexes = [models.Index(fields=["rule", "-id"], name="alert_history")]

    def __str__(self) -> str:
        return f"{self.rule_id} {self.subject_key}"
