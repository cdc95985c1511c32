"""What GPUs did. A missing measure is null with a reason code beside it, never 0.

Units: util and sm in per mille of time or activity, memory in MiB, temperature in °C, power in mW.
"""

from __future__ import annotations

from django.db import models
from django.db.models import Q

from portal.kernel.clock import now


class GpuSample(models.Model):
    """One sample of one GPU (or MIG slice: `slot` > 0). Partitioned by UTC day (migration 0002), written by COPY.

    Primary key in the database: (at, gpu_id, slot); Django is told of `at` only to have one, and never writes here.
    """

    pk = models.CompositePrimaryKey("at", "gpu_id", "slot")
    at = models.DateTimeField()
    gpu_id = models.BigIntegerField()
    slot = models.SmallIntegerField(default=0, help_text="0: the card; n + 1: MIG GPU instance n")
    util_pm = models.SmallIntegerField(null=True, help_text="busy time, per mille")
    sm_pm = models.SmallIntegerField(null=True, help_text="SM or GR-engine activity, per mille")
    mem_used_mib = models.IntegerField(null=True)
    mem_total_mib = models.IntegerField(null=True)
    temp_c = models.SmallIntegerField(null=True)
    power_mw = models.IntegerField(null=True)

    class Meta:
        managed = False
        db_table = "monitoring_gpusample"

    def __str__(self) -> str:
        return f"{self.gpu_id} {self.at}"


class GpuState(models.Model):
    """The last sample of each GPU (and slice), one small table."""

    id = models.BigAutoField(primary_key=True)
    gpu = models.ForeignKey("pool.Gpu", on_delete=models.CASCADE, related_name="states")
    slot = models.SmallIntegerField(default=0)
    mig_uuid = models.CharField(max_length=120, blank=True)
    at = models.DateTimeField()
    received_at = models.DateTimeField(default=now)
    util_pm = models.SmallIntegerField(null=True)
    sm_pm = models.SmallIntegerField(null=True)
    mem_used_mib = models.IntegerField(null=True)
    mem_total_mib = models.IntegerField(null=True)
    mem_reserved_mib = models.IntegerField(null=True)
    temp_c = models.SmallIntegerField(null=True)
    power_mw = models.IntegerField(null=True)
    sm_clock_mhz = models.IntegerField(null=True)
    throttle = models.BigIntegerField(null=True)
    quiet_since = models.DateTimeField(
        null=True, help_text="no work seen since then; null: busy, or not known"
    )
    latched = models.BooleanField(
        default=False, help_text="busy counter stands at 100 % with nothing on the card"
    )
    missing = models.JSONField(default=dict, help_text="measure → reason code")
    more = models.JSONField(
        default=dict, help_text="further measures and their last values: monitoring.engine.measures.EXTRAS"
    )
    source = models.CharField(max_length=16, default="agent", help_text="which kind of source told it")
    processes = models.JSONField(default=list, help_text="pid, name, user, mem_mib; never arguments")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["gpu", "slot"], name="gpu_state_once")]

    def __str__(self) -> str:
        return f"{self.gpu_id} {self.at}"


class NodeState(models.Model):
    """The last host figures of each node."""

    node = models.OneToOneField(
        "pool.Node", on_delete=models.CASCADE, primary_key=True, related_name="host_state"
    )
    at = models.DateTimeField()
    cpu_pm = models.SmallIntegerField(null=True)
    mem_used_mib = models.IntegerField(null=True)
    iowait_pm = models.SmallIntegerField(null=True)
    dropped_samples = models.BigIntegerField(default=0, help_text="dropped by the agent's bounded spool")

    def __str__(self) -> str:
        return f"{self.node_id} {self.at}"


