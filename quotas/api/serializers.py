"""How things of this room look in the API. Amounts are integers: milli-GPU, milliseconds, micro currency;
times UTC.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rest_framework import serializers

from quotas.models import (
    ApprovalPolicy,
    ApprovalStep,
    CapacityRequest,
    Delegation,
    GpuFlavour,
    QuotaChange,
    RequestDependency,
    RequestEvent,
    UserLimit,
)
from quotas.selectors.catalogue import mig_table
from quotas.selectors.series import Progress, progress_of


class FlavourSerializer(serializers.ModelSerializer[GpuFlavour]):
    """A flavour on offer with what exists of it, its price now and its MIG profiles."""

    installed_milli = serializers.IntegerField(source="capacity.installed_milli", default=0)
    healthy_milli = serializers.IntegerField(source="capacity.healthy_milli", default=0)
    largest_node_gpus = serializers.IntegerField(source="capacity.largest_node_gpus", default=0)
    micro_per_gpu_hour = serializers.SerializerMethodField()
    mig_profiles = serializers.SerializerMethodField()

    class Meta:
        model = GpuFlavour
        fields = [
            "uid",
            "code",
            "name",
            "memory_mib",
            "architecture",
            "nvlink",
            "fp8",
            "mig_capable",
            "mig_profiles",
            "installed_milli",
            "healthy_milli",
            "largest_node_gpus",
            "micro_per_gpu_hour",
            "active",
            "version",
        ]

    def get_micro_per_gpu_hour(self, flavour: GpuFlavour) -> int | None:
        """The general price now; null when none is set."""
        prices: dict[int, int] = self.context.get("prices", {})
        return prices.get(flavour.pk)

    def get_mig_profiles(self, flavour: GpuFlavour) -> list[str]:
        """Names of the profiles that a card can be cut into."""
        table = mig_table(flavour.mig_table) if flavour.mig_capable else None
        return [profile.name for profile in table.profiles] if table is not None else []


class StepSerializer(serializers.ModelSerializer[ApprovalStep]):
    """One agreement that a request or quota change needs."""

    request = serializers.UUIDField(source="request.uid", default=None)
    quota_change = serializers.UUIDField(source="quota_change.uid", default=None)
    subject = serializers.SerializerMethodField()
    department = serializers.CharField(source="department.code", default=None)
    decided_by = serializers.CharField(source="decided_by.username", default=None)
    on_behalf_of = serializers.CharField(source="on_behalf_of.username", default=None)
    requester = serializers.CharField(source="requester.username")

    class Meta:
        model = ApprovalStep
        fields = [
            "uid",
            "subject",
            "request",
            "quota_change",
            "requester",
            "round",
            "position",
            "role",
            "department",
            "state",
            "rule",
            "opened_at",
            "due_at",
            "escalated_at",
            "decided_at",
            "decided_by",
            "on_behalf_of",
            "comment",
            "changed_to",
            "version",
        ]

    def get_subject(self, step: ApprovalStep) -> str:
        """R-17 or Q-3."""
        return f"R-{step.request_id}" if step.request_id is not None else f"Q-{step.quota_change_id}"


class RequestSerializer(serializers.ModelSerializer[CapacityRequest]):
    """A capacity request."""

    ref = serializers.CharField(read_only=True)
    requester = serializers.CharField(source="requester.username")
    requester_name = serializers.CharField(source="requester.get_full_name")
    department = serializers.CharField(source="department.code")
    flavour = serializers.CharField(source="flavour.code", default=None)
    cloned_from = serializers.UUIDField(source="cloned_from.uid", default=None)
    head = serializers.UUIDField(source="head.uid", default=None)
    after = serializers.SerializerMethodField()
    members = serializers.SerializerMethodField()
    steps = serializers.SerializerMethodField()

    class Meta:
        model = CapacityRequest
        fields = [
            "uid",
            "ref",
            "state",
            "state_since",
            "end_reason",
            "requester",
            "requester_name",
            "department",
            "flavour",
            "requirement",
            "options",
            "shape",
            "gpus_per_node",
            "nodes",
            "nodes_min",
            "fraction_milli",
            "fraction_mib",
            "mig_profile",
            "mig_count",
            "charge_milli",
            "cpu_milli",
            "memory_mib",
            "start_at",
            "end_at",
            "duration_s",
            "deadline_at",
            "is_service",
            "review_at",
            "review_span_s",
            "replicas_min",
            "replicas_max",
            "scale_by",
            "timetable",
            "signal_per_replica",
            "signal_value",
            "signal_at",
            "replicas_wanted",
            "health",
            "series",
            "head",
            "member_index",
            "array_count",
            "array_at_once",
            "window",
            "after",
            "after_failed",
            "held",
            "members",
            "work_class",
            "priority",
            "interruptible",
            "site_code",
            "fabric",
            "fabric_gbit_s",
            "storage",
            "domain_required",
            "domain_preferred",
            "datasets",
            "stage_datasets",
            "cost_code",
            "purpose",
            "run_kind",
            "command",
            "image",
            "environment",
            "checkpoint",
            "cuda_min",
            "client_token",
            "cloned_from",
            "submitted_at",
            "decided_at",
            "queued_at",
            "ended_at",
            "consent_change",
            "cost_at_most_micro",
            "policy_rule",
            "over_quota",
            "steps",
            "created_at",
            "updated_at",
            "version",
        ]

    def get_after(self, request: CapacityRequest) -> list[dict[str, Any]]:
        """What it waits for: each request, how it has to end, and whether that was so."""
        return [
            {
                "request": str(dep.on.uid),
                "ref": dep.on.ref,
                "when": dep.kind,
                "met_at": dep.met_at,
                "failed_at": dep.failed_at,
            }
            for dep in sorted(request.waits_for.all(), key=lambda one: one.on_id)
        ]

    def get_members(self, request: CapacityRequest) -> dict[str, int] | None:
        """How many members of a series are held, waiting, running, ended well, badly, withdrawn; null for a
        single request.
        """
        if not request.series:
            return None
        progress: dict[int, Progress] | None = self.context.get("progress")
        found = progress.get(request.pk) if progress is not None else None
        return asdict(found if found is not None else progress_of(request))

    def get_steps(self, request: CapacityRequest) -> list[dict[str, Any]]:
        """Its approval steps in order."""
        rows = getattr(request, "shown_steps", None)
        if rows is None:
            rows = request.steps.select_related(
                "department", "decided_by", "on_behalf_of", "requester"
            ).order_by("round", "position")
        return [
            {
                "uid": str(s.uid),
                "round": s.round,
                "position": s.position,
                "role": s.role,
                "state": s.state,
                "rule": s.rule,
                "department": s.department.code if s.department is not None else None,
                "due_at": s.due_at,
                "decided_by": s.decided_by.username if s.decided_by is not None else None,
                "decided_at": s.decided_at,
                "comment": s.comment,
                "version": s.version,
            }
            for s in rows
        ]


class RequestInput(serializers.Serializer[Any]):
    """What a request asks. All is checked by the service, which tells problems by field; see the field's
    words.
    """

    department = serializers.CharField(required=False, help_text="uid or code; default: the home department")
    flavour = serializers.CharField(required=False, help_text="uid or code; or give a requirement")
    requirement = serializers.DictField(
        required=False, help_text="memory_mib, models[], nvlink, mig, fp8, driver"
    )
    shape = serializers.ChoiceField(choices=CapacityRequest.Shape.choices, required=False)
    gpus_per_node = serializers.IntegerField(required=False)
    nodes = serializers.IntegerField(required=False)
    nodes_min = serializers.IntegerField(
        required=False, allow_null=True, help_text="elastic: starts with at least so many nodes"
    )
    fraction_milli = serializers.IntegerField(required=False)
    fraction_mib = serializers.IntegerField(required=False)
    mig_profile = serializers.CharField(required=False)
    mig_count = serializers.IntegerField(required=False)
    duration_s = serializers.IntegerField(required=False)
    start_at = serializers.DateTimeField(required=False, allow_null=True)
    deadline_at = serializers.DateTimeField(
        required=False, allow_null=True, help_text="must be finished by then; refused where that cannot be"
    )
    is_service = serializers.BooleanField(required=False)
    review_at = serializers.DateTimeField(required=False, allow_null=True)
    replicas_min = serializers.IntegerField(required=False)
    replicas_max = serializers.IntegerField(required=False)
    scale_by = serializers.ChoiceField(choices=CapacityRequest.ScaleBy.choices, required=False)
    timetable = serializers.DictField(
        required=False, help_text="zone, days: seven lists of 24 numbers of replicas, from Monday"
    )
    signal_per_replica = serializers.IntegerField(
        required=False, help_text="how much of the signal one replica carries"
    )
    health = serializers.DictField(
        required=False, help_text="kind http, tcp or command; port, path or command; every_s, failures"
    )
    array_count = serializers.IntegerField(required=False, help_text="members of a job array")
    array_at_once = serializers.IntegerField(required=False, help_text="members that may run at once")
    window = serializers.DictField(
        required=False, help_text="weekly: days (0 = Monday), from, to (local time), zone, first, until"
    )
    after = serializers.ListField(
        required=False,
        child=serializers.JSONField(),
        help_text='requests it waits for: "R-17", uid, or {request, when: ok | any}',
    )
    after_when = serializers.ChoiceField(choices=RequestDependency.Kind.choices, required=False)
    after_failed = serializers.ChoiceField(choices=CapacityRequest.AfterFailed.choices, required=False)
    work_class = serializers.ChoiceField(choices=CapacityRequest.WorkClass.choices, required=False)
    priority = serializers.IntegerField(required=False)
    interruptible = serializers.BooleanField(required=False)
    site_code = serializers.CharField(required=False)
    fabric = serializers.CharField(required=False, help_text="nvlink, infiniband, roce, ethernet")
    fabric_gbit_s = serializers.IntegerField(required=False, help_text="at least, per node")
    storage = serializers.CharField(required=False, help_text="kind that each node must have")
    domain_required = serializers.CharField(required=False, help_text="row, rack, switch: all nodes in one")
    domain_preferred = serializers.CharField(required=False)
    datasets = serializers.ListField(child=serializers.CharField(), required=False)
    stage_datasets = serializers.BooleanField(
        required=False, help_text="false: only where the data sets are already"
    )
    cost_code = serializers.CharField(required=False)
    purpose = serializers.CharField(required=False)
    run_kind = serializers.ChoiceField(
        choices=[one for one in CapacityRequest.RunKind.choices if one[0] in CapacityRequest.RUN_KINDS_ASKED],
        required=False,
    )
    command = serializers.CharField(required=False)
    image = serializers.CharField(required=False)
    environment = serializers.DictField(required=False)
    checkpoint = serializers.DictField(required=False, help_text="signal, command or url; seconds")
    cuda_min = serializers.CharField(required=False)
    client_token = serializers.CharField(required=False, help_text="sent twice, one request is made")
    draft = serializers.BooleanField(required=False, help_text="keep it as a draft")


class EventSerializer(serializers.ModelSerializer[RequestEvent]):
    """One line of a request's history."""

    class Meta:
        model = RequestEvent
        fields = ["at", "kind", "actor_name", "facts", "text"]


