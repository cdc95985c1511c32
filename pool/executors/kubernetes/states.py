"""What a pod's status says of a member. Pure.

A pod that ended (phase Succeeded or Failed, its containers terminated) holds no devices any more: the kubelet gives
them to the next one. So such a member is free, and the pod stays a while for its output.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from pool.executors.base import Observation
from pool.executors.kubernetes import names
from pool.executors.kubernetes.manifests import CONTAINER

NEVER_BEGAN = {
    "UnexpectedAdmissionError": "not_admitted",
    "OutOfcpu": "not_admitted",
    "OutOfmemory": "not_admitted",
    "OutOfpods": "not_admitted",
    "NodeAffinity": "not_admitted",
    "NodePorts": "not_admitted",
    "InvalidNodeInfo": "not_admitted",
}
"""Reasons with which a kubelet refuses a pod that was bound to it; every `OutOf…` is one."""
NOT_BY_ITSELF = {
    "Evicted": "evicted_there",
    "Preempting": "preempted_there",
    "Shutdown": "node_shut_down",
    "Terminated": "node_shut_down",
    "NodeShutdown": "node_shut_down",
    "NodeLost": "node_lost",
    "DeadlineExceeded": "ended_there",
}
BAD_IMAGE = re.compile(
    r"not found|manifest unknown|does not exist|unauthorized|access denied|denied|no such host", re.IGNORECASE
)
REMOVED = {"code": "removed_there", "detail": "The pod was removed over there.", "retryable": True}
PREEMPTED = {
    "code": "preempted_there",
    "detail": "The cluster's scheduler made room for a pod of higher priority.",
    "retryable": True,
}
DEVICE_ANNOTATION = "hami.io/vgpu-devices-allocated"
SIGKILL = 137


def when(text: object) -> datetime | None:
    """A time as the API writes it (RFC 3339), or None."""
    try:
        made = datetime.fromisoformat(str(text).replace("Z", "+00:00")) if text else None
    except ValueError:
        return None
    return None if made is None or made.year < 2000 else made  # a container that never began has the epoch


def observed(pod: Mapping[str, Any]) -> Observation:
    """The member that this pod carries."""
    meta, status = pod["metadata"], pod.get("status") or {}
    external = f"{meta['namespace']}/{meta['name']}"
    phase = status.get("phase") or "Pending"
    work = _work(status)
    if phase in ("Succeeded", "Failed"):
        return _over(pod, external, phase, work)
    bound = bool((pod.get("spec") or {}).get("nodeName"))
    running = (work.get("state") or {}).get("running")
    if bound and (running is not None or _adopted(meta)):
        # What was taken in runs on while its kubelet begins its containers again: its cards stay its own.
        began = status.get("startTime") if running is None else running.get("startedAt")
        return Observation(
            "running",
            started_at=when(began),
            external_id=external,
            account=_account(pod),
            devices=_devices(meta),
        )
    waiting = (work.get("state") or {}).get("waiting") or {}
    if not meta.get("deletionTimestamp") and _hopeless(waiting):
        detail = f"{waiting.get('reason')}: {waiting.get('message') or ''}"[:500]
        return Observation(
            "exited",
            external_id=external,
            detail=detail,
            error={"code": "image_not_pulled", "detail": detail, "retryable": False},
            failed_start=True,
        )
    return Observation("starting", external_id=external, detail=_waits_for(status, waiting, bound))


def _adopted(meta: Mapping[str, Any]) -> bool:
    """Whether it was somebody's before it was taken in: it carries an allocation, by a name that we would not give."""
    uid = str((meta.get("labels") or {}).get(names.ALLOCATION) or "").replace("-", "")
    return bool(uid) and not str(meta["name"]).startswith(f"gp-{uid}-")


def departed(pod: Mapping[str, Any], wanted: bool) -> Observation:
    """A member whose pod went, from how it was last seen. ``wanted``: we did not ask for its end, so somebody else
    removed it."""
    last = observed_of(pod, wanted)
    if last.state == "free":
        return last
    began = last.state in ("running", "exited")
    return Observation(
        "free",
        started_at=last.started_at,
        external_id=last.external_id,
        account=last.account,
        error=_removed(pod) if wanted else None,
        failed_start=not began,
    )


def observed_of(pod: Mapping[str, Any], wanted: bool) -> Observation:
    """As ``observed``; a pod that is being removed and ended badly while we still ``wanted`` it was ended by whoever
    removes it."""
    seen = observed(pod)
    ended = seen.state in ("free", "exited") and seen.error is None and seen.exit_code != 0
    if wanted and ended and pod["metadata"].get("deletionTimestamp"):
        return replace(seen, error=_removed(pod))
    return seen


