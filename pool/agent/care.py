"""What is watched of work while it runs: its share of a card's memory, its folder's size, a service's health."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from pool.agent.health import Health
from pool.agent.nvml import utc_now
from pool.agent.outbox import Outbox
from pool.agent.telemetry import event

if TYPE_CHECKING:
    from pool.agent.job import Job
    from pool.agent.jobs import Jobs

log = logging.getLogger("gpupool.agent")
FOLDER_SECONDS = 30.0
GRACE = 10.0


class Care:
    """All of it for one node; what it finds is told as events."""

    def __init__(self, jobs: Jobs, outbox: Outbox) -> None:
        self.jobs = jobs
        self.outbox = outbox
        self.health = Health(self._tell_health)

    def _tell_health(self, job: Job, ok: bool, facts: dict[str, Any]) -> None:
        told = {"allocation": job.allocation, "member": job.member, "ok": ok, **facts}
        self.outbox.put(event("health", utc_now(), None, told))

    def shares(self, rows: list[list[Any]]) -> list[dict[str, Any]]:
        """Events of fractions that use more memory than their share, once for each time; ``digest`` marked the
        processes of ``rows`` before."""
        events = []
        for job, used, first in self.jobs.judge_shares(rows):
            if first:
                facts = {"allocation": job.allocation, "member": job.member, "used_mib": used}
                facts["limit_mib"] = job.meta.get("gpu_mem_limit_mib")
                facts["policy"] = job.meta.get("over_share")
                events.append(event("over_share", utc_now(), next(iter(used)), facts))
        return events

    async def folders(self, done: asyncio.Event) -> None:
        """Work folders against their limits until ``done``, in a thread: a large one takes its time to be counted."""
        while not done.is_set():
            try:
                over = await asyncio.get_event_loop().run_in_executor(None, self.jobs.folders_over)
            except (OSError, RuntimeError) as error:  # also: the jobs changed while they were walked
                log.error("work folders: %s", error)
                over = []
            for job, size in over:
                limit = job.meta.get("work_limit_mib")
                detail = f"the work folder holds {size} MiB, {limit} MiB are allowed"
                job.stop(
                    "SIGTERM", GRACE, {"code": "workdir_over_limit", "detail": detail, "retryable": False}
                )
            try:
                await asyncio.wait_for(done.wait(), FOLDER_SECONDS)
            except asyncio.TimeoutError:
                continue
