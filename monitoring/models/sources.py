"""Where telemetry is fetched from: exporters and Prometheus servers, set per cluster."""

from __future__ import annotations

from django.db import models
from django.db.models import F, Q
from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy

from pool.models import Cluster
from portal.kernel.models import PublicModel


class MetricSource(PublicModel):
    """One exporter (or one on each node of the cluster) or one Prometheus server, read each `every_s` seconds.

    Its secret is a sealed credential of the cluster; no page, answer, log or audit row shows it.
    """

    class Kind(models.TextChoices):
        EXPORTER = "exporter", _("Exporter (dcgm-exporter, nvidia_gpu_exporter)")
        PROMETHEUS = "prometheus", _("Prometheus server")

    class Auth(models.TextChoices):
        NONE = "none", pgettext_lazy("sign-in to a source", "None")
        BEARER = "bearer", _("Bearer token")
        BASIC = "basic", _("Name and password")

    name = models.CharField(_("name"), max_length=80, unique=True)
    cluster = models.ForeignKey(Cluster, on_delete=models.PROTECT, related_name="metric_sources")
    kind = models.CharField(max_length=12, choices=Kind.choices)
    url = models.CharField(
        max_length=500, help_text="{node} or {address} in it: one fetch for each node of the cluster"
    )
    query = models.CharField(
        max_length=500, blank=True, help_text="Prometheus: what to ask; empty: all of DCGM"
    )
    auth = models.CharField(max_length=8, choices=Auth.choices, default=Auth.NONE)
    username = models.CharField(max_length=120, blank=True)
    every_s = models.PositiveIntegerField(default=15)
    active = models.BooleanField(default=True)
    due_at = models.DateTimeField(null=True, blank=True)
    last_at = models.DateTimeField(null=True, blank=True)
    last_ok_at = models.DateTimeField(null=True, blank=True)
    last_code = models.CharField(max_length=32, blank=True, help_text="ok, or why the last fetch failed")
    last_facts = models.JSONField(default=dict, help_text="targets, cards, rows, refused, ms")

    class Meta:
        ordering = ["name", "id"]
        constraints = [
            models.CheckConstraint(
                condition=Q(every_s__gte=5) & Q(every_s__lte=3600), name="metric_source_every"
            ),
        ]
        indexes = [
            models.Index(
                F("due_at").asc(nulls_first=True), condition=Q(active=True), name="metric_source_due"
            )
        ]

    def __str__(self) -> str:
        return self.name


class SourceCard(models.Model):
    """What a source said last of a card, so that a change is one event: XIDs (pitfall P16)."""

    id = models.BigAutoField(primary_key=True)
    source = models.ForeignKey(MetricSource, on_delete=models.CASCADE, related_name="cards")
    gpu = models.ForeignKey("pool.Gpu", on_delete=models.CASCADE, related_name="source_cards")
    uuid = models.CharField(
        max_length=80, blank=True, help_text="the card's own UUID, where the inventory has a made-up one"
    )
    seen_at = models.DateTimeField()
    xid = models.IntegerField(null=True, help_text="the gauge of the last XID; never cleared by the exporter")
    workloads = models.JSONField(
        default=list, help_text="namespace, pod, container or job that its rows named"
    )
    xid_counts = models.JSONField(default=dict, help_text="XID → count in the exporter's window")

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["source", "gpu"], name="source_card_once"),
            models.UniqueConstraint(
                fields=["source", "uuid"], condition=~Q(uuid=""), name="source_card_uuid_once"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.source_id} {self.gpu_id}"
