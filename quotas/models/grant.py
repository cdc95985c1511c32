"""Quotas: what a department may have of a flavour, and the counters that say how much it has.

Null means unlimited, 0 means none, negatives are refused. All amounts are milli-GPU.
"""

from __future__ import annotations

from django.conf import settings
from django.contrib.postgres.constraints import ExclusionConstraint
from django.contrib.postgres.fields import DateTimeRangeField, RangeOperators
from django.db import models
from django.db.models import F, Q
from django.utils.translation import gettext_lazy as _

from portal.kernel.models import PublicModel
from quotas.models.flavour import GpuFlavour


def _not_negative(*names: str) -> Q:
    condition = Q()
    for name in names:
        condition &= Q(**{f"{name}__isnull": True}) | Q(**{f"{name}__gte": 0})
    return condition


class QuotaGrant(PublicModel):
    """The numbers of one department and flavour during a time; one grant at a time (exclusion)."""

    department = models.ForeignKey("accounts.Department", on_delete=models.PROTECT, related_name="grants")
    flavour = models.ForeignKey(GpuFlavour, on_delete=models.PROTECT, related_name="grants")
    guaranteed = models.BigIntegerField(default=0)
    borrow_limit = models.BigIntegerField(null=True, blank=True)
    lend_limit = models.BigIntegerField(null=True, blank=True)
    hard_cap = models.BigIntegerField(null=True, blank=True)
    weight = models.PositiveIntegerField(default=1)
    during = DateTimeRangeField()
    lent_from = models.ForeignKey(
        "self", on_delete=models.PROTECT, null=True, blank=True, related_name="lendings"
    )
    granted_by_name = models.CharField(max_length=200, blank=True)
    reason = models.TextField(blank=True)

    class Meta:
        constraints = [
            ExclusionConstraint(
                name="grant_one_at_a_time",
                expressions=[
                    ("department", RangeOperators.EQUAL),
                    ("flavour", RangeOperators.EQUAL),
                    ("during", RangeOperators.OVERLAPS),
                ],
            ),
            models.CheckConstraint(
                condition=Q(guaranteed__gte=0) & _not_negative("borrow_limit", "lend_limit", "hard_cap"),
                name="grant_not_negative",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.department} {self.flavour}"


class QuotaUsage(models.Model):
    """Counters of one department and flavour, with the limits now in force on the same row.

    `direct` is what was booked for this very department, `total` all use in the subtree, `charged` what
    reached this node (BEHAVIOUR 4's U), the two `…noninterruptible` their parts that may not be reclaimed.
    `direct` is the source; the others follow from it and from the tree, so that a moved department carries
    its use along. `granted` tells that a grant is in force; without one the guarantee is the children's sum.
    Changed only under row locks taken root → leaf (quotas/services/usage.py).
    """

    id = models.BigAutoField(primary_key=True)
    department = models.ForeignKey("accounts.Department", on_delete=models.PROTECT, related_name="usage_rows")
    flavour = models.ForeignKey(GpuFlavour, on_delete=models.PROTECT, related_name="usage_rows")
    direct = models.BigIntegerField(default=0)
    direct_noninterruptible = models.BigIntegerField(default=0)
    charged = models.BigIntegerField(default=0)
    total = models.BigIntegerField(default=0)
    total_noninterruptible = models.BigIntegerField(default=0)
    guaranteed = models.BigIntegerField(default=0)
    borrow_limit = models.BigIntegerField(null=True)
    lend_limit = models.BigIntegerField(null=True)
    hard_cap = models.BigIntegerField(null=True)
    weight = models.PositiveIntegerField(default=1)
    granted = models.BooleanField(default=False)
    updated_at = models.DateTimeField()

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["department", "flavour"], name="usage_once"),
            models.CheckConstraint(
                condition=Q(charged__gte=0)
                & Q(direct_noninterruptible__gte=0)
                & Q(direct__gte=F("direct_noninterruptible"))
                & Q(total__gte=0)
                & Q(total_noninterruptible__gte=0)
                & Q(total_noninterruptible__lte=F("total"))
                & Q(guaranteed__gte=0)
                & _not_negative("borrow_limit", "lend_limit", "hard_cap"),
                name="usage_not_negative",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.department_id}/{self.flavour_id}: {self.total}"


class UserLimit(PublicModel):
    """Limits of one person (or, with no person, of everybody): null means unlimited."""

    user = models.OneToOneField(settings.AUTH_USER_MODEL, on_delete=models.PROTECT, null=True, blank=True)
    gpus_at_once_milli = models.BigIntegerField(null=True, blank=True)
    longest_lease_s = models.BigIntegerField(null=True, blank=True)
    gpu_ms_per_month = models.BigIntegerField(null=True, blank=True)
    money_micro_per_month = models.BigIntegerField(null=True, blank=True)
    waiting_at_once = models.PositiveIntegerField(null=True, blank=True, help_text="requests that wait")
    running_at_once = models.PositiveIntegerField(null=True, blank=True, help_text="requests that hold GPUs")

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["user"], nulls_distinct=False, name="user_limit_once"),
            models.CheckConstraint(
                condition=_not_negative(
                    "gpus_at_once_milli", "longest_lease_s", "gpu_ms_per_month", "money_micro_per_month"
                ),
                name="user_limit_not_negative",
            ),
        ]

    def __str__(self) -> str:
        return str(self.user or "*")


class AskRule(PublicModel):
    """What a department lets its people choose; holds for its subtree unless a lower one says otherwise."""

    department = models.OneToOneField(
        "accounts.Department", on_delete=models.PROTECT, related_name="ask_rule"
    )
    priority_most = models.PositiveSmallIntegerField(default=100, help_text="highest priority, 0 to 100")

    class Meta:
        constraints = [
            models.CheckConstraint(condition=Q(priority_most__lte=100), name="ask_rule_priority"),
        ]

    def __str__(self) -> str:
        return f"{self.department}: {self.priority_most}"


class QuotaChange(PublicModel):
    """A department's ask for other numbers, or a lending between departments for a time.

    Approved through the same ApprovalStep rows as a capacity request. What was asked, what was granted, old
    and new numbers stay readable forever.
    """

    class State(models.TextChoices):
        IN_APPROVAL = "in_approval", _("In approval")
        RETURNED = "returned", _("Returned")
        APPROVED = "approved", _("Approved")
        REJECTED = "rejected", _("Rejected")
        WITHDRAWN = "withdrawn", _("Withdrawn")

    department = models.ForeignKey(
        "accounts.Department", on_delete=models.PROTECT, related_name="quota_changes"
    )
    flavour = models.ForeignKey(GpuFlavour, on_delete=models.PROTECT)
    requester = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.PROTECT, related_name="quota_changes"
    )
    last_editor = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.PROTECT, null=True, blank=True, related_name="+"
    )
    state = models.CharField(max_length=12, choices=State.choices, default=State.IN_APPROVAL)
    lender = models.ForeignKey(
        "accounts.Department", on_delete=models.PROTECT, null=True, blank=True, related_name="lendings_asked"
    )
    starts_at = models.DateTimeField(null=True, blank=True)
    ends_at = models.DateTimeField(null=True, blank=True)
    old = models.JSONField(default=dict)
    asked = models.JSONField(default=dict)
    granted = models.JSONField(default=dict)
    purpose = models.TextField()
    decided_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        indexes = [models.Index(fields=["state", "-id"], name="quota_change_state")]

    def __str__(self) -> str:
        return f"Q-{self.pk} {self.department} {self.flavour}"