class DecisionInput(serializers.Serializer[Any]):
    """A decision. ``changed`` with ``change`` only: amounts and duration_s."""

    decision = serializers.ChoiceField(choices=["approve", "change", "return", "reject"])
    comment = serializers.CharField(required=False, allow_blank=True)
    changed = serializers.DictField(required=False)
    override = serializers.BooleanField(required=False)


class BulkInput(serializers.Serializer[Any]):
    """Steps of one small shape to approve."""

    steps = serializers.ListField(child=serializers.UUIDField())
    comment = serializers.CharField(required=False, allow_blank=True)


class ReasonInput(serializers.Serializer[Any]):
    """A reason."""

    reason = serializers.CharField(required=False, allow_blank=True)


class WithdrawInput(ReasonInput):
    """A reason; for a series also whether members that run are released."""

    stop_running = serializers.BooleanField(required=False, default=True)


class AfterInput(serializers.Serializer[Any]):
    """What a request waits for from now on; an empty list: nothing."""

    after = serializers.ListField(child=serializers.JSONField())


class SignalInput(serializers.Serializer[Any]):
    """The load of a service now, for example its requests per second."""

    value = serializers.IntegerField()


class RenewInput(serializers.Serializer[Any]):
    """The new review date of a service."""

    review_at = serializers.DateTimeField()


