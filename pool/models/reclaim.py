"""Taking back: cases with their steps, places kept for preemptors, modes of departments, what was only advised."""

from __future__ import annotations

from django.contrib.postgres.constraints import ExclusionConstraint
from django.contrib.postgres.fields import IntegerRangeField, RangeOperators
from django.db import models
from django.db.models import Q
from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy

from pool.models.allocation import Allocation
from pool.models.gpu import Gpu
from pool.models.maintenance import MaintenanceWindow
from pool.models.scheduling import SchedulerCycle
from portal.kernel.clock import now
from portal.kernel.models import PublicModel


class ReclaimRuleSet(PublicModel):
    """A version of the rules of taking back as data (pool/engine/ladder.py names them); one is active."""

    values = models.JSONField(default=dict)
    active = models.BooleanField(default=False)
    reason = models.TextField(blank=True)
    published_by_name = models.CharField(max_length=200, blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["active"], condition=Q(active=True), name="reclaim_rules_one_active"
            ),
        ]

    def __str__(self) -> str:
        return f"rules v{self.pk}"


class ReclaimCase(PublicModel):
    """One act of taking back: notice → grace → checkpoint → stop → seen free; each step stamped, with its rule.

    `step` moves along RECLAIM_ARROWS (pool/transitions.py). A case that was withdrawn took nothing.
    """

    class Cause(models.TextChoices):
        EXPIRED = "expired", _("Time is up")
        IDLE = "idle", _("Idle")
        OVER_QUOTA = "over_quota", _("Over quota")
        PREEMPTED = "preempted", _("Preempted")
        NODE_LOST = "node_lost", _("Node lost")
        REVOKED = "revoked", _("Revoked")
        RELEASED = "released", _("Released")
        MAINTENANCE = "maintenance", pgettext_lazy("cause", "Maintenance")
        SUSPENDED = "suspended", _("Holder suspended")

    class Step(models.TextChoices):
        NOTICE = "notice", _("Notice given")
        CHECKPOINT = "checkpoint", _("Writing a checkpoint")
        STOPPING = "stopping", _("Stopping")
        FREED = "freed", _("Seen free")
        FENCED = "fenced", _("Given up without being seen free")
        WITHDRAWN = "withdrawn", pgettext_lazy("reclaim", "Withdrawn")

    class Hook(models.TextChoices):
        NONE = "", _("none")
        SIGNAL = "signal", _("Signal")
        COMMAND = "command", _("Command")
        URL = "url", _("Web address")

    allocation = models.ForeignKey(Allocation, on_delete=models.PROTECT, related_name="reclaim_cases")
    cause = models.CharField(max_length=12, choices=Cause.choices)
    rule = models.CharField(max_length=64, blank=True)
    figures = models.JSONField(default=dict, help_text="the sums that the rule rests on")
    text = models.TextField(blank=True, help_text="the reason in the words of who ordered it")
    by_name = models.CharField(max_length=200, blank=True)
    rules = models.ForeignKey(ReclaimRuleSet, on_delete=models.PROTECT, null=True, blank=True)
    cycle = models.ForeignKey(
        SchedulerCycle, on_delete=models.PROTECT, null=True, blank=True, related_name="reclaim_cases"
    )
    for_request = models.ForeignKey(
        "quotas.CapacityRequest",
        on_delete=models.PROTECT,
        null=True,
        blank=True,
        related_name="displacements",
        help_text="the request that gets the places",
    )
    window = models.ForeignKey(
        MaintenanceWindow, on_delete=models.PROTECT, null=True, blank=True, related_name="cases"
    )
    members = models.JSONField(default=list, help_text="ranks that are taken alone; empty: all of it")
    requeue = models.BooleanField(default=False, help_text="its request goes back to its old place in line")
    step = models.CharField(max_length=10, choices=Step.choices, default=Step.NOTICE)
    noticed_at = models.DateTimeField(null=True, blank=True)
    grace_until = models.DateTimeField(null=True, blank=True)
    hook = models.CharField(max_length=8, choices=Hook.choices, default="", blank=True)
    hook_at = models.DateTimeField(null=True, blank=True, help_text="when the hook is due")
    checkpoint_at = models.DateTimeField(null=True, blank=True, help_text="the hook was ordered")
    checkpoint_done_at = models.DateTimeField(null=True, blank=True)
    checkpoint_result = models.JSONField(default=dict)
    stop_sent_at = models.DateTimeField(null=True, blank=True)
    stopped_at = models.DateTimeField(null=True, blank=True)
    seen_free_at = models.DateTimeField(null=True, blank=True)
    escalated_at = models.DateTimeField(null=True, blank=True)
    withdrawn_why = models.CharField(max_length=32, blank=True)
    closed_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["allocation"], condition=Q(closed_at=None), name="reclaim_one_open"
            ),
            models.CheckConstraint(
                condition=Q(closed_at=None) ^ Q(step__in=["freed", "fenced", "withdrawn"]),
                name="reclaim_closed_with_its_step",
            ),
        ]
        indexes = [
            models.Index(fields=["grace_until"], name="reclaim_open", condition=Q(closed_at=None)),
            models.Index(fields=["-id"], name="reclaim_newest"),
        ]

    def __str__(self) -> str:
        return f"{self.allocation} {self.cause}"

    @property
    def is_open(self) -> bool:
        """Whether it is still on its way."""
        return self.closed_at is None


