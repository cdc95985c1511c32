"""Reports that were run, saved, scheduled, and files being made of them."""

from __future__ import annotations

from django.conf import settings
from django.db import models
from django.db.models import Q
from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy

from portal.kernel.clock import now
from portal.kernel.models import PublicModel


class SavedReport(PublicModel):
    """A report's kind and parameters under a name; shared ones are seen by everybody who reads reports, each with
    their own departments. With a schedule it is sent to its receivers, each in their language.
    """

    class Every(models.TextChoices):
        NEVER = "", _("not sent")
        DAY = "day", _("every day")
        WEEK = "week", _("every Monday")
        MONTH = "month", _("on the first of the month")

    name = models.CharField(max_length=120)
    kind = models.CharField(max_length=24)
    params = models.JSONField(default=dict)
    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.PROTECT, related_name="saved_reports"
    )
    shared = models.BooleanField(default=False)
    every = models.CharField(max_length=8, choices=Every.choices, default=Every.NEVER, blank=True)
    receivers = models.ManyToManyField(settings.AUTH_USER_MODEL, blank=True, related_name="received_reports")
    next_at = models.DateTimeField(null=True, blank=True)
    removed_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["owner", "name"], condition=Q(removed_at=None), name="saved_report_name"
            ),
            models.CheckConstraint(
                condition=Q(every="", next_at=None) | (~Q(every="") & Q(next_at__isnull=False)),
                name="saved_report_schedule",
            ),
        ]
        indexes = [models.Index(fields=["next_at"], name="saved_report_due", condition=Q(removed_at=None))]

    def __str__(self) -> str:
        return self.name


class ReportRun(PublicModel):
    """A report as it was at one moment: its parameters, the ledger's mark, and every figure. Files made from it
    have the same bytes each time. Never changed.
    """

    kind = models.CharField(max_length=24)
    params = models.JSONField(default=dict)
    owner = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.PROTECT, related_name="report_runs")
    saved = models.ForeignKey(SavedReport, on_delete=models.PROTECT, null=True, related_name="runs")
    language = models.CharField(max_length=12)
    ledger_mark = models.BigIntegerField()
    made_at = models.DateTimeField(default=now)
    departments = models.JSONField(null=True, help_text="ids whose figures are in it; null: all")
    content = models.JSONField(help_text="columns, rows and head as they were")

    class Meta:
        indexes = [models.Index(fields=["owner", "-id"], name="report_run_owner")]

    def __str__(self) -> str:
        return f"RR-{self.pk}"

    @property
    def ref(self) -> str:
        """The reference for people."""
        return f"RR-{self.pk}"


class ExportJob(PublicModel):
    """A large file that a worker makes: `done` of `total` rows so far; gone after `expires_at`."""

    class State(models.TextChoices):
        QUEUED = "queued", pgettext_lazy("file", "Waiting")
        RUNNING = "running", pgettext_lazy("file", "Being made")
        READY = "ready", pgettext_lazy("file", "Ready")
        FAILED = "failed", pgettext_lazy("file", "Failed")
        EXPIRED = "expired", pgettext_lazy("file", "Expired")

    kind = models.CharField(max_length=24, help_text="lines_csv, lines_people, lines_xlsx, focus")
    params = models.JSONField(default=dict)
    owner = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.PROTECT, related_name="export_jobs")
    language = models.CharField(max_length=12)
    state = models.CharField(max_length=10, choices=State.choices, default=State.QUEUED)
    done = models.BigIntegerField(default=0)
    total = models.BigIntegerField(default=0)
    file_name = models.CharField(max_length=120, blank=True)
    size = models.BigIntegerField(default=0)
    error_code = models.CharField(max_length=64, blank=True)
    beat_at = models.DateTimeField(null=True, blank=True, help_text="last sign of life of the worker")
    ready_at = models.DateTimeField(null=True, blank=True)
    expires_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        indexes = [models.Index(fields=["owner", "-id"], name="export_job_owner")]

    def __str__(self) -> str:
        return f"X-{self.pk}"
