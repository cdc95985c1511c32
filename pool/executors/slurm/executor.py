"""Allocations as Slurm jobs: one job an allocation, found again by its name, believed as the controller shows it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import structlog

from pool.executors.base import (
    ACCOUNTS,
    ADOPTS,
    CORDONS,
    FRACTIONS,
    HOLDS,
    IMAGES,
    LIMITS,
    MIG,
    OUTPUT,
    POLLED,
    WHOLE,
    Account,
    CheckResult,
    ExecutorFailure,
    Found,
    Key,
    Limit,
    Look,
    Observation,
    TerminalFailure,
)
from pool.executors.slurm import orders
from pool.executors.slurm.checks import cluster_check
from pool.executors.slurm.cli import CommandLine
from pool.executors.slurm.files import folders_make, read_piece
from pool.executors.slurm.limits import limits_read
from pool.executors.slurm.read import MARK, Job
from pool.executors.slurm.rest import Rest
from pool.executors.slurm.seen import doubles, forgotten, latest_of, observation, work_of
from pool.executors.slurm.settings import SlurmSettings, problems, settings_of
from pool.executors.slurm.transport import SlurmTransport
from pool.models import AllocationMember, Cluster, Node
from pool.services.credentials import credential_read
from portal.kernel.clock import now

log = structlog.get_logger(__name__)
HISTORY = timedelta(days=30)
NAMES_AT_ONCE = 100
SECOND = timedelta(seconds=1)
SETTLED = timedelta(seconds=60)
"""A job that was ordered this long ago and is not known to the controller is looked for in the accounting."""


def transport_for(cluster: Cluster, settings: SlurmSettings) -> SlurmTransport:
    """The way to reach this Slurm. What slurmrestd cannot do is done by the command line."""
    commands = CommandLine(settings)
    if settings.transport == "rest":
        return Rest(settings, credential_read(cluster=cluster, name="jwt"), commands)
    return commands


class SlurmExecutor:
    """`PolledExecutor` for Slurm clusters."""

    kind = "slurm"
    can = frozenset({POLLED, WHOLE, FRACTIONS, MIG, HOLDS, IMAGES, OUTPUT, CORDONS, ADOPTS, LIMITS, ACCOUNTS})

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Any, SlurmTransport, SlurmSettings]] = {}

    def _at(self, cluster: Cluster) -> tuple[SlurmTransport, SlurmSettings]:
        """The transport of a cluster, made anew where its settings or credentials changed."""
        key = (cluster.settings, sorted(cluster.credentials.values_list("name", "set_at")))
        kept = self._kept.get(cluster.pk)
        if kept is None or kept[0] != key:
            settings = settings_of(cluster)
            kept = (key, transport_for(cluster, settings), settings)
            self._kept[cluster.pk] = kept
        return kept[1], kept[2]

    def settings_wrong(self, *, settings: dict[str, Any]) -> dict[str, str]:
        """What is wrong with settings that somebody wants to save: a code by name."""
        return problems(settings)

    # -- looking ------------------------------------------------------------------------------------------

    def check(self, *, cluster: Cluster) -> CheckResult:
        """Settings, controller, nodes with GPUs, partition, accounts, shared folder, accounting; changes nothing."""
        try:
            transport, settings = self._at(cluster)
        except ExecutorFailure as error:
            return CheckResult([(error.code, False, error.detail)])
        return CheckResult(cluster_check(cluster, transport, settings))

    def discover(self, *, cluster: Cluster) -> list[Found]:
        """Nodes of the partition (or all) that have GPUs or shards."""
        transport, settings = self._at(cluster)
        return [
            orders.found(node, settings)
            for node in transport.nodes()
            if not settings.partition or settings.partition in node.partitions
        ]

    def ready(self, *, node: Node) -> bool:
        """Whether the controller answered lately."""
        return node.cluster.away_since is None

    def observe(self, *, member: AllocationMember) -> Observation:
        """One member, by a whole look."""
        look = self.look(cluster=member.node.cluster, members=[member], nodes=False)
        return look.members.get((member.allocation.uid, member.number), Observation("unknown"))

    def look(self, *, cluster: Cluster, members: Sequence[AllocationMember], nodes: bool) -> Look:
        """One `squeue` for all members; the accounting for those that the controller does not know any more."""
        transport, _settings = self._at(cluster)
        began = now()
        jobs = transport.jobs()
        found = self.discover(cluster=cluster) if nodes else None
        latest = latest_of(jobs, {member.allocation.uid: member.external_id for member in members})
        missing = [
            member
            for member in members
            if member.allocation.uid not in latest and _should_be_known(member, began)
        ]
        past, asked = _past(transport, missing, began)
        seen: dict[Key, Observation] = {}
        for member in members:
            uid = member.allocation.uid
            job = latest.get(uid)
            if job is not None:
                seen[uid, member.number] = observation(job, member)
            elif uid in past:
                seen[uid, member.number] = forgotten(observation(past[uid], member), began)
            elif asked or member not in missing:
                seen[uid, member.number] = Observation("unknown")
        ours = {member.allocation.uid for member in members}
        others = [work_of(job) for job in jobs if not job.over and not job.waiting and job.uid not in ours]
        others += [
            work_of(job)
            for job in jobs
            if job.waiting and not job.adopted and job.uid is not None and job.uid not in ours
        ]
        for job in doubles(jobs, latest, ours):
            transport.cancel(job.id)
        for job in jobs:
            if job.adopted and job.waiting:  # Slurm begins it again by itself, and then it is nobody's here
                transport.comment(job.id, job.own_comment)
        self._prolong(transport, members, latest, began)
        return Look(members=seen, others=others, nodes=found)

    def _prolong(
        self,
        transport: SlurmTransport,
        members: Iterable[AllocationMember],
        jobs: dict[UUID, Job],
        at: datetime,
    ) -> None:
        """Leases that were extended: Slurm's limit must not end them."""
        for member in members:
            job, end = jobs.get(member.allocation.uid), member.allocation.expires_at
            if job is None or job.over or job.waiting or job.ended_at is None or end is None:
                continue
            if job.started_at is None or job.ended_at >= end + orders.SLACK / 3:
                continue
            minutes = int((end + orders.SLACK - job.started_at) / timedelta(minutes=1)) + 1
            try:
                transport.prolong(job.id, minutes)
            except ExecutorFailure as error:
                log.warning("time_limit_not_moved", job=job.id, code=error.code)

    # -- orders -------------------------------------------------------------------------------------------

    def start(self, *, member: AllocationMember) -> None:
        """Order the one job of the member's allocation."""
        self.start_whole(members=[member])

    def start_whole(self, *, members: Sequence[AllocationMember]) -> None:
        """Submit one job for all members, unless one by its name is there. The first order of all finds none: whoever
        comes second counts as a second attempt, and looks."""
        cluster = members[0].node.cluster
        transport, settings = self._at(cluster)
        order = orders.job_order(members, cluster, settings, now())
        allocation = members[0].allocation
        if allocation.start_attempts != 1 and any(
            not _cancelled_unseen(job) for job in transport.find(allocation.uid, members[0].external_id)
        ):
            return
        folders_make(settings)
        job_id = transport.submit(order)
        AllocationMember.objects.filter(pk__in=[member.pk for member in members], external_id="").update(
            external_id=job_id
        )

    def checkpoint(self, *, member: AllocationMember, order: dict[str, Any]) -> None:
        """Send the checkpoint's signal to everything of the job. Commands need a node's own agent:
        `checkpoint_command_unsupported`."""
        if order.get("kind") != "signal":
            raise TerminalFailure(
                "checkpoint_command_unsupported", "Slurm jobs are told by signal or by address"
            )
        transport, _settings = self._at(member.node.cluster)
        for job in self._jobs_of(transport, member):
            transport.signal(job.id, str(order.get("signal") or "SIGUSR1"), everything=True)

    def stop(self, *, member: AllocationMember, grace_s: float, signal: str = "SIGTERM") -> None:
        """The signal to everything of the job; with no grace its end. What waits is cancelled at once."""
        if member.given_up_at is not None:
            raise TerminalFailure("gang_is_whole", "a Slurm job does not give back single nodes")
        transport, _settings = self._at(member.node.cluster)
        for job in self._jobs_of(transport, member):
            if job.waiting:
                transport.cancel(job.id)
            elif grace_s > 0 and signal != "SIGKILL":
                transport.signal(job.id, signal, everything=True)
            else:
                transport.signal(job.id, "SIGKILL", everything=True)
                transport.cancel(job.id)

    def release(self, *, member: AllocationMember) -> None:
        """Nothing to order: the next look sees whether anything of the job is left on its nodes."""

    def end(self, *, cluster: Cluster, external_id: str) -> None:
        """Cancel a stray."""
        self._at(cluster)[0].cancel(external_id)

    def _jobs_of(self, transport: SlurmTransport, member: AllocationMember) -> list[Job]:
        """Its jobs that are not over: one, or two where an order was doubled."""
        found = transport.find(member.allocation.uid, member.external_id)
        return [job for job in found if not job.over]

    # -- the rest -----------------------------------------------------------------------------------------

    def output(self, *, member: AllocationMember, offset: int) -> bytes:
        """From the shared folder; a gang's output is one file, told under its first member."""
        if member.number != 0:
            return b""
        _transport, settings = self._at(member.node.cluster)
        return read_piece(settings.folder, f"{member.allocation.uid}.log", offset)

    def cordon(self, *, node: Node, reason: str) -> None:
        """Drain it."""
        self._at(node.cluster)[0].drain(node.name, reason)

    def uncordon(self, *, node: Node) -> None:
        """Resume it."""
        self._at(node.cluster)[0].resume(node.name)

    def adopt(self, *, cluster: Cluster, external_id: str, uid: UUID) -> None:
        """Write the allocation's uid before the job's own comment."""
        transport, job = self._job(cluster, external_id)
        if job is None or job.over:
            raise TerminalFailure("work_over", f"job {external_id} is not there any more")
        if job.uid not in (None, uid):
            raise TerminalFailure("adopted_already", f"job {external_id} carries another allocation")
        transport.comment(external_id, f"{MARK}{uid} {job.own_comment}".strip())

    def disown(self, *, cluster: Cluster, external_id: str, uid: UUID) -> None:
        """Leave the job its own comment."""
        transport, job = self._job(cluster, external_id)
        if job is not None and job.adopted and job.uid == uid:
            transport.comment(external_id, job.own_comment)

    def _job(self, cluster: Cluster, external_id: str) -> tuple[SlurmTransport, Job | None]:
        transport, _settings = self._at(cluster)
        return transport, next((job for job in transport.jobs() if job.id == external_id), None)

    def limits(self, *, cluster: Cluster) -> list[Limit]:
        """GrpTRES of the departments' accounts against their quotas."""
        transport, settings = self._at(cluster)
        return limits_read(cluster, transport.associations(), settings)

    def limits_set(self, *, cluster: Cluster, limits: Sequence[Limit]) -> None:
        """Set GrpTRES, one call an account."""
        transport, _settings = self._at(cluster)
        by_account: dict[str, dict[str, int | None]] = {}
        for item in limits:
            by_account.setdefault(item.scope, {})[item.resource] = item.wanted
        for account, values in sorted(by_account.items()):
            transport.limit(account, values)

    def accounts(self, *, cluster: Cluster, since: datetime, until: datetime) -> list[Account]:
        """Our jobs in the accounting."""
        transport, _settings = self._at(cluster)
        return [
            Account(job.uid, job.id, job.started_at, job.ended_at, job.gpus, "/".join(sorted(job.states)))
            for job in transport.history(since=since, until=until)
            if job.uid is not None
        ]


