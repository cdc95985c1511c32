"""Shapes of pool's API. Amounts are milli-GPU, memory MiB, times UTC."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from pool.models import Allocation, Gpu, Node, QueueEntry, WorkUpload
from pool.web.reasons import explain


class GpuSerializer(serializers.ModelSerializer[Gpu]):
    """A card."""

    node = serializers.CharField(source="node.name", read_only=True)
    node_uid = serializers.UUIDField(source="node.uid", read_only=True)
    site = serializers.CharField(source="node.cluster.site.code", read_only=True)
    flavour = serializers.CharField(source="flavour.code", read_only=True, allow_null=True)

    class Meta:
        model = Gpu
        fields = [
            "uid",
            "uuid",
            "node",
            "node_uid",
            "site",
            "flavour",
            "index",
            "model_name",
            "memory_mib",
            "mig_enabled",
            "nvlink",
            "pcie",
            "condition",
            "condition_reason",
            "condition_since",
            "cordoned",
            "cordon_reason",
            "version",
        ]
        read_only_fields = fields


class NodeSerializer(serializers.ModelSerializer[Node]):
    """A node as the list shows it."""

    site = serializers.CharField(source="cluster.site.code", read_only=True)
    cluster = serializers.CharField(source="cluster.code", read_only=True)
    executor = serializers.CharField(source="cluster.executor", read_only=True)
    gpus = serializers.IntegerField(source="gpu_total", read_only=True)
    gpus_unwell = serializers.IntegerField(source="gpu_bad", read_only=True)
    gpus_held = serializers.IntegerField(source="gpu_held", read_only=True)

    class Meta:
        model = Node
        fields = [
            "uid",
            "name",
            "site",
            "cluster",
            "executor",
            "health",
            "health_since",
            "schedulable",
            "schedulable_reason",
            "schedulable_since",
            "maintenance_until",
            "last_heartbeat_at",
            "cpu_milli",
            "memory_mib",
            "driver",
            "cuda",
            "os",
            "kernel",
            "rack",
            "switch",
            "nvlink_domain",
            "agent_version",
            "run_as_root",
            "simulated",
            "gpus",
            "gpus_unwell",
            "gpus_held",
            "version",
        ]
        read_only_fields = fields


class ReasonSerializer(serializers.Serializer[Any]):
    """Body of a decision about a node or GPU."""

    reason = serializers.CharField(max_length=1000)


class DrainSerializer(ReasonSerializer):
    """Body of a drain."""

    grace_s = serializers.IntegerField(min_value=0, max_value=7 * 86400, default=1800)


class MaintenanceSerializer(ReasonSerializer):
    """Body of a maintenance."""

    until = serializers.DateTimeField(required=False, allow_null=True, default=None)


class AllocationSerializer(serializers.ModelSerializer[Allocation]):
    """What a request got."""

    ref = serializers.CharField(read_only=True)
    request = serializers.UUIDField(source="request.uid", read_only=True)
    request_ref = serializers.CharField(source="request.ref", read_only=True)
    holder = serializers.CharField(source="holder.username", read_only=True)
    department = serializers.CharField(source="department.code", read_only=True)
    flavour = serializers.CharField(source="flavour.code", read_only=True, allow_null=True)
    nodes = serializers.SerializerMethodField()

    class Meta:
        model = Allocation
        fields = [
            "uid",
            "ref",
            "request",
            "request_ref",
            "holder",
            "department",
            "flavour",
            "charge_milli",
            "state",
            "state_since",
            "end_reason",
            "end_rule",
            "reserved_at",
            "started_at",
            "expires_at",
            "ended_at",
            "exit_code",
            "error_code",
            "error_detail",
            "interruptible",
            "nodes",
            "version",
        ]
        read_only_fields = fields

    def get_nodes(self, obj: Allocation) -> list[str]:
        """Names of its nodes in order of rank."""
        return [m.node.name for m in obj.members.all()]


class LeaseOfAllocationSerializer(serializers.Serializer[Any]):
    """One lease in the detail of an allocation."""

    uid = serializers.UUIDField()
    gpu = serializers.UUIDField(source="gpu.uid")
    gpu_uuid = serializers.CharField(source="gpu.uuid")
    node = serializers.CharField(source="gpu.node.name")
    index = serializers.IntegerField(source="gpu.index")
    charge_milli = serializers.IntegerField(source="charge")
    mig_profile = serializers.CharField(source="mig_slice.profile", allow_null=True, default=None)
    started_at = serializers.DateTimeField()
    ended_at = serializers.DateTimeField(allow_null=True)


class AllocationDetailSerializer(AllocationSerializer):
    """With its leases."""

    leases = LeaseOfAllocationSerializer(many=True, read_only=True)

    class Meta(AllocationSerializer.Meta):
        fields = [*AllocationSerializer.Meta.fields, "leases"]
        read_only_fields = fields


class ReleaseSerializer(serializers.Serializer[Any]):
    """Body of a release or revoke."""

    reason = serializers.CharField(max_length=500, required=False, allow_blank=True, default="")


class ExtendSerializer(serializers.Serializer[Any]):
    """Body of an extension."""

    extra_s = serializers.IntegerField(min_value=60, max_value=90 * 86400)


class ConsentSerializer(serializers.Serializer[Any]):
    """Body of an agreement to the roll-out."""

    willing = serializers.BooleanField()


class LogPieceSerializer(serializers.Serializer[Any]):
    """A piece of a member's output."""

    offset = serializers.IntegerField(help_text="in bytes of the whole output")
    text = serializers.CharField()


