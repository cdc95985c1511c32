"""GPUs and their MIG slices. A GPU is its UUID, never its index."""

from __future__ import annotations

from django.db import models
from django.db.models import Q
from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy

from pool.models.place import Node
from portal.kernel.models import PublicModel


class Gpu(PublicModel):
    """A physical card. Imported ones carry a made-up UUID (`IMPORT-…`) until an agent reports the real one."""

    class Condition(models.TextChoices):
        OK = "ok", _("Healthy")
        SUSPECT = "suspect", pgettext_lazy("GPU", "Suspect")
        FAULT = "fault", _("Fault")
        VANISHED = "vanished", _("Vanished")
        RETIRED = "retired", _("Retired")

    uuid = models.CharField(max_length=80, unique=True)
    node = models.ForeignKey(Node, on_delete=models.PROTECT, related_name="gpus")
    flavour = models.ForeignKey("quotas.GpuFlavour", on_delete=models.PROTECT, null=True, related_name="gpus")
    index = models.PositiveSmallIntegerField(help_text="as the driver counts now; for reading only")
    model_name = models.CharField(max_length=120)
    serial = models.CharField(max_length=64, blank=True)
    pci_bus_id = models.CharField(max_length=32, blank=True)
    memory_mib = models.PositiveIntegerField(default=0)
    power_limit_mw = models.PositiveIntegerField(null=True)
    nvlink = models.JSONField(default=dict, help_text="links, peers (UUIDs)")
    pcie = models.JSONField(default=dict, help_text="gen, width")
    numa_node = models.SmallIntegerField(null=True)
    mig_enabled = models.BooleanField(default=False)
    condition = models.CharField(max_length=10, choices=Condition.choices, default=Condition.OK)
    condition_reason = models.CharField(max_length=64, blank=True, help_text="code, e.g. xid_79")
    condition_since = models.DateTimeField(null=True, blank=True)
    cordoned = models.BooleanField(default=False, help_text="by people, or by a finding")
    cordon_reason = models.TextField(blank=True)
    foreign_use = models.JSONField(default=list, help_text="processes seen without a lease")
    seen_free_at = models.DateTimeField(null=True, blank=True)
    last_seen_at = models.DateTimeField(null=True, blank=True)
    simulated = models.BooleanField(default=False)

    class Meta:
        ordering = ["node_id", "index", "id"]
        indexes = [
            models.Index(fields=["node", "index"], name="gpu_node"),
            models.Index(fields=["flavour"], name="gpu_flavour"),
        ]

    def __str__(self) -> str:
        return f"{self.node.name} GPU {self.index}"


class MigSlice(PublicModel):
    """A MIG instance on a card: `start` and `size` are memory slots. Gone ones are kept with `gone_at`."""

    gpu = models.ForeignKey(Gpu, on_delete=models.PROTECT, related_name="mig_slices")
    uuid = models.CharField(max_length=120)
    profile = models.CharField(max_length=24)
    gpu_instance = models.PositiveSmallIntegerField()
    compute_instance = models.PositiveSmallIntegerField(default=0)
    start = models.PositiveSmallIntegerField()
    size = models.PositiveSmallIntegerField()
    compute_slices = models.PositiveSmallIntegerField(default=1)
    memory_mib = models.PositiveIntegerField(default=0)
    gone_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["uuid"], condition=Q(gone_at=None), name="mig_slice_once"),
            models.CheckConstraint(
                condition=Q(size__gte=1) & Q(start__lte=16) & Q(size__lte=16), name="mig_slice_geometry"
            ),
        ]
        ordering = ["gpu_id", "start"]

    def __str__(self) -> str:
        return f"{self.profile}@{self.start}"

    @property
    def end(self) -> int:
        """One past the last memory slot."""
        return self.start + self.size