def _should_be_known(member: AllocationMember, at: datetime) -> bool:
    """Whether Slurm must have heard of it, so that not finding it says something."""
    if member.external_id or member.state not in (AllocationMember.State.RESERVED,):
        return True
    return member.ordered_at is not None and member.ordered_at < at - SETTLED


def _past(
    transport: SlurmTransport, members: Sequence[AllocationMember], at: datetime
) -> tuple[dict[UUID, Job], bool]:
    """Jobs that the controller forgot, and whether anybody could be asked. Sites without accounting have nobody: then
    what the controller does not know is unknown. An accounting that is away leaves the question open."""
    out: dict[UUID, Job] = {}
    names = sorted({orders.job_name(member) for member in members})
    for begin in range(0, len(names), NAMES_AT_ONCE):
        try:
            found = transport.history(names=names[begin : begin + NAMES_AT_ONCE], since=at - HISTORY)
        except ExecutorFailure as error:
            return out, _nobody_to_ask(error)
        # The accounting may say RUNNING of a job that a controller lost: only an end is believed.
        out.update(latest_of(job for job in found if job.over))
    # Work that was taken in keeps the name that its owner gave it: it is asked for by its id.
    by_id = {member.external_id: member for member in members if member.allocation.uid not in out}
    numbers = sorted(number for number in by_id if number.isdecimal())
    for begin in range(0, len(numbers), NAMES_AT_ONCE):
        try:
            found = transport.history(ids=numbers[begin : begin + NAMES_AT_ONCE], since=at - HISTORY)
        except ExecutorFailure as error:
            return out, _nobody_to_ask(error)
        for job in found:
            member = by_id.get(job.id)
            # Numbers begin anew some day: one that ended before this work began is another job's.
            if member is None or not job.over or job.uid not in (None, member.allocation.uid):
                continue
            # Slurm tells whole seconds, the begin of work that was taken in is the moment in which it was.
            if member.started_at is None or job.ended_at is None or job.ended_at + SECOND > member.started_at:
                out[member.allocation.uid] = job
    return out, True


def _nobody_to_ask(error: ExecutorFailure) -> bool:
    """Whether there is no accounting at all; what else goes wrong there may be otherwise at the next look."""
    if error.code in ("no_accounting", "command_missing"):
        return True
    log.info("accounting_away", code=error.code, detail=error.detail)
    return False


def _cancelled_unseen(job: Job) -> bool:
    """A job that was cancelled before it began: a new one may take its place."""
    return job.over and not job.nodes
