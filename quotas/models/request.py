"""Capacity requests: who asks for what, for how long, and where the ask stands."""

from __future__ import annotations

from django.conf import settings
from django.db import models
from django.db.models import Q
from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy

from portal.kernel.clock import now
from portal.kernel.models import PublicModel
from quotas.models.flavour import GpuFlavour


class CapacityRequest(PublicModel):
    """One ask. Its reference for people is `R-<id>`.

    Shape: `gpus_per_node × nodes` whole GPUs, or a fraction (`fraction_milli`, `fraction_mib`) of each, or
    `mig_profile × mig_count`. `charge_milli` is the total charge by BEHAVIOUR 4, fixed when the flavour is
    chosen. `options` are the flavours (codes, in order) that the requirement resolves to.
    """

    class State(models.TextChoices):
        DRAFT = "draft", _("Draft")
        IN_APPROVAL = "in_approval", _("In approval")
        RETURNED = "returned", _("Returned")
        NEEDS_CONSENT = "needs_consent", _("Waiting for your consent")
        QUEUED = "queued", _("Queued")
        ALLOCATED = "allocated", _("Allocated")
        SERIES = "series", _("Under way")
        ENDED = "ended", _("Ended")
        REJECTED = "rejected", _("Rejected")
        WITHDRAWN = "withdrawn", _("Withdrawn")

    class Series(models.TextChoices):
        NONE = "", _("Single")
        ARRAY = "array", _("Job array")
        WINDOW = "window", _("Recurring window")
        SERVICE = "service", _("Service with replicas")

    class Level(models.TextChoices):
        ANY = "", _("Anywhere")
        ROW = "row", pgettext_lazy("place", "Row")
        RACK = "rack", _("Rack")
        SWITCH = "switch", _("Switch")

    class Fabric(models.TextChoices):
        ANY = "", _("Any network")
        NVLINK = "nvlink", "NVLink"
        INFINIBAND = "infiniband", "InfiniBand"
        ROCE = "roce", "RoCE"
        ETHERNET = "ethernet", "Ethernet"

    class ScaleBy(models.TextChoices):
        FIXED = "fixed", _("Always the same")
        TIMETABLE = "timetable", _("Weekly timetable")
        SIGNAL = "signal", pgettext_lazy("scaling", "Signal")

    class AfterFailed(models.TextChoices):
        WITHDRAW = "withdraw", _("withdraw this one too")
        WAIT = "wait", _("keep it waiting for me to decide")

    class Shape(models.TextChoices):
        WHOLE = "whole", _("Whole GPUs")
        FRACTION = "fraction", _("Fraction of a GPU")
        MIG = "mig", _("MIG slices")
        CPU = "cpu", _("No GPU (test of a node)")

    class WorkClass(models.TextChoices):
        TRAINING = "training", _("Training (throughput)")
        INFERENCE = "inference", _("Inference (latency)")
        INTERACTIVE = "interactive", _("Interactive")

    class RunKind(models.TextChoices):
        COMMAND = "command", _("Command")
        IMAGE = "image", _("Container image")
        HOLD = "hold", _("Hold: I work on the GPU myself")
        ADOPTED = "adopted", _("Work that ran there before the pool took it in")

    RUN_KINDS_ASKED: tuple[str, ...] = (RunKind.COMMAND.value, RunKind.IMAGE.value, RunKind.HOLD.value)
    """What people can ask for; what runs already is taken in by ``pool.services.adoption`` and never started here."""

    requester = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.PROTECT, related_name="requests")
    last_editor = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.PROTECT, null=True, blank=True, related_name="+"
    )
    department = models.ForeignKey("accounts.Department", on_delete=models.PROTECT, related_name="requests")
    client_token = models.CharField(max_length=64, blank=True)
    cloned_from = models.ForeignKey(
        "self", on_delete=models.PROTECT, null=True, blank=True, related_name="clones"
    )
    state = models.CharField(max_length=14, choices=State.choices, default=State.DRAFT)
    state_since = models.DateTimeField(default=now)
    end_reason = models.CharField(max_length=32, blank=True, help_text="how it ended, e.g. expired, released")

    # What is asked
    flavour = models.ForeignKey(
        GpuFlavour, on_delete=models.PROTECT, null=True, blank=True, related_name="requests"
    )
    requirement = models.JSONField(
        default=dict,
        help_text="memory_mib, models[], nvlink, mig, fp8, driver: used where no flavour is named",
    )
    options = models.JSONField(default=list)
    shape = models.CharField(max_length=10, choices=Shape.choices, default=Shape.WHOLE)
    gpus_per_node = models.PositiveIntegerField(default=1)
    nodes = models.PositiveIntegerField(default=1)
    fraction_milli = models.PositiveIntegerField(null=True, blank=True)
    fraction_mib = models.PositiveIntegerField(null=True, blank=True)
    mig_profile = models.CharField(max_length=24, blank=True)
    mig_count = models.PositiveIntegerField(default=0)
    charge_milli = models.BigIntegerField(default=0)
    cpu_milli = models.PositiveIntegerField(default=0, help_text="per node; 0: share of the node by GPUs")
    memory_mib = models.PositiveIntegerField(default=0, help_text="per node; 0: share of the node by GPUs")
    start_at = models.DateTimeField(null=True, blank=True, help_text="null: as soon as possible")
    duration_s = models.PositiveIntegerField(null=True, blank=True, help_text="null only for a service")
    is_service = models.BooleanField(default=False)
    review_at = models.DateTimeField(null=True, blank=True)
    replicas_min = models.PositiveIntegerField(default=1)
    replicas_max = models.PositiveIntegerField(default=1)
    work_class = models.CharField(max_length=12, choices=WorkClass.choices, default=WorkClass.TRAINING)
    priority = models.PositiveSmallIntegerField(
        default=50, help_text="0 to 100, higher first, within the department"
    )
    interruptible = models.BooleanField(default=True)
    site_code = models.CharField(max_length=48, blank=True)
    datasets = models.JSONField(default=list)
    cost_code = models.CharField(max_length=48, blank=True)
    purpose = models.TextField(blank=True)

    # Limits in time and place
    nodes_min = models.PositiveIntegerField(
        null=True, blank=True, help_text="elastic: starts with at least so many nodes; null: with all"
    )
    deadline_at = models.DateTimeField(null=True, blank=True, help_text="must be finished by then")
    end_at = models.DateTimeField(
        null=True, blank=True, help_text="end of a reserved window, whenever its work began"
    )
    fabric = models.CharField(max_length=12, choices=Fabric.choices, blank=True)
    fabric_gbit_s = models.PositiveIntegerField(default=0, help_text="at least, per node")
    storage = models.CharField(max_length=24, blank=True, help_text="kind that each node must have")
    domain_required = models.CharField(max_length=8, choices=Level.choices, blank=True)
    domain_preferred = models.CharField(max_length=8, choices=Level.choices, blank=True)
    stage_datasets = models.BooleanField(
        default=True, help_text="other nodes may get the data sets copied first"
    )

    # Several in one: an approved head (state SERIES) and its members, each a request of the queue
    series = models.CharField(max_length=8, choices=Series.choices, blank=True)
    head = models.ForeignKey("self", on_delete=models.PROTECT, null=True, blank=True, related_name="members")
    member_index = models.PositiveIntegerField(
        null=True, blank=True, help_text="array index, day number of an occurrence, or replica number"
    )
    array_count = models.PositiveIntegerField(default=0)
    array_at_once = models.PositiveIntegerField(default=0, help_text="members that may run at once")
    window = models.JSONField(default=dict, help_text="days, from, to, zone, first, until, skip")
    scale_by = models.CharField(max_length=10, choices=ScaleBy.choices, default=ScaleBy.FIXED)
    timetable = models.JSONField(default=dict, help_text="zone and replicas by weekday and hour")
    signal_per_replica = models.PositiveIntegerField(default=1)
    signal_value = models.PositiveIntegerField(null=True, blank=True)
    signal_at = models.DateTimeField(null=True, blank=True)
    signal_peak = models.JSONField(default=list, help_text="lately wanted replicas with their times")
    replicas_wanted = models.PositiveIntegerField(null=True, blank=True)
    health = models.JSONField(default=dict, help_text="kind, path, port or command, every_s, failures")
    review_span_s = models.PositiveIntegerField(
        null=True, blank=True, help_text="time to the review date as approved: one renewal at most"
    )
    held = models.CharField(
        max_length=16, blank=True, help_text="queued but not in line yet: dependency, failed, array"
    )
    after_failed = models.CharField(max_length=8, choices=AfterFailed.choices, default=AfterFailed.WITHDRAW)
    let_go_at = models.DateTimeField(null=True, blank=True, help_text="when the pool was asked to end it")
    let_go_cause = models.CharField(max_length=32, blank=True)

    # What is run
    run_kind = models.CharField(max_length=8, choices=RunKind.choices, default=RunKind.COMMAND)
    command = models.TextField(blank=True)
    image = models.CharField(max_length=300, blank=True)
    environment = models.JSONField(default=dict)
    checkpoint = models.JSONField(default=dict, help_text="signal, command or url, and seconds it needs")
    cuda_min = models.CharField(max_length=16, blank=True)

    # Where it stands
    submitted_at = models.DateTimeField(null=True, blank=True)
    decided_at = models.DateTimeField(null=True, blank=True)
    queued_at = models.DateTimeField(null=True, blank=True, help_text="keeps its place after a lost node")
    ended_at = models.DateTimeField(null=True, blank=True)
    consent_change = models.JSONField(default=dict, help_text="amount proposed by an approver, until agreed")
    cost_at_most_micro = models.BigIntegerField(null=True, blank=True)
    policy_rule = models.CharField(max_length=80, blank=True, help_text="approval rule that matched")
    over_quota = models.BooleanField(default=False, help_text="needed borrowing when it was judged")

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["requester", "client_token"],
                condition=~Q(client_token=""),
                name="request_once_per_token",
            ),
            models.CheckConstraint(
                condition=Q(gpus_per_node__lte=64) & Q(nodes__lte=4096), name="request_size"
            ),
            models.CheckConstraint(
                condition=Q(nodes__gte=1)
                & (
                    Q(shape="cpu")
                    | Q(shape="mig", mig_count__gte=1)
                    | Q(shape__in=["whole", "fraction"], gpus_per_node__gte=1)
                ),
                name="request_asks_something",
            ),
            models.CheckConstraint(
                condition=Q(fraction_milli=None) | Q(fraction_milli__gte=1, fraction_milli__lte=1000),
                name="request_fraction",
            ),
            models.CheckConstraint(condition=Q(charge_milli__gte=0), name="request_charge"),
            models.CheckConstraint(
                condition=Q(nodes_min=None) | Q(nodes_min__gte=1, nodes_min__lte=models.F("nodes")),
                name="request_elastic",
            ),
            models.CheckConstraint(
                condition=Q(end_at=None) | Q(start_at=None) | Q(end_at__gt=models.F("start_at")),
                name="request_window_forward",
            ),
            models.CheckConstraint(
                condition=Q(head=None, member_index=None)
                | Q(head__isnull=False, member_index__isnull=False, series=""),
                name="request_member",
            ),
            models.UniqueConstraint(
                fields=["head", "member_index"],
                condition=Q(state__in=["queued", "allocated"]),
                name="request_member_once",
            ),
        ]
        indexes = [
            models.Index(fields=["requester", "-id"], name="request_requester"),
            models.Index(fields=["department", "-id"], name="request_department"),
            models.Index(fields=["queued_at", "id"], name="request_queue", condition=Q(state="queued")),
            models.Index(fields=["state", "-id"], name="request_state"),
            models.Index(
                fields=["head", "member_index"], name="request_members", condition=Q(head__isnull=False)
            ),
        ]

    def __str__(self) -> str:
        return self.ref

    @property
    def ref(self) -> str:
        """The reference for people."""
        return f"R-{self.pk}"

    @property
    def total_gpus(self) -> int:
        """Physical devices touched at most (a MIG ask counts its slices)."""
        if self.shape == self.Shape.CPU:
            return 0
        return self.mig_count if self.shape == self.Shape.MIG else self.gpus_per_node * self.nodes


