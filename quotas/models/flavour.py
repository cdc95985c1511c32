"""GPU flavours on offer, and how much of each exists (told by pool)."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from portal.kernel.models import PublicModel


class GpuFlavour(PublicModel):
    """What people ask for, e.g. `H800-80GB`. Quotas, prices and capacity are kept per flavour.

    `model_key` names the catalogue row (quotas/data/catalogue.json), whose facts are copied here when the
    flavour is made, so that a later catalogue never changes what was promised.
    """

    code = models.CharField(_("code"), max_length=48, unique=True)
    name = models.CharField(_("name"), max_length=120)
    model_key = models.CharField(_("catalogue model"), max_length=64, blank=True)
    memory_mib = models.PositiveIntegerField(_("memory per GPU, MiB"))
    architecture = models.CharField(max_length=32, blank=True)
    mig_capable = models.BooleanField(default=False)
    mig_table = models.CharField(max_length=32, blank=True, help_text="key in the table of MIG profiles")
    nvlink = models.BooleanField(default=False)
    fp8 = models.BooleanField(default=False)
    compute_slices = models.PositiveSmallIntegerField(
        default=0, help_text="MIG compute slices of a card, 0: none"
    )
    memory_slices = models.PositiveSmallIntegerField(default=0)
    tdp_w = models.PositiveIntegerField(null=True, blank=True)
    active = models.BooleanField(_("on offer"), default=True)
    position = models.PositiveIntegerField(default=0)

    class Meta:
        ordering = ["position", "name", "id"]

    def __str__(self) -> str:
        return self.name


class FlavourCapacity(models.Model):
    """Installed and healthy capacity of a flavour in milli-GPU, written by pool's services."""

    id = models.BigAutoField(primary_key=True)
    flavour = models.OneToOneField(GpuFlavour, on_delete=models.PROTECT, related_name="capacity")
    installed_milli = models.BigIntegerField(default=0)
    healthy_milli = models.BigIntegerField(default=0)
    largest_node_gpus = models.PositiveIntegerField(
        default=0, help_text="most GPUs of this flavour on one node"
    )
    cuda_max = models.CharField(
        max_length=16, blank=True, help_text="newest CUDA that a node runs; empty: not told"
    )
    facts = models.JSONField(
        default=dict,
        help_text="what its nodes offer: sites{code: nodes}, fabrics{kind: Gbit/s}, storage[], "
        "levels{row, rack, switch: most nodes in one}, driver",
    )
    updated_at = models.DateTimeField()

    class Meta:
        constraints = [
            models.CheckConstraint(
                condition=models.Q(installed_milli__gte=0)
                & models.Q(healthy_milli__gte=0)
                & models.Q(healthy_milli__lte=models.F("installed_milli")),
                name="capacity_sane",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.flavour}: {self.healthy_milli}/{self.installed_milli}"


class PoolName(models.Model):
    """A thing of the pool that a request may name: a site or a data set. Written by pool's services."""

    class Kind(models.TextChoices):
        SITE = "site", _("Site")
        DATASET = "dataset", _("Data set")

    id = models.BigAutoField(primary_key=True)
    kind = models.CharField(max_length=8, choices=Kind.choices)
    code = models.CharField(max_length=80)
    name = models.CharField(max_length=200, blank=True)
    department = models.ForeignKey(
        "accounts.Department", on_delete=models.PROTECT, null=True, blank=True, related_name="+"
    )
    facts = models.JSONField(default=dict, help_text="data set: size_gib and where it lies")
    active = models.BooleanField(default=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["kind", "code"], name="pool_name_once")]

    def __str__(self) -> str:
        return self.name or self.code
