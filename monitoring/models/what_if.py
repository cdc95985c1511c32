"""What-ifs: a past period played again under other quotas, policy, fleet or prices."""

from __future__ import annotations

from django.conf import settings
from django.db import models
from django.db.models import Q
from django.utils.translation import pgettext_lazy

from portal.kernel.models import PublicModel


class Scenario(PublicModel):
    """A question, how far its answer is, and the answer. An answered one is never changed: asking again makes another.

    `params`: source (pool or trace), from and until (days of the billing zone), flavour, changes. `jobs` and `quotas`
    are a recorded workload as compressed CSV, with source trace. `result`: for each side (recorded, a, b) its figures
    as integers: milliseconds, GPU-milliseconds, micro currency.
    """

    class State(models.TextChoices):
        QUEUED = "queued", pgettext_lazy("what-if", "Waiting")
        RUNNING = "running", pgettext_lazy("what-if", "Being played")
        READY = "ready", pgettext_lazy("what-if", "Ready")
        FAILED = "failed", pgettext_lazy("what-if", "Failed")

    name = models.CharField(max_length=120)
    owner = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.PROTECT, related_name="scenarios")
    shared = models.BooleanField(default=False)
    params = models.JSONField(default=dict)
    jobs = models.BinaryField(null=True)
    quotas = models.BinaryField(null=True)
    state = models.CharField(max_length=10, choices=State.choices, default=State.QUEUED)
    done = models.BigIntegerField(default=0)
    total = models.BigIntegerField(default=0)
    seconds = models.FloatField(null=True, blank=True)
    result = models.JSONField(default=dict)
    error_code = models.CharField(max_length=64, blank=True)
    beat_at = models.DateTimeField(null=True, blank=True, help_text="last sign of life of the worker")
    ready_at = models.DateTimeField(null=True, blank=True)
    removed_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        indexes = [
            models.Index(fields=["owner", "-id"], name="scenario_owner"),
            models.Index(
                fields=["state"], name="scenario_open", condition=Q(state__in=["queued", "running"])
            ),
        ]

    def __str__(self) -> str:
        return self.ref

    @property
    def ref(self) -> str:
        """The reference for people."""
        return f"W-{self.pk}"