class RequestDependency(models.Model):
    """``request`` waits until ``on`` has ended: well (it finished, or its time was used up), or in any way.

    A series counts as ended when all its members are. No cycles: a request can only wait for older ones,
    or for those that do not wait for it, which the service checks under locks.
    """

    class Kind(models.TextChoices):
        OK = "ok", _("ended well")
        ANY = "any", _("ended in any way")

    id = models.BigAutoField(primary_key=True)
    request = models.ForeignKey(CapacityRequest, on_delete=models.PROTECT, related_name="waits_for")
    on = models.ForeignKey(CapacityRequest, on_delete=models.PROTECT, related_name="awaited_by")
    kind = models.CharField(max_length=4, choices=Kind.choices, default=Kind.OK)
    met_at = models.DateTimeField(null=True, blank=True)
    failed_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["request", "on"], name="dependency_once"),
            models.CheckConstraint(condition=~Q(request=models.F("on")), name="dependency_not_self"),
        ]
        indexes = [
            models.Index(fields=["on"], name="dependency_open", condition=Q(met_at=None, failed_at=None))
        ]

    def __str__(self) -> str:
        return f"{self.request_id} after {self.on_id} ({self.kind})"


class RequestEvent(models.Model):
    """One line of a request's history: time, actor, act, figures, words. Written by the services."""

    id = models.BigAutoField(primary_key=True)
    request = models.ForeignKey(CapacityRequest, on_delete=models.PROTECT, related_name="events")
    at = models.DateTimeField(default=now)
    kind = models.CharField(
        max_length=32, help_text="submitted, changed, approved, queued, started, ended, …"
    )
    actor_name = models.CharField(max_length=200, blank=True)
    facts = models.JSONField(default=dict)
    text = models.TextField(blank=True)

    class Meta:
        indexes = [models.Index(fields=["request", "-id"], name="request_event")]

    def __str__(self) -> str:
        return f"{self.kind} {self.at:%H:%M}"