class LogPiecesSerializer(serializers.Serializer[Any]):
    """Output to go on with, and how the allocation stands."""

    state = serializers.ChoiceField(choices=Allocation.State.choices)
    exit_code = serializers.IntegerField(allow_null=True)
    end_reason = serializers.CharField()
    pieces = LogPieceSerializer(many=True)


class EndpointSerializer(serializers.Serializer[Any]):
    """Where one replica answers."""

    replica = serializers.IntegerField()
    allocation = serializers.UUIDField()
    node = serializers.CharField()
    address = serializers.CharField(help_text="of its node, inside the pool's network")
    port = serializers.IntegerField(allow_null=True, help_text="that its health check asks")
    healthy = serializers.BooleanField(allow_null=True, help_text="null: no check, or not asked yet")
    since = serializers.DateTimeField(allow_null=True)


class ServiceEndpointsSerializer(serializers.Serializer[Any]):
    """A service and its running replicas."""

    request = serializers.UUIDField()
    ref = serializers.CharField()
    replicas = EndpointSerializer(many=True)


class WorkUploadSerializer(serializers.ModelSerializer[WorkUpload]):
    """A project folder that was sent."""

    class Meta:
        model = WorkUpload
        fields = ["uid", "client_token", "sha256", "size", "files", "unpacked", "created_at"]
        read_only_fields = fields


class QueueEntrySerializer(serializers.ModelSerializer[QueueEntry]):
    """Why a request waits."""

    request = serializers.UUIDField(source="request.uid", read_only=True)
    request_ref = serializers.CharField(source="request.ref", read_only=True)
    position = serializers.IntegerField(read_only=True, allow_null=True)
    of = serializers.IntegerField(read_only=True, allow_null=True, help_text="length of its line")
    words = serializers.SerializerMethodField(help_text="the reason for people, in the reader's language")

    class Meta:
        model = QueueEntry
        fields = [
            "request",
            "request_ref",
            "position",
            "of",
            "reason",
            "words",
            "figures",
            "start_from",
            "start_to",
            "basis",
            "planned_at",
        ]
        read_only_fields = fields

    def get_words(self, entry: QueueEntry) -> str:
        """One sentence or two."""
        flavour = entry.request.flavour
        why = explain(entry.reason, entry.figures, flavour.name if flavour is not None else "")
        return f"{why.headline} {why.detail}".strip()