class KeptPlace(PublicModel):
    """Places held for a preemptor (or for moved work) until it starts, leaves, or `until`. One open per request."""

    class End(models.TextChoices):
        STARTED = "started", _("It started")
        LEFT = "left", _("It left the queue")
        TIMED_OUT = "timed_out", _("Time ran out")
        REPLACED = "replaced", _("Planned anew")

    request = models.ForeignKey(
        "quotas.CapacityRequest", on_delete=models.PROTECT, related_name="kept_places"
    )
    moving = models.ForeignKey(
        Allocation,
        on_delete=models.PROTECT,
        null=True,
        blank=True,
        related_name="kept_places",
        help_text="consolidation: the allocation whose request starts here again",
    )
    cycle = models.ForeignKey(SchedulerCycle, on_delete=models.PROTECT, null=True, blank=True)
    members = models.JSONField(default=list, help_text="number, node, cpu_milli, memory_mib, takes")
    until = models.DateTimeField()
    ended_at = models.DateTimeField(null=True, blank=True)
    end_reason = models.CharField(max_length=10, choices=End.choices, blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["request"], condition=Q(ended_at=None), name="kept_one_open"),
        ]

    def __str__(self) -> str:
        return f"kept for {self.request_id} until {self.until:%H:%M}"


class KeptSpan(models.Model):
    """A part [from, to) of a card that is kept. No part of a card is kept for two at once."""

    id = models.BigAutoField(primary_key=True)
    kept = models.ForeignKey(KeptPlace, on_delete=models.PROTECT, related_name="spans")
    gpu = models.ForeignKey(Gpu, on_delete=models.PROTECT, related_name="kept_spans")
    span = IntegerRangeField()
    ended_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        constraints = [
            ExclusionConstraint(
                name="kept_span_never_twice",
                expressions=[("gpu", RangeOperators.EQUAL), ("span", RangeOperators.OVERLAPS)],
                condition=Q(ended_at=None),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.gpu_id} {self.span}"


class DepartmentMode(PublicModel):
    """How far taking back acts in a department and below it; without a department: in the installation.

    pilot says what it would do; roll-out acts on the willing (this department, or a request whose holder
    agreed); enforce acts. A department without a row, or without a mode, follows the nearest one above it. So does
    each of the two minimum run times that has no value; above all departments the policy has its own.
    """

    class Mode(models.TextChoices):
        PILOT = "pilot", _("Pilot")
        ROLLOUT = "rollout", _("Roll-out")
        ENFORCE = "enforce", _("Enforce")

    department = models.OneToOneField(
        "accounts.Department", on_delete=models.PROTECT, null=True, blank=True, related_name="reclaim_mode"
    )
    mode = models.CharField(max_length=8, choices=Mode.choices, default=Mode.ENFORCE, blank=True)
    min_run_preempt_s = models.PositiveIntegerField(
        null=True, blank=True, help_text="so long after its start work is not displaced within the department"
    )
    min_run_reclaim_s = models.PositiveIntegerField(
        null=True, blank=True, help_text="so long after its start owners take no work back"
    )
    willing = models.BooleanField(default=False, help_text="in roll-out: this department takes part")
    reason = models.TextField(blank=True)
    set_by_name = models.CharField(max_length=200, blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["department"], nulls_distinct=False, name="mode_once"),
        ]

    def __str__(self) -> str:
        return f"{self.department or '*'}: {self.mode}"

    @property
    def has_minimum(self) -> bool:
        """Whether it says for how long work is left alone after its start."""
        return self.min_run_preempt_s is not None or self.min_run_reclaim_s is not None


