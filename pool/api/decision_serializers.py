"""Shapes of the API of decisions and of the scheduler's policy."""

from __future__ import annotations

from typing import Any

from drf_spectacular.utils import extend_schema_serializer
from rest_framework import serializers

from pool.models import SchedulerCycle, SchedulingPolicy


class DecisionSerializer(serializers.ModelSerializer[SchedulerCycle]):
    """One cycle that decided something, without its operations."""

    number = serializers.IntegerField(source="pk", read_only=True)
    policy = serializers.UUIDField(source="policy.uid", read_only=True, allow_null=True, default=None)
    whole = serializers.SerializerMethodField(help_text="everybody in line was judged")
    replayable = serializers.SerializerMethodField(help_text="what it saw is still kept")

    class Meta:
        model = SchedulerCycle
        fields = [
            "uid",
            "number",
            "started_at",
            "took_ms",
            "timings",
            "cause",
            "snapshot_hash",
            "plan_hash",
            "policy",
            "whole",
            "replayable",
            "considered",
            "placed",
            "evicted",
            "waiting",
            "refused_on_apply",
            "sizes",
        ]
        read_only_fields = fields

    def get_whole(self, cycle: SchedulerCycle) -> bool:
        """Whether everybody was judged."""
        return cycle.only is None

    def get_replayable(self, cycle: SchedulerCycle) -> bool:
        """Whether it can be decided again."""
        return cycle.snapshot_id is not None


class DecisionDetailSerializer(DecisionSerializer):
    """The same with its operations and what was left out; ids in them are row numbers (R-17 is request 17)."""

    ops = serializers.JSONField(read_only=True)
    refusals = serializers.JSONField(read_only=True)

    class Meta(DecisionSerializer.Meta):
        fields = [*DecisionSerializer.Meta.fields, "ops", "refusals"]
        read_only_fields = fields


class ReplaySerializer(serializers.Serializer[Any]):
    """Whether the same plan came out."""

    identical = serializers.BooleanField()
    plan_hash = serializers.CharField()
    ops = serializers.IntegerField()
    differing = serializers.JSONField()


@extend_schema_serializer(component_name="SchedulingPolicy")
class PolicySerializer(serializers.ModelSerializer[SchedulingPolicy]):
    """A version of the policy: the switches that differ from the defaults."""

    number = serializers.IntegerField(source="pk", read_only=True)
    state = serializers.SerializerMethodField(help_text="draft, active or replaced")
    based_on = serializers.UUIDField(source="based_on.uid", read_only=True, allow_null=True, default=None)

    class Meta:
        model = SchedulingPolicy
        fields = [
            "uid",
            "number",
            "version",
            "name",
            "state",
            "values",
            "note",
            "based_on",
            "made_by_name",
            "published_at",
            "published_by_name",
            "preview",
            "previewed_at",
        ]
        read_only_fields = fields

    def get_state(self, policy: SchedulingPolicy) -> str:
        """Where the version stands."""
        if policy.active:
            return "active"
        return "draft" if policy.published_at is None else "replaced"


class PolicyInput(serializers.Serializer[Any]):
    """A draft."""

    name = serializers.CharField(max_length=80)
    values = serializers.DictField(help_text="switch → value; times in ms, shares in permille")  # type: ignore[assignment]
    note = serializers.CharField(max_length=500, allow_blank=True, default="")
    based_on = serializers.UUIDField(allow_null=True, default=None)


class PolicyChange(serializers.Serializer[Any]):
    """Other switches for a draft."""

    values = serializers.DictField()  # type: ignore[assignment]
    note = serializers.CharField(max_length=500, allow_blank=True, required=False)


class PolicyReason(serializers.Serializer[Any]):
    """Why."""

    reason = serializers.CharField(max_length=500)
