"""Models of monitoring."""

from monitoring.models.findings import Finding, FindingDay, FindingEntry, WatchHour
from monitoring.models.health import AlertFiring, AlertRule, CardHealth
from monitoring.models.report_runs import ExportJob, ReportRun, SavedReport
from monitoring.models.reports import BuiltDay, CardDay, CardSpan, UseDay
from monitoring.models.sources import MetricSource, SourceCard
from monitoring.models.telemetry import (
    FleetRollup,
    GpuEvent,
    GpuRollup,
    GpuSample,
    GpuState,
    NodeState,
    RollupDue,
)
from monitoring.models.what_if import Scenario

__all__ = [
    "AlertFiring",
    "AlertRule",
    "BuiltDay",
    "CardDay",
    "CardHealth",
    "CardSpan",
    "ExportJob",
    "Finding",
    "FindingDay",
    "FindingEntry",
    "FleetRollup",
    "GpuEvent",
    "GpuRollup",
    "GpuSample",
    "GpuState",
    "MetricSource",
    "NodeState",
    "ReportRun",
    "RollupDue",
    "SavedReport",
    "Scenario",
    "SourceCard",
    "UseDay",
    "WatchHour",
]
