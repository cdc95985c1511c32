"""The protocol of executors, its two failures, and the registry.

An executor acts on one member of an allocation at a time and is idempotent by the allocation's `uid`: calling
anything twice, or after a crash, changes nothing more. It never changes an allocation's state: what the
outside system really did comes back through the services (an agent's report, a poll), and only that is
believed.

There are two kinds of executors. Those of plain nodes are told what happens (an agent reports). The others are
`polled` (``PolledExecutor``): the installation looks at the outside system every second or so, and
``pool.services.polling`` turns what the look found into the same reports that an agent sends. A polled executor
keeps no truth of its own: whatever it remembers between two looks it must be able to lose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol, cast
from uuid import UUID

from django.utils.module_loading import import_string

from pool.models import AllocationMember, Cluster, Node

POLLED = "polled"
"""Nothing reports by itself: ``look`` is called again and again."""
WHOLE = "whole"
"""A gang is one order: ``start_whole`` is called once with all members instead of ``start`` for each."""
FRACTIONS = "fractions"
MIG = "mig"
HOLDS = "holds"
IMAGES = "images"
OUTPUT = "output"
"""The work's output can be read: ``output``."""
CORDONS = "cordons"
"""Nodes can be closed and opened there: ``cordon``, ``uncordon``."""
ADOPTS = "adopts"
"""Work that runs there already can become an allocation: ``adopt``."""
LIMITS = "limits"
"""Departments' quotas can be kept there as limits: ``limits``, ``limits_set``."""
ACCOUNTS = "accounts"
"""It keeps accounts of its own, which can be compared with ours: ``accounts``."""


class ExecutorFailure(Exception):
    """Base of both failures: `code` is stable and shown to people, `detail` explains."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail


class RetryableFailure(ExecutorFailure):
    """The outside system is away or busy: trying again later may work."""


class TerminalFailure(ExecutorFailure):
    """It cannot work however often it is tried: the order itself, the account or the node does not fit."""


@dataclass(frozen=True)
class CheckResult:
    """Whether a cluster can be used. Each finding is (code, ok, detail)."""

    findings: list[tuple[str, bool, str]] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every finding is good."""
        return all(good for _, good, _ in self.findings)


@dataclass(frozen=True)
class Found:
    """A node that the outside system knows: its name there and what it says about it.

    ``up``: it answers its own controller. ``open``: it takes new work (not drained, cordoned, reserved), else
    ``reason`` says why. ``gpus``: one report a card as agents send it (uuid, index, name, memory_mib, and `mig`:
    {enabled, slices: [{uuid, profile, gi, ci, start, size, memory_mib}]}); None where nothing is known of the
    cards now, which is not the same as no cards. A system that does not know a card's UUID makes one up that is
    always the same for the same card, with its kind before it (``SLURM-…``, ``K8S-…``).
    """

    name: str
    facts: dict[str, Any] = field(default_factory=dict)
    up: bool = True
    open: bool = True
    reason: str = ""
    gpus: tuple[dict[str, Any], ...] | None = None
    cpu_milli: int = 0
    memory_mib: int = 0
    address: str = ""
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Observation:
    """What the outside system says of a member: unknown, starting, running, exited, free.

    ``starting``: accepted there, not running yet (``detail`` says what it waits for). ``exited``: it ended, but
    something may still be on the cards. ``free``: nothing of it is left and its cards are free. ``unknown``: the
    system was asked for exactly this member and has never heard of it, or forgot it.
    ``error`` as agents report it: {code, detail, retryable}; set where it did not end by itself (node failed, put
    back in line, cancelled by somebody there, out of memory). ``failed_start``: the command never ran.
    """

    state: str
    pid: int | None = None
    exit_code: int | None = None
    detail: str = ""
    signal: int | None = None
    started_at: datetime | None = None
    ended_at: datetime | None = None
    account: str = ""
    external_id: str = ""
    devices: tuple[str, ...] = ()
    error: dict[str, Any] | None = None
    failed_start: bool = False


@dataclass(frozen=True)
class Work:
    """Something that runs there. ``uid`` and ``number`` where it carries an allocation's name, else it is not ours.

    ``gpu_indexes``: cards by their index on each node, {node: (0, 1)}; ``gpus`` their sum. ``user``, ``account``
    and ``name`` as the outside system shows them to everybody: never arguments, never environment.
    """

    external_id: str
    nodes: tuple[str, ...]
    user: str = ""
    account: str = ""
    name: str = ""
    gpus: int = 0
    gpu_indexes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    cpu_milli: int = 0
    memory_mib: int = 0
    started_at: datetime | None = None
    ends_at: datetime | None = None
    uid: UUID | None = None
    number: int | None = None


@dataclass(frozen=True)
class Limit:
    """One limit that we keep in an outside system: for whom there (an account, a namespace), on what (``gres/gpu``,
    ``requests.nvidia.com/gpu``), as it is there and as it should be, in units of the resource; None: no limit."""

    scope: str
    resource: str
    there: int | None
    wanted: int | None


@dataclass(frozen=True)
class Account:
    """What an outside system's own accounting says of one run of ours; ``ended_at`` None while it runs."""

    uid: UUID
    external_id: str
    started_at: datetime | None
    ended_at: datetime | None
    gpus: int
    state: str