class ReclaimConsent(models.Model):
    """A request whose holder takes part while its department is in roll-out."""

    request = models.OneToOneField(
        "quotas.CapacityRequest", on_delete=models.PROTECT, primary_key=True, related_name="reclaim_consent"
    )
    at = models.DateTimeField(default=now)
    given_by_name = models.CharField(max_length=200, blank=True)

    def __str__(self) -> str:
        return f"{self.request_id}"


class ReclaimAdvice(PublicModel):
    """What would have been taken back, had the department's mode allowed it. The same advice again is counted."""

    allocation = models.ForeignKey(Allocation, on_delete=models.PROTECT, related_name="advice")
    cause = models.CharField(max_length=12, choices=ReclaimCase.Cause.choices)
    rule = models.CharField(max_length=64, blank=True)
    mode = models.CharField(max_length=8, choices=DepartmentMode.Mode.choices)
    for_request = models.ForeignKey(
        "quotas.CapacityRequest", on_delete=models.PROTECT, null=True, blank=True, related_name="+"
    )
    figures = models.JSONField(default=dict)
    first_at = models.DateTimeField(default=now)
    last_at = models.DateTimeField(default=now)
    times = models.PositiveIntegerField(default=1)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["allocation", "cause", "for_request"], nulls_distinct=False, name="advice_once"
            ),
        ]
        indexes = [models.Index(fields=["-last_at"], name="advice_newest")]

    def __str__(self) -> str:
        return f"{self.allocation} {self.cause} × {self.times}"


class IdleWatch(models.Model):
    """What is known of an allocation's idleness. `unknown` (no data) is never idle."""

    class State(models.TextChoices):
        BUSY = "busy", _("In use")
        IDLE = "idle", _("Idle")
        UNKNOWN = "unknown", _("Unknown")

    allocation = models.OneToOneField(
        Allocation, on_delete=models.PROTECT, primary_key=True, related_name="idle_watch"
    )
    state = models.CharField(max_length=8, choices=State.choices, default=State.UNKNOWN)
    idle_since = models.DateTimeField(null=True, blank=True)
    judged_at = models.DateTimeField(default=now)
    warned_at = models.DateTimeField(null=True, blank=True)
    excused_until = models.DateTimeField(null=True, blank=True, help_text="its holder said: still needed")
    excuses = models.PositiveSmallIntegerField(default=0)
    evidence = models.JSONField(default=dict)

    def __str__(self) -> str:
        return f"{self.allocation_id}: {self.state}"


class LayoutTask(PublicModel):
    """A drained card that is to be split anew (MIG). Closed when the card reports the wanted slices."""

    class State(models.TextChoices):
        OPEN = "open", _("To be done by hand")
        DONE = "done", pgettext_lazy("task", "Done")
        DROPPED = "dropped", _("No longer wanted")

    gpu = models.ForeignKey(Gpu, on_delete=models.PROTECT, related_name="layout_tasks")
    for_request = models.ForeignKey(
        "quotas.CapacityRequest", on_delete=models.PROTECT, null=True, blank=True, related_name="+"
    )
    cycle = models.ForeignKey(SchedulerCycle, on_delete=models.PROTECT, null=True, blank=True)
    profiles = models.JSONField(default=list, help_text="[profile, first memory slot] in order of slot")
    state = models.CharField(max_length=8, choices=State.choices, default=State.OPEN)
    closed_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["gpu"], condition=Q(state="open"), name="layout_one_open"),
        ]

    def __str__(self) -> str:
        return f"{self.gpu}: {self.profiles}"