class OccurrenceInput(serializers.Serializer[Any]):
    """One occurrence of a recurring window, by its day; left out, or given other times."""

    day = serializers.DateField()
    skip = serializers.BooleanField(required=False, default=False)
    start_at = serializers.DateTimeField(required=False)
    end_at = serializers.DateTimeField(required=False)
    reason = serializers.CharField(required=False, allow_blank=True)


class ConsentInput(serializers.Serializer[Any]):
    """The answer to a changed amount."""

    agree = serializers.BooleanField()


class QuotaRowSerializer(serializers.Serializer[Any]):
    """One department and flavour: limits (null = unlimited, 0 = none) and use, milli-GPU."""

    department = serializers.CharField()
    department_name = serializers.CharField()
    flavour = serializers.CharField()
    guaranteed_milli = serializers.IntegerField()
    borrow_limit_milli = serializers.IntegerField(allow_null=True)
    lend_limit_milli = serializers.IntegerField(allow_null=True)
    hard_cap_milli = serializers.IntegerField(allow_null=True)
    weight = serializers.IntegerField()
    granted = serializers.BooleanField()
    used_milli = serializers.IntegerField()
    noninterruptible_milli = serializers.IntegerField()
    borrowed_milli = serializers.IntegerField()
    lent_milli = serializers.IntegerField()
    over_milli = serializers.IntegerField()
    limit_milli = serializers.IntegerField(allow_null=True)
    available_milli = serializers.IntegerField()


