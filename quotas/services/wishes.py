"""The wishes of a request: which fields they are, as they are sent, as history tells them."""

from __future__ import annotations

from typing import Any

from quotas.models import CapacityRequest

COPIED = (
    "department", "flavour", "requirement", "options", "shape", "gpus_per_node", "nodes", "nodes_min",
    "fraction_milli", "fraction_mib", "mig_profile", "mig_count", "cpu_milli", "memory_mib", "duration_s",
    "is_service", "replicas_min", "replicas_max", "scale_by", "timetable", "signal_per_replica", "health",
    "array_count", "array_at_once", "window", "after_failed", "work_class", "priority", "interruptible",
    "site_code", "fabric", "fabric_gbit_s", "storage", "domain_required", "domain_preferred", "datasets",
    "stage_datasets", "cost_code", "purpose", "run_kind", "command", "image", "environment", "checkpoint",
    "cuda_min",
)  # fmt: skip
"""What a clone takes over, and what a member of a series has in common with its head."""
TIMES = ("start_at", "review_at", "deadline_at")
TOLD = (
    "shape", "gpus_per_node", "nodes", "nodes_min", "fraction_milli", "fraction_mib", "mig_profile",
    "mig_count", "start_at", "duration_s", "deadline_at", "review_at", "array_count", "array_at_once",
    "window", "replicas_min", "replicas_max", "scale_by", "timetable", "interruptible", "priority",
    "work_class", "site_code", "fabric", "fabric_gbit_s", "storage", "domain_required", "domain_preferred",
    "datasets", "purpose", "run_kind", "command", "image",
)  # fmt: skip
NEVER_SENT = frozenset({"options"})


def copied_of(request: CapacityRequest | None) -> dict[str, Any]:
    """The wishes of a request as they are sent; times only where they still mean something (a draft)."""
    if request is None:
        return {}
    sent = {name: getattr(request, name) for name in COPIED if name not in NEVER_SENT}
    if request.run_kind == CapacityRequest.RunKind.ADOPTED:  # nobody here knows what it was begun with
        sent["run_kind"] = CapacityRequest.RunKind.COMMAND.value
    if request.state in ("draft", "returned"):
        sent |= {name: getattr(request, name) for name in TIMES}
    return sent


def wishes_of(request: CapacityRequest) -> dict[str, Any]:
    """All wishes of a request as they are sent, with its times and what it waits for."""
    after = [
        {"request": str(dep.on.uid), "when": dep.kind}
        for dep in request.waits_for.select_related("on").order_by("on_id")
    ]
    return {**copied_of(request), **{name: getattr(request, name) for name in TIMES}, "after": after}


def told(request: CapacityRequest) -> dict[str, Any]:
    """The wishes that history and audit show, JSON-ready."""
    out: dict[str, Any] = {name: getattr(request, name) for name in TOLD}
    for name in TIMES:
        out[name] = out[name].isoformat() if out[name] else None
    out["flavour"] = request.flavour.code if request.flavour is not None else request.options
    out["department"] = request.department.code
    return out
