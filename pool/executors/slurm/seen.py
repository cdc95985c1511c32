"""What jobs say of allocations: which job counts, its state as an observation, foreign work. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from uuid import UUID

from pool.executors.base import Observation, Work
from pool.executors.slurm.read import Job
from pool.models import AllocationMember

LEAST_JOB_AGE = timedelta(seconds=290)
"""Slurm's own MinJobAge (300 s), a little less: so long an ended job is still known to the controller."""
ENDS: dict[str, tuple[str, bool]] = {
    "NODE_FAIL": ("node_failed", True),
    "BOOT_FAIL": ("node_failed", True),
    "LAUNCH_FAILED": ("launch_failed", True),
    "RECONFIG_FAIL": ("launch_failed", True),
    "PREEMPTED": ("preempted_outside", True),
    "OUT_OF_MEMORY": ("out_of_memory", False),
    "TIMEOUT": ("time_limit_outside", False),
    "DEADLINE": ("time_limit_outside", False),
    "REVOKED": ("cancelled_outside", False),
}
"""What an end is told as, and whether it is worth another try; a plain end or failure is the work's own."""


def latest_of(jobs: Iterable[Job], known: Mapping[UUID, str] | None = None) -> dict[UUID, Job]:
    """Of each allocation the job that counts: the one whose id is ``known``, else the first that is not over, else the
    newest. (Anybody may give a job any name.)"""
    out: dict[UUID, Job] = {}
    for job in sorted(jobs, key=lambda one: int(one.id) if one.id.isdecimal() else 0):
        uid = job.uid
        if uid is None:
            continue
        mine = (known or {}).get(uid)
        if uid not in out or job.id == mine or (out[uid].over and out[uid].id != mine):
            out[uid] = job
    return out


def doubles(jobs: Iterable[Job], latest: dict[UUID, Job], ours: set[UUID]) -> list[Job]:
    """Jobs beside the one that counts: two processes ordered the same start at one moment."""
    return [
        job for job in jobs if job.uid in ours and not job.over and job.uid and job.id != latest[job.uid].id
    ]


def observation(job: Job, member: AllocationMember) -> Observation:
    """What a job says of one of its members."""
    if job.waiting and job.adopted:
        error = {"code": "requeued_outside", "detail": job.reason, "retryable": False}
        return Observation("free", external_id=job.id, started_at=member.started_at, error=error)
    if job.waiting:
        return Observation("starting", external_id=job.id, detail=job.reason)
    if not job.over:  # also while it is only said to be completing: how it ended comes with its end
        return Observation(
            "running",
            started_at=job.started_at,
            account=job.user,
            external_id=job.id,
            devices=_devices(job, member),
        )
    state = next((one for one in sorted(job.states) if one in ENDS), "")
    code, retryable = ENDS.get(state, ("", False))
    if "CANCELLED" in job.states and member.stop_ordered_at is None:
        code, retryable = "cancelled_outside", False
    ran = job.started_at is not None and bool(job.nodes)
    return Observation(
        "exited" if job.cleaning else "free",
        exit_code=None if job.signal else job.exit_code,
        signal=job.signal,
        started_at=job.started_at if ran else None,
        ended_at=job.ended_at,
        account=job.user,
        external_id=job.id,
        error={"code": code, "detail": f"{state or 'CANCELLED'} {job.reason}".strip(), "retryable": retryable}
        if code
        else None,
        failed_start=not ran,
    )


def forgotten(seen: Observation, at: datetime) -> Observation:
    """A job that only the accounting knows. A controller that lost its state has its jobs booked as cancelled: where
    it should still know of such an end, nobody cancelled anything, and the work goes back in line."""
    lately = seen.ended_at is not None and seen.ended_at > at - LEAST_JOB_AGE
    if (seen.error or {}).get("code") != "cancelled_outside" or not lately:
        return seen
    error = {"code": "work_vanished", "detail": "Slurm's controller lost its jobs.", "retryable": True}
    return replace(seen, error=error)


def _devices(job: Job, member: AllocationMember) -> tuple[str, ...]:
    if member.node.name not in job.nodes or len(job.gres) != len(job.nodes):
        return ()
    held = job.gres[job.nodes.index(member.node.name)]
    return tuple(f"{item.type or item.name}:{index}" for item in held for index in item.indexes)


def work_of(job: Job) -> Work:
    """A job that was not asked for, as the pool shows it."""
    indexes = {
        node: tuple(index for item in held if item.name == "gpu" for index in item.indexes)
        for node, held in zip(job.nodes, job.gres, strict=False)
    }
    return Work(
        external_id=job.id,
        nodes=job.nodes,
        user=job.user,
        account=job.account,
        name=job.name,
        gpus=job.gpus,
        gpu_indexes=indexes,
        cpu_milli=job.cpus * 1000,
        memory_mib=job.memory_mib,
        started_at=job.started_at,
        ends_at=job.ended_at,
        uid=job.uid,
    )
