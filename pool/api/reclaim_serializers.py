"""Shapes of the API of taking back and maintenance. Amounts are milli-GPU, times UTC."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from pool.engine.ladder import RULE_BOUNDS
from pool.models import DepartmentMode, MaintenanceWindow, ReclaimAdvice, ReclaimCase


class ReclaimCaseSerializer(serializers.ModelSerializer[ReclaimCase]):
    """One act of taking back, with its steps."""

    allocation = serializers.UUIDField(source="allocation.uid", read_only=True)
    allocation_ref = serializers.CharField(source="allocation.ref", read_only=True)
    department = serializers.CharField(source="allocation.department.code", read_only=True)
    for_request = serializers.UUIDField(
        source="for_request.uid", read_only=True, allow_null=True, default=None
    )
    window = serializers.UUIDField(source="window.uid", read_only=True, allow_null=True, default=None)

    class Meta:
        model = ReclaimCase
        fields = [
            "uid",
            "allocation",
            "allocation_ref",
            "department",
            "cause",
            "rule",
            "figures",
            "text",
            "for_request",
            "window",
            "members",
            "requeue",
            "step",
            "noticed_at",
            "grace_until",
            "hook",
            "hook_at",
            "checkpoint_at",
            "checkpoint_done_at",
            "stop_sent_at",
            "stopped_at",
            "seen_free_at",
            "escalated_at",
            "withdrawn_why",
            "closed_at",
            "version",
        ]
        read_only_fields = fields


class ReclaimAdviceSerializer(serializers.ModelSerializer[ReclaimAdvice]):
    """What would have been taken back."""

    allocation = serializers.UUIDField(source="allocation.uid", read_only=True)
    allocation_ref = serializers.CharField(source="allocation.ref", read_only=True)
    department = serializers.CharField(source="allocation.department.code", read_only=True)
    charge_milli = serializers.IntegerField(source="allocation.charge_milli", read_only=True)
    for_request = serializers.UUIDField(
        source="for_request.uid", read_only=True, allow_null=True, default=None
    )

    class Meta:
        model = ReclaimAdvice
        fields = [
            "uid",
            "allocation",
            "allocation_ref",
            "department",
            "charge_milli",
            "cause",
            "rule",
            "mode",
            "for_request",
            "figures",
            "first_at",
            "last_at",
            "times",
        ]
        read_only_fields = fields


class ModeSerializer(serializers.Serializer[Any]):
    """The mode of one department; `own` false: it follows the one above. Minimum run times are those that the
    department says itself.
    """

    department = serializers.CharField(allow_null=True)
    mode = serializers.ChoiceField(choices=DepartmentMode.Mode.choices)
    willing = serializers.BooleanField()
    own = serializers.BooleanField()
    min_run_preempt_s = serializers.IntegerField(allow_null=True)
    min_run_reclaim_s = serializers.IntegerField(allow_null=True)


class ModeInput(serializers.Serializer[Any]):
    """Body of a change of mode. `department` null: the installation; `mode` null: as above. The minimum run times
    (null: as above) stay as they are where neither is given.
    """

    department = serializers.CharField(allow_null=True, max_length=80)
    mode = serializers.ChoiceField(choices=DepartmentMode.Mode.choices, allow_null=True)
    willing = serializers.BooleanField(default=False)
    min_run_preempt_s = serializers.IntegerField(
        min_value=0, max_value=30 * 86400, allow_null=True, required=False
    )
    min_run_reclaim_s = serializers.IntegerField(
        min_value=0, max_value=30 * 86400, allow_null=True, required=False
    )
    reason = serializers.CharField(max_length=500)


class SurplusInput(serializers.Serializer[Any]):
    """Body of taking back what a department has above its quota."""

    department = serializers.CharField(max_length=80)
    flavour = serializers.CharField(max_length=80)
    notice_s = serializers.IntegerField(
        min_value=0, max_value=30 * 86400, required=False, allow_null=True, default=None
    )
    reason = serializers.CharField(max_length=500)


class RulesSerializer(serializers.Serializer[Any]):
    """The rules of taking back that are in force; `rules_version` 0: the defaults."""

    rules_version = serializers.IntegerField()
    values = serializers.DictField()


class RulesInput(serializers.Serializer[Any]):
    """Body of new rules; those not named keep their value. `rules_version`: the one that was looked at."""

    rules_version = serializers.IntegerField(required=False, allow_null=True, default=None)
    reason = serializers.CharField(max_length=500)
    idle_everybody = serializers.BooleanField(required=False)

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        """With one number for each rule."""
        found = super().get_fields()
        for name, (low, high) in RULE_BOUNDS.items():
            found[name] = serializers.IntegerField(required=False, min_value=low, max_value=high)
        return found


class WindowSerializer(serializers.ModelSerializer[MaintenanceWindow]):
    """A maintenance window."""

    ref = serializers.CharField(read_only=True)
    site = serializers.CharField(source="site.code", read_only=True, allow_null=True, default=None)
    nodes = serializers.SerializerMethodField()

    class Meta:
        model = MaintenanceWindow
        fields = [
            "uid",
            "ref",
            "title",
            "reason",
            "site",
            "nodes",
            "starts_at",
            "ends_at",
            "notice_s",
            "state",
            "announced_at",
            "began_at",
            "ended_at",
            "made_by_name",
            "ended_by_name",
            "end_reason",
            "version",
        ]
        read_only_fields = fields

    def get_nodes(self, obj: MaintenanceWindow) -> list[str]:
        """Names of the nodes that it names (none where it is about a whole site)."""
        return sorted(node.name for node in obj.nodes.all())


class WindowInput(serializers.Serializer[Any]):
    """Body of a new window: a site by its code, or nodes by their names."""

    title = serializers.CharField(max_length=120)
    reason = serializers.CharField(max_length=1000)
    site = serializers.CharField(max_length=48, required=False, allow_null=True, default=None)
    nodes = serializers.ListField(child=serializers.CharField(max_length=120), required=False, default=list)
    starts_at = serializers.DateTimeField()
    ends_at = serializers.DateTimeField()
    notice_s = serializers.IntegerField(min_value=0, max_value=30 * 86400, default=86400)


class ReasonInput(serializers.Serializer[Any]):
    """Body of calling a window off."""

    reason = serializers.CharField(max_length=1000)
