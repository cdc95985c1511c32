"""The small interface between the executor and a way to reach Slurm, and the order of one job."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol
from uuid import UUID

from pool.executors.slurm.read import Job, SlurmNode


@dataclass(frozen=True)
class JobOrder:
    """One job as it is submitted. ``gres`` is per node (``gpu:a100:2``), ``memory_mib`` and ``cpus`` are per node,
    ``minutes`` None: without an end. ``script`` is the whole batch script, ``output`` a path on the nodes."""

    name: str
    script: str
    nodes: tuple[str, ...]
    gres: str
    cpus: int
    memory_mib: int
    minutes: int | None
    folder: str
    output: str
    account: str = ""
    qos: str = ""
    partition: str = ""
    reservation: str = ""
    user: str = ""
    comment: str = ""


@dataclass(frozen=True)
class Association:
    """A limit of an account: GPUs at once in ``gres/gpu`` (and by type); None: no limit."""

    account: str
    limits: dict[str, int]


class SlurmTransport(Protocol):
    """A way to reach one Slurm. Every call raises `RetryableFailure` (away, slow) or `TerminalFailure` (refused)."""

    def version(self) -> tuple[int, int]:
        """Major and minor version of the controller; raises where it does not answer."""

    def jobs(self) -> list[Job]:
        """All jobs that the controller knows, those that ended lately included."""

    def find(self, uid: UUID, job_id: str) -> list[Job]:
        """The jobs of one allocation, with their states and nodes alone; what ended lately included."""

    def nodes(self) -> list[SlurmNode]:
        """All nodes."""

    def submit(self, order: JobOrder) -> str:
        """Submit; returns the job's id. `RetryableFailure` also where the answer was lost: look for its name."""

    def cancel(self, job_id: str) -> None:
        """End it: TERM, the site's KillWait, KILL; one that waits goes at once. An unknown one is no failure."""

    def signal(self, job_id: str, signal: str, *, everything: bool) -> None:
        """Send a signal to the batch script alone, or to everything of it. An unknown job is no failure."""

    def history(
        self,
        *,
        names: Iterable[str] = (),
        ids: Iterable[str] = (),
        since: datetime,
        until: datetime | None = None,
    ) -> list[Job]:
        """What the accounting knows of jobs by these names or ids (none: of all); `TerminalFailure` (`no_accounting`)
        where the site keeps none."""

    def prolong(self, job_id: str, minutes: int) -> None:
        """Set a running job's time limit, counted from its start."""

    def comment(self, job_id: str, text: str) -> None:
        """Write a job's comment."""

    def drain(self, node: str, reason: str) -> None:
        """Take no new work."""

    def resume(self, node: str) -> None:
        """Take work again."""

    def associations(self) -> list[Association]:
        """Limits of the accounts themselves (not of their users)."""

    def limit(self, account: str, limits: dict[str, int | None]) -> None:
        """Set some limits of an account; None removes one."""
