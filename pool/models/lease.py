"""Leases: who holds which share of which GPU, when. The database itself forbids double booking."""

from __future__ import annotations

from django.contrib.postgres.constraints import ExclusionConstraint
from django.contrib.postgres.fields import DateTimeRangeField, IntegerRangeField, RangeOperators
from django.db import models
from django.db.models import Q

from pool.models.allocation import Allocation
from pool.models.gpu import Gpu, MigSlice
from portal.kernel.models import PublicModel


class Lease(PublicModel):
    """One allocation's holding of one GPU (whole, fraction, or one MIG slice). Reference: `L-<id>`.

    `charge` in milli-GPU is what quota and ledger count (BEHAVIOUR 4); charges of open leases on a card sum to
    at most 1000 (checked by the service under the GPU's lock, and by the spans below). Closed when the card was
    seen free.
    """

    allocation = models.ForeignKey(Allocation, on_delete=models.PROTECT, related_name="leases")
    member = models.PositiveSmallIntegerField(default=0)
    gpu = models.ForeignKey(Gpu, on_delete=models.PROTECT, related_name="leases")
    mig_slice = models.ForeignKey(
        MigSlice, on_delete=models.PROTECT, null=True, blank=True, related_name="leases"
    )
    charge = models.PositiveIntegerField()
    memory_mib = models.PositiveIntegerField(default=0, help_text="memory promised; 0: all of it")
    started_at = models.DateTimeField()
    ended_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        constraints = [
            models.CheckConstraint(condition=Q(charge__gte=1) & Q(charge__lte=1000), name="lease_charge"),
            models.UniqueConstraint(
                fields=["mig_slice"],
                condition=Q(ended_at=None, mig_slice__isnull=False),
                name="lease_slice_once",
            ),
        ]
        indexes = [
            models.Index(fields=["gpu"], name="lease_open", condition=Q(ended_at=None)),
            models.Index(fields=["gpu", "-started_at"], name="lease_history"),
        ]

    def __str__(self) -> str:
        return f"L-{self.pk}"


class LeaseSpan(models.Model):
    """A part [from, to) of a card's 1000 milli during a time. No two overlap on one card, ever.

    A whole card is [0, 1000); a fraction takes any free spans; MIG its memory slots scaled to 1000. `during`
    is open-ended until the card was seen free.
    """

    id = models.BigAutoField(primary_key=True)
    lease = models.ForeignKey(Lease, on_delete=models.PROTECT, related_name="spans")
    gpu = models.ForeignKey(Gpu, on_delete=models.PROTECT, related_name="spans")
    span = IntegerRangeField()
    during = DateTimeRangeField()

    class Meta:
        constraints = [
            ExclusionConstraint(
                name="lease_span_never_twice",
                expressions=[
                    ("gpu", RangeOperators.EQUAL),
                    ("span", RangeOperators.OVERLAPS),
                    ("during", RangeOperators.OVERLAPS),
                ],
            ),
            models.CheckConstraint(
                condition=Q(span__startswith__gte=0) & Q(span__endswith__lte=1000), name="lease_span_on_card"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.gpu_id} {self.span}"


class Reservation(PublicModel):
    """A planned window on GPUs of a node: for a request that starts later, or for maintenance."""

    request = models.ForeignKey(
        "quotas.CapacityRequest", on_delete=models.PROTECT, null=True, blank=True, related_name="reservations"
    )
    gpu = models.ForeignKey(Gpu, on_delete=models.PROTECT, related_name="reservations")
    span = IntegerRangeField()
    during = DateTimeRangeField()
    cancelled_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        constraints = [
            ExclusionConstraint(
                name="reservation_never_twice",
                expressions=[
                    ("gpu", RangeOperators.EQUAL),
                    ("span", RangeOperators.OVERLAPS),
                    ("during", RangeOperators.OVERLAPS),
                ],
                condition=Q(cancelled_at=None),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.gpu_id} {self.during}"
