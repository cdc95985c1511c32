"""The protocol of executors, its two failures, and the registry.

An executor acts on one member of an allocation at a time and is idempotent by the allocation's `uid`: calling
anything twice, or after a crash, changes nothing more. It never changes an allocation's state: what the
outside system really did comes back through the services (an agent's report, a poll), and only that is
believed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from django.utils.module_loading import import_string

from pool.models import AllocationMember, Cluster, Node


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
    """A node that the outside system knows: its name there and what it says about it."""

    name: str
    facts: dict[str, Any]


@dataclass(frozen=True)
class Observation:
    """What the outside system says of a member: unknown, starting, running, exited, free."""

    state: str
    pid: int | None = None
    exit_code: int | None = None
    detail: str = ""


class Executor(Protocol):
    """What a package below `pool.executors` offers."""

    kind: str

    def check(self, *, cluster: Cluster) -> CheckResult:
        """Look whether the cluster answers and is set up; changes nothing."""

    def discover(self, *, cluster: Cluster) -> list[Found]:
        """Nodes of the outside system."""

    def start(self, *, member: AllocationMember) -> None:
        """Order the start. Returns once the order is durable; the confirmation comes by report."""

    def observe(self, *, member: AllocationMember) -> Observation:
        """What is known of the member now."""

    def checkpoint(self, *, member: AllocationMember, order: dict[str, Any]) -> None:
        """Order a checkpoint: `case` (its uid), `kind` signal or command, `signal`, `run` (a command), `seconds`."""

    def stop(self, *, member: AllocationMember, grace_s: float, signal: str = "SIGTERM") -> None:
        """Order the stop: signal, grace, kill."""

    def release(self, *, member: AllocationMember) -> None:
        """Order the look that makes the member's GPUs "seen free"."""

    def ready(self, *, node: Node) -> bool:
        """Whether the node can be given orders now."""


_KINDS = {
    Cluster.Executor.AGENT: "pool.executors.agent.executor.AgentExecutor",
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