def _removed(pod: Mapping[str, Any]) -> dict[str, Any]:
    """Why somebody removed it: Kubernetes 1.26 and later say so where its own scheduler did."""
    for row in (pod.get("status") or {}).get("conditions") or []:
        if row.get("type") == "DisruptionTarget" and row.get("reason") == "PreemptionByScheduler":
            return dict(PREEMPTED)
    return dict(REMOVED)


def is_over(pod: Mapping[str, Any]) -> bool:
    """Whether it ended and holds nothing any more."""
    status = pod.get("status") or {}
    return status.get("phase") in ("Succeeded", "Failed") and _all_ended(status)


def _work(status: Mapping[str, Any]) -> Mapping[str, Any]:
    rows = status.get("containerStatuses") or []
    return next((row for row in rows if row.get("name") == CONTAINER), rows[0] if rows else {})


def _all_ended(status: Mapping[str, Any]) -> bool:
    return all(not (row.get("state") or {}).get("running") for row in status.get("containerStatuses") or [])


def _hopeless(waiting: Mapping[str, Any]) -> bool:
    reason = waiting.get("reason")
    if reason in ("InvalidImageName", "ErrImageNeverPull"):
        return True
    return reason in ("ErrImagePull", "ImagePullBackOff") and bool(
        BAD_IMAGE.search(str(waiting.get("message") or ""))
    )


def _waits_for(status: Mapping[str, Any], waiting: Mapping[str, Any], bound: bool) -> str:
    if waiting.get("reason"):
        return f"{waiting['reason']}: {waiting.get('message') or ''}".strip(": ")[:500]
    for row in status.get("conditions") or []:
        if row.get("type") == "PodScheduled" and row.get("status") == "False":
            return str(row.get("message") or row.get("reason") or "")[:500]
    return "bound to its node" if bound else "not bound yet"


def _account(pod: Mapping[str, Any]) -> str:
    user = ((pod.get("spec") or {}).get("securityContext") or {}).get("runAsUser")
    return "" if user is None else str(user)


def _devices(meta: Mapping[str, Any]) -> tuple[str, ...]:
    """UUIDs that HAMi wrote on the pod (``UUID,type,MiB,cores:`` for each share, containers joined by `;`)."""
    text = str((meta.get("annotations") or {}).get(DEVICE_ANNOTATION) or "")
    parts = [part.split(",")[0] for part in re.split("[:;]", text) if part.strip()]
    return tuple(dict.fromkeys(part for part in parts if part.startswith(("GPU-", "MIG-"))))


def _over(pod: Mapping[str, Any], external: str, phase: str, work: Mapping[str, Any]) -> Observation:
    meta, status = pod["metadata"], pod.get("status") or {}
    ended = (work.get("state") or {}).get("terminated") or {}
    reason = str(status.get("reason") or "")
    began = when(ended.get("startedAt"))
    code = ended.get("exitCode")
    code = int(code) if code is not None else (0 if phase == "Succeeded" else None)
    signal = ended.get("signal") or (code - 128 if code is not None and 128 < code < 160 else None)
    failed_start = (
        reason in NEVER_BEGAN or reason.startswith("OutOf") or (began is None and phase == "Failed")
    )
    return Observation(
        "free" if _all_ended(status) else "exited",
        exit_code=code,
        signal=signal,
        started_at=None if failed_start else began,
        ended_at=when(ended.get("finishedAt")),
        external_id=external,
        account=_account(pod),
        devices=_devices(meta),
        detail=reason,
        error=_error(reason, status, ended, failed_start),
        failed_start=failed_start,
    )


def _error(
    reason: str, status: Mapping[str, Any], ended: Mapping[str, Any], failed_start: bool
) -> dict[str, Any] | None:
    detail = str(status.get("message") or ended.get("message") or reason)[:500]
    if ended.get("reason") == "OOMKilled":
        return {"code": "out_of_memory", "detail": detail, "retryable": False}
    if reason in NOT_BY_ITSELF:
        return {"code": NOT_BY_ITSELF[reason], "detail": detail, "retryable": True}
    if reason in NEVER_BEGAN or reason.startswith("OutOf"):
        return {"code": "not_admitted", "detail": detail, "retryable": True}
    if ended.get("reason") in ("StartError", "ContainerCannotRun"):
        return {"code": "container_cannot_run", "detail": detail, "retryable": False}
    if failed_start:
        return {"code": "not_started", "detail": detail, "retryable": True}
    return None
