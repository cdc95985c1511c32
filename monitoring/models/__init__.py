"""Models of monitoring."""

from monitoring.models.report_runs import ExportJob, ReportRun, SavedReport
from monitoring.models.reports import BuiltDay, CardDay, CardSpan, UseDay
from monitoring.models.telemetry import GpuEvent, GpuRollup, GpuSample, GpuState, NodeState, RollupDue

__all__ = [
    "BuiltDay",
    "CardDay",
    "CardSpan",
    "ExportJob",
    "GpuEvent",
    "GpuRollup",
    "GpuSample",
    "GpuState",
    "NodeState",
    "ReportRun",
    "RollupDue",
    "SavedReport",
    "UseDay",
]