Key = tuple[UUID, int]
"""A member: its allocation's uid and its number."""


@dataclass(frozen=True)
class Look:
    """One complete look at a cluster. A member that was asked for and is not in ``members``: nothing could be learnt of
    it this time (its controller does not know it, and the accounting is away); one that is gone is ``unknown``.

    ``others``: all work that was not asked for: of allocations that the installation thinks are over (strays), and
    foreign work. ``nodes``: None where they were not looked at this time.
    """

    members: dict[Key, Observation]
    others: list[Work] = field(default_factory=list)
    nodes: list[Found] | None = None


class Executor(Protocol):
    """What a package below `pool.executors` offers. ``can`` holds the capabilities above."""

    kind: str
    can: frozenset[str]

    def check(self, *, cluster: Cluster) -> CheckResult:
        """Look whether the cluster answers and is set up; changes nothing. A system that is away is a finding, not
        an exception."""

    def discover(self, *, cluster: Cluster) -> list[Found]:
        """Nodes of the outside system."""

    def start(self, *, member: AllocationMember) -> None:
        """Order the start. Returns once the order is durable; the confirmation comes by report."""

    def observe(self, *, member: AllocationMember) -> Observation:
        """What is known of the member now."""

    def checkpoint(self, *, member: AllocationMember, order: dict[str, Any]) -> None:
        """Order a checkpoint: `case` (its uid), `kind` signal or command, `signal`, `run` (a command), `seconds`."""

    def stop(self, *, member: AllocationMember, grace_s: float, signal: str = "SIGTERM") -> None:
        """Order the stop: signal, grace, kill. Of a member that is not known there: nothing to do, no failure. A stop
        of work that has not begun there ends it before it begins."""

    def release(self, *, member: AllocationMember) -> None:
        """Order the look that makes the member's GPUs "seen free". Polled systems remove what is left of it."""

    def ready(self, *, node: Node) -> bool:
        """Whether the node can be given orders now."""


class PolledExecutor(Executor, Protocol):
    """A system that is looked at. Every call raises ``RetryableFailure`` where the system is away: then nothing is
    concluded. Calls take at most some seconds (time-outs on everything).
    """

    def start_whole(self, *, members: Sequence[AllocationMember]) -> None:
        """With ``WHOLE``: order the start of all members of one allocation here, as one. A lost answer is a
        ``RetryableFailure``; the next call finds what was made, by the allocation's uid."""

    def look(self, *, cluster: Cluster, members: Sequence[AllocationMember], nodes: bool) -> Look:
        """Everything at once: an observation of each of these members, all other work, and (if asked) the nodes.
        No call per member: 5,000 members and 1,000 nodes within seconds."""

    def end(self, *, cluster: Cluster, external_id: str) -> None:
        """End work that should not be there (a stray) at once."""

    def output(self, *, member: AllocationMember, offset: int) -> bytes:
        """With ``OUTPUT``: what the member wrote from this byte on, at most 64 KiB; empty where there is no more."""

    def cordon(self, *, node: Node, reason: str) -> None:
        """With ``CORDONS``: no new work there. Done twice, done once."""

    def uncordon(self, *, node: Node) -> None:
        """With ``CORDONS``: take back what ``cordon`` did; what others closed there stays closed."""

    def adopt(self, *, cluster: Cluster, external_id: str, uid: UUID) -> None:
        """With ``ADOPTS``: write the allocation's uid on running work, so that looks find it from now on. What its
        owner wrote there stays."""

    def disown(self, *, cluster: Cluster, external_id: str, uid: UUID) -> None:
        """With ``ADOPTS``: take back what ``adopt`` wrote; of work that does not carry it, nothing."""

    def limits(self, *, cluster: Cluster) -> list[Limit]:
        """With ``LIMITS``: every limit we keep or would keep there. Those that differ are what a push changes;
        what should be comes from ``pool.services.outside_limits.wanted_limits``."""

    def limits_set(self, *, cluster: Cluster, limits: Sequence[Limit]) -> None:
        """With ``LIMITS``: make these as wanted."""

    def accounts(self, *, cluster: Cluster, since: datetime, until: datetime) -> list[Account]:
        """With ``ACCOUNTS``: runs of ours that were there in this time, by its own books."""


_KINDS = {
    Cluster.Executor.AGENT: "pool.executors.agent.executor.AgentExecutor",
    Cluster.Executor.SLURM: "pool.executors.slurm.executor.SlurmExecutor",
    Cluster.Executor.KUBERNETES: "pool.executors.kubernetes.executor.KubernetesExecutor",
}
_made: dict[str, Executor] = {}


def executor_for(cluster: Cluster) -> Executor:
    """The executor that drives this cluster; `executor_unknown` where this version has none for its kind."""
    kind = str(cluster.executor)
    if kind not in _made:
        path = _KINDS.get(cluster.executor)  # type: ignore[call-overload]
        if path is None:
            raise TerminalFailure("executor_unknown", f"no executor for {kind} in this version")
        factory: Callable[[], Executor] = import_string(path)
        _made[kind] = factory()
    return _made[kind]


def polled_executor(cluster: Cluster) -> PolledExecutor | None:
    """The executor of a cluster that must be looked at; None for one that reports by itself."""
    executor = executor_for(cluster)
    return cast(PolledExecutor, executor) if POLLED in executor.can else None
