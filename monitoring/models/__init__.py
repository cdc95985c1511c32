"""Models of monitoring."""

from monitoring.models.telemetry import GpuEvent, GpuRollup, GpuSample, GpuState, NodeState, RollupDue

__all__ = ["GpuEvent", "GpuRollup", "GpuSample", "GpuState", "NodeState", "RollupDue"]
