"""An outside system in memory: what the polling services are tried with where the real ones would be slow, and with
faults at the very moment that a test wants them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

from pool.executors.base import (
    ACCOUNTS,
    ADOPTS,
    CORDONS,
    LIMITS,
    OUTPUT,
    POLLED,
    WHOLE,
    Account,
    CheckResult,
    Found,
    Limit,
    Look,
    Observation,
    RetryableFailure,
    TerminalFailure,
    Work,
)
from pool.models import AllocationMember, Cluster, Node
from portal.kernel.clock import now


@dataclass
class Run:
    """One run there: of one member."""

    external_id: str
    uid: UUID | None
    number: int
    node: str
    state: str = "running"
    exit_code: int | None = None
    signal: int | None = None
    started_at: datetime | None = None
    ended_at: datetime | None = None
    deaf: bool = False
    stuck: bool = False
    """Not even a kill ends it: it hangs in the driver."""
    written: bytes = b""
    indexes: tuple[int, ...] = (0,)
    gpus: int | None = None
    """How many cards it has; as many as ``indexes`` names, but where nobody told yet which."""
    error: dict[str, Any] | None = None


@dataclass
class MemorySystem:
    """`PolledExecutor` whose outside system is this object; its faults: ``away``, ``late``, ``lose``, ``refuse``."""

    kind: str = "slurm"
    can: frozenset[str] = frozenset({POLLED, WHOLE, OUTPUT, CORDONS, ADOPTS, LIMITS, ACCOUNTS})
    runs: list[Run] = field(default_factory=list)
    nodes: list[Found] = field(default_factory=list)
    books: list[Account] = field(default_factory=list)
    there: list[Limit] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    away: bool = False
    late: bool = False
    """It does what it is told, and every answer comes too late."""
    lose: bool = False
    refuse: bool = False
    pending: bool = False
    _next: int = 100

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if self.away or (self.late and name != "start"):
            raise RetryableFailure("controller_away", "nobody answers")

    def of(self, member: AllocationMember) -> list[Run]:
        return [run for run in self.runs if (run.uid, run.number) == (member.allocation.uid, member.number)]

    def check(self, *, cluster: Cluster) -> CheckResult:
        return CheckResult([("controller_answers", not self.away, "")])

    def discover(self, *, cluster: Cluster) -> list[Found]:
        self._call("discover")
        return self.nodes

    def start(self, *, member: AllocationMember) -> None:
        raise NotImplementedError

    def start_whole(self, *, members: Sequence[AllocationMember]) -> None:
        self._call("start")
        if self.refuse:
            self.refuse = False
            raise TerminalFailure("account_unknown", "no such account")
        for member in members:
            if not self.of(member):
                self._next += 1
                uid, state = member.allocation.uid, "starting" if self.pending else "running"
                self.runs.append(
                    Run(str(self._next), uid, member.number, member.node.name, state, started_at=now())
                )
        if self.lose or self.late:
            self.lose = False
            raise RetryableFailure("answer_lost", "time-out")

    def observe(self, *, member: AllocationMember) -> Observation:
        self._call("observe")
        return self._seen(member)

    def _seen(self, member: AllocationMember) -> Observation:
        found = self.of(member)
        if not found:
            return Observation("unknown")
        run = found[-1]
        if run.state == "starting":
            return Observation("starting", external_id=run.external_id, detail="Priority")
        if run.state == "running":
            return Observation(
                "running", started_at=run.started_at, external_id=run.external_id, account="lin"
            )
        return Observation(
            run.state,
            exit_code=run.exit_code,
            signal=run.signal,
            started_at=run.started_at,
            ended_at=run.ended_at,
            external_id=run.external_id,
            error=run.error,
        )

    def checkpoint(self, *, member: AllocationMember, order: dict[str, Any]) -> None:
        self._call("checkpoint")

    def stop(self, *, member: AllocationMember, grace_s: float, signal: str = "SIGTERM") -> None:
        self._call(f"stop {signal}")
        for run in self.of(member):
            if run.stuck or (run.deaf and signal != "SIGKILL"):
                continue
            if run.state in ("starting", "running"):
                self.over(run, None, 9 if signal == "SIGKILL" else 15)

    def over(self, run: Run, code: int | None = 0, signal: int | None = None) -> None:
        run.state, run.exit_code, run.signal, run.ended_at = "free", code, signal, now()

    def release(self, *, member: AllocationMember) -> None:
        self._call("release")

    def ready(self, *, node: Node) -> bool:
        return not self.away

    def look(self, *, cluster: Cluster, members: Sequence[AllocationMember], nodes: bool) -> Look:
        self._call("look")
        asked = {(member.allocation.uid, member.number) for member in members}
        return Look(
            members={(member.allocation.uid, member.number): self._seen(member) for member in members},
            others=[
                Work(
                    run.external_id,
                    (run.node,),
                    user="wang",
                    name="job",
                    gpus=len(run.indexes) if run.gpus is None else run.gpus,
                    gpu_indexes={run.node: run.indexes},
                    started_at=run.started_at,
                    uid=run.uid,
                    number=run.number,
                )
                for run in self.runs
                if (run.uid, run.number) not in asked and run.state in ("starting", "running")
            ],
            nodes=self.nodes if nodes else None,
        )

    def end(self, *, cluster: Cluster, external_id: str) -> None:
        self._call(f"end {external_id}")
        for run in self.runs:
            if run.external_id == external_id:
                self.over(run, None, 9)

    def output(self, *, member: AllocationMember, offset: int) -> bytes:
        self._call("output")
        return b"".join(run.written for run in self.of(member))[offset : offset + 65536]

    def cordon(self, *, node: Node, reason: str) -> None:
        self._call(f"cordon {node.name} {reason}")

    def uncordon(self, *, node: Node) -> None:
        self._call(f"uncordon {node.name}")

    def adopt(self, *, cluster: Cluster, external_id: str, uid: UUID) -> None:
        self._call(f"adopt {external_id}")
        for run in self.runs:
            if run.external_id == external_id:
                run.uid = uid

    def disown(self, *, cluster: Cluster, external_id: str, uid: UUID) -> None:
        self._call(f"disown {external_id}")
        for run in self.runs:
            if (run.external_id, run.uid) == (external_id, uid):
                run.uid = None

    def limits(self, *, cluster: Cluster) -> list[Limit]:
        self._call("limits")
        return self.there

    def limits_set(self, *, cluster: Cluster, limits: Sequence[Limit]) -> None:
        self._call("limits_set")
        changed = {(item.scope, item.resource) for item in limits}
        self.there = [
            Limit(item.scope, item.resource, item.wanted, item.wanted)
            if (item.scope, item.resource) in changed
            else item
            for item in self.there
        ]

    def accounts(self, *, cluster: Cluster, since: datetime, until: datetime) -> list[Account]:
        self._call("accounts")
        return self.books
