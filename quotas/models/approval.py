"""Approvals: policy as data, steps as rows, delegation with dates."""

from __future__ import annotations

from django.conf import settings
from django.db import models
from django.db.models import F, Q
from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy

from portal.kernel.clock import now
from portal.kernel.models import PublicModel
from quotas.models.grant import QuotaChange
from quotas.models.request import CapacityRequest


class ApprovalPolicy(PublicModel):
    """A version of the approval rules; the newest active one is in force. `rules` is judged by
    quotas.engine.approval."""

    name = models.CharField(max_length=80)
    rules = models.JSONField(default=list)
    active = models.BooleanField(default=False)
    published_at = models.DateTimeField(null=True, blank=True)
    published_by_name = models.CharField(max_length=200, blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["active"], condition=Q(active=True), name="approval_policy_one_active"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.name} v{self.pk}"


class ApprovalStep(PublicModel):
    """One decision that a request or quota change needs. Steps are taken in order of `position`.

    `requester` is copied here so that the database itself can forbid self-approval.
    """

    class State(models.TextChoices):
        WAITING = "waiting", _("Waiting for an earlier step")
        OPEN = "open", pgettext_lazy("step", "Open")
        APPROVED = "approved", _("Approved")
        RETURNED = "returned", _("Returned")
        REJECTED = "rejected", _("Rejected")
        SKIPPED = "skipped", _("Not needed any more")

    request = models.ForeignKey(
        CapacityRequest, on_delete=models.PROTECT, null=True, blank=True, related_name="steps"
    )
    quota_change = models.ForeignKey(
        QuotaChange, on_delete=models.PROTECT, null=True, blank=True, related_name="steps"
    )
    requester = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.PROTECT, related_name="+")
    round = models.PositiveSmallIntegerField(default=1, help_text="a changed request starts a new round")
    position = models.PositiveSmallIntegerField()
    role = models.CharField(max_length=16, help_text="lead, pool_admin or finance")
    department = models.ForeignKey(
        "accounts.Department", on_delete=models.PROTECT, null=True, blank=True, related_name="+"
    )
    state = models.CharField(max_length=10, choices=State.choices, default=State.WAITING)
    rule = models.CharField(max_length=80, blank=True)
    timeout_hours = models.PositiveSmallIntegerField(default=24)
    opened_at = models.DateTimeField(null=True, blank=True)
    due_at = models.DateTimeField(null=True, blank=True)
    reminded_at = models.DateTimeField(null=True, blank=True)
    escalated_at = models.DateTimeField(null=True, blank=True)
    decided_at = models.DateTimeField(null=True, blank=True)
    decided_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.PROTECT, null=True, blank=True, related_name="decisions"
    )
    on_behalf_of = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.PROTECT, null=True, blank=True, related_name="+"
    )
    comment = models.TextField(blank=True)
    changed_to = models.JSONField(default=dict, help_text="amount changed by the approver")

    class Meta:
        constraints = [
            models.CheckConstraint(
                condition=Q(decided_by=None) | ~Q(decided_by=F("requester")), name="step_never_by_requester"
            ),
            models.CheckConstraint(
                condition=Q(on_behalf_of=None) | ~Q(on_behalf_of=F("requester")),
                name="step_never_for_requester",
            ),
            models.CheckConstraint(
                condition=Q(request__isnull=False, quota_change=None)
                | Q(request=None, quota_change__isnull=False),
                name="step_of_one_thing",
            ),
            models.UniqueConstraint(
                fields=["request", "round", "position"],
                condition=Q(request__isnull=False),
                name="step_position",
            ),
            models.CheckConstraint(
                condition=Q(state__in=["approved", "returned", "rejected"], decided_at__isnull=False)
                | Q(state__in=["waiting", "open", "skipped"], decided_by=None),
                name="step_decided_has_decider",
            ),
        ]
        indexes = [
            models.Index(fields=["role", "department", "id"], name="step_open", condition=Q(state="open")),
            models.Index(fields=["decided_by", "-decided_at"], name="step_decided"),
        ]

    def __str__(self) -> str:
        return f"step {self.position} of {self.request or self.quota_change}"


class Delegation(PublicModel):
    """`deputy` may decide in place of `principal` during the time, never on own requests."""

    principal = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.PROTECT, related_name="delegations"
    )
    deputy = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.PROTECT, related_name="deputy_of")
    starts_at = models.DateTimeField(default=now)
    ends_at = models.DateTimeField()
    revoked_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        constraints = [
            models.CheckConstraint(condition=~Q(principal=F("deputy")), name="delegation_to_another"),
            models.CheckConstraint(
                condition=Q(ends_at__gt=F("starts_at")), name="delegation_ends_after_start"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.principal} → {self.deputy}"