class GpuRollup(models.Model):
    """Sums of samples of one GPU in one bucket: can be run again and takes late data (upsert).

    A mean is sum / count of the samples that had the measure; coverage is covered seconds / seconds of the
    bucket, where a ten-second slot is covered when it holds a sample. Partitioned by step, minutes by UTC day and
    hours by UTC month (migration 0006), so that retention drops tables.
    """

    class Step(models.IntegerChoices):
        MINUTE = 60
        HOUR = 3600
        DAY = 86400

    pk = models.CompositePrimaryKey("gpu_id", "slot", "step", "bucket")
    gpu_id = models.BigIntegerField()
    slot = models.SmallIntegerField(default=0)
    step = models.IntegerField(choices=Step.choices)
    bucket = models.DateTimeField()
    samples = models.IntegerField(default=0)
    covered_s = models.IntegerField(default=0)
    util_n = models.IntegerField(default=0)
    util_sum = models.BigIntegerField(default=0)
    util_max = models.SmallIntegerField(null=True)
    sm_n = models.IntegerField(default=0)
    sm_sum = models.BigIntegerField(default=0)
    mem_n = models.IntegerField(default=0)
    mem_sum = models.BigIntegerField(default=0)
    mem_max = models.IntegerField(null=True)
    temp_n = models.IntegerField(default=0)
    temp_sum = models.BigIntegerField(default=0)
    temp_max = models.SmallIntegerField(null=True)
    power_n = models.IntegerField(default=0)
    power_sum = models.BigIntegerField(default=0)
    power_max = models.IntegerField(null=True)

    def __str__(self) -> str:
        return f"{self.gpu_id} {self.step} {self.bucket}"


class FleetRollup(models.Model):
    """Sums over the cards of one cluster and flavour in one hour or day: what a page about the whole pool reads.

    `cards` had at least one sample; the other columns are the sums of theirs (slices are not counted again).
    """

    id = models.BigAutoField(primary_key=True)
    cluster = models.ForeignKey("pool.Cluster", on_delete=models.CASCADE, related_name="rollups")
    flavour = models.ForeignKey(
        "quotas.GpuFlavour", on_delete=models.CASCADE, null=True, related_name="rollups"
    )
    step = models.IntegerField(choices=GpuRollup.Step.choices)
    bucket = models.DateTimeField()
    cards = models.IntegerField()
    covered_s = models.BigIntegerField()
    util_n = models.BigIntegerField()
    util_sum = models.BigIntegerField()
    sm_n = models.BigIntegerField()
    sm_sum = models.BigIntegerField()
    mem_n = models.BigIntegerField()
    mem_sum = models.BigIntegerField()
    temp_n = models.BigIntegerField()
    temp_sum = models.BigIntegerField()
    power_n = models.BigIntegerField()
    power_sum = models.BigIntegerField()

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["step", "bucket", "cluster", "flavour"],
                nulls_distinct=False,
                name="fleet_rollup_once",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.cluster_id} {self.step} {self.bucket}"


class RollupDue(models.Model):
    """A minute, hour or day that got samples since it was last summed. Append only; the rollup takes rows away."""

    id = models.BigAutoField(primary_key=True)
    step = models.IntegerField(choices=GpuRollup.Step.choices)
    bucket = models.DateTimeField()

    def __str__(self) -> str:
        return f"{self.step} {self.bucket}"


class GpuEvent(models.Model):
    """Something that happened to a GPU: an XID, lost, back, a foreign process."""

    id = models.BigAutoField(primary_key=True)
    gpu = models.ForeignKey("pool.Gpu", on_delete=models.PROTECT, null=True, related_name="health_events")
    node = models.ForeignKey("pool.Node", on_delete=models.PROTECT, related_name="health_events")
    at = models.DateTimeField()
    kind = models.CharField(max_length=24)
    code = models.IntegerField(null=True, help_text="XID number")
    facts = models.JSONField(default=dict)
    seen_at = models.DateTimeField(default=now)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["node", "gpu", "at", "kind", "code"], nulls_distinct=False, name="gpu_event_once"
            ),
        ]
        indexes = [
            models.Index(fields=["gpu", "-at"], name="gpu_event"),
            models.Index(condition=Q(kind="xid"), fields=["code", "-at"], name="gpu_event_xid"),
        ]

    def __str__(self) -> str:
        return f"{self.kind} {self.code or ''}"