class QuotaInput(serializers.Serializer[Any]):
    """Numbers to put in force; milli-GPU, null = unlimited."""

    department = serializers.CharField(help_text="uid or code")
    flavour = serializers.CharField(help_text="uid or code")
    guaranteed_milli = serializers.IntegerField()
    borrow_limit_milli = serializers.IntegerField(required=False, allow_null=True)
    lend_limit_milli = serializers.IntegerField(required=False, allow_null=True)
    hard_cap_milli = serializers.IntegerField(required=False, allow_null=True)
    weight = serializers.IntegerField(required=False, min_value=0, default=1)
    starts_at = serializers.DateTimeField(required=False, allow_null=True)
    ends_at = serializers.DateTimeField(required=False, allow_null=True)
    reason = serializers.CharField(required=False, allow_blank=True, default="")
    override = serializers.BooleanField(required=False, default=False)


class QuotaChangeSerializer(serializers.ModelSerializer[QuotaChange]):
    """A department's ask for other numbers, or to be lent quota."""

    ref = serializers.SerializerMethodField()
    department = serializers.CharField(source="department.code")
    flavour = serializers.CharField(source="flavour.code")
    requester = serializers.CharField(source="requester.username")
    lender = serializers.CharField(source="lender.code", default=None)

    class Meta:
        model = QuotaChange
        fields = [
            "uid",
            "ref",
            "state",
            "department",
            "flavour",
            "requester",
            "lender",
            "starts_at",
            "ends_at",
            "old",
            "asked",
            "granted",
            "purpose",
            "decided_at",
            "created_at",
            "version",
        ]

    def get_ref(self, change: QuotaChange) -> str:
        """Q-3."""
        return f"Q-{change.pk}"


class QuotaChangeInput(QuotaInput):
    """``lender`` and ``amount_milli`` make it a lending for the period."""

    guaranteed_milli = serializers.IntegerField(required=False)
    purpose = serializers.CharField()
    lender = serializers.CharField(required=False)
    amount_milli = serializers.IntegerField(required=False)


class DelegationSerializer(serializers.ModelSerializer[Delegation]):
    """Who decides in whose place, from when to when."""

    principal = serializers.CharField(source="principal.username")
    deputy = serializers.CharField(source="deputy.username")

    class Meta:
        model = Delegation
        fields = ["uid", "principal", "deputy", "starts_at", "ends_at", "revoked_at", "version"]


class DelegationInput(serializers.Serializer[Any]):
    """A new delegation."""

    deputy = serializers.CharField(help_text="user name")
    starts_at = serializers.DateTimeField(required=False, allow_null=True)
    ends_at = serializers.DateTimeField()


class PolicySerializer(serializers.ModelSerializer[ApprovalPolicy]):
    """A version of the approval rules."""

    class Meta:
        model = ApprovalPolicy
        fields = ["id", "uid", "name", "rules", "active", "published_at", "published_by_name"]
        read_only_fields = ["id", "uid", "active", "published_at", "published_by_name"]


class UserLimitSerializer(serializers.ModelSerializer[UserLimit]):
    """Limits of a person; ``user`` null: everybody without limits of their own. Null is unlimited."""

    user = serializers.CharField(source="user.username", allow_null=True, required=False)

    class Meta:
        model = UserLimit
        fields = [
            "uid",
            "user",
            "gpus_at_once_milli",
            "longest_lease_s",
            "gpu_ms_per_month",
            "money_micro_per_month",
            "waiting_at_once",
            "running_at_once",
            "version",
        ]
        read_only_fields = ["uid", "version"]

    def to_representation(self, instance: UserLimit) -> dict[str, Any]:
        """The user's name, or null."""
        shown = {name: getattr(instance, name) for name in self.Meta.fields if name != "user"}
        return {**shown, "user": instance.user.username if instance.user is not None else None}


class AskRuleSerializer(serializers.Serializer[Any]):
    """What a department lets its people choose; holds for those below it that have no rule of their own."""

    department = serializers.CharField(source="department.code", help_text="code")
    priority_most = serializers.IntegerField(
        min_value=0, max_value=100, allow_null=True, help_text="null takes the rule away"
    )
