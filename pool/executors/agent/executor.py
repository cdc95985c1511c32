"""Orders to agents through `AgentCommand` rows; what came of them is in the member's own row."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from pool.executors.agent.spec import start_spec
from pool.executors.base import (
    FRACTIONS,
    HOLDS,
    MIG,
    CheckResult,
    Found,
    Observation,
    RetryableFailure,
)
from pool.models import AgentToken, AllocationMember, Cluster, Lease, Node
from pool.services.commands import CHECK_FREE, CHECKPOINT, START, STOP, command_send
from portal.kernel.clock import now

FRESH = timedelta(seconds=30)
STATES = {
    AllocationMember.State.RESERVED: "unknown",
    AllocationMember.State.STARTING: "starting",
    AllocationMember.State.RUNNING: "running",
    AllocationMember.State.EXITED: "exited",
    AllocationMember.State.FREE: "free",
    AllocationMember.State.LOST: "unknown",
}


class AgentExecutor:
    """`Executor` for clusters of plain nodes."""

    kind = "agent"
    can = frozenset({FRACTIONS, MIG, HOLDS})

    def check(self, *, cluster: Cluster) -> CheckResult:
        """One finding for each node: enrolled, and heard of lately."""
        findings = []
        for node in Node.objects.filter(cluster=cluster).exclude(schedulable=Node.Schedulable.RETIRED):
            enrolled = AgentToken.objects.filter(node=node, revoked_at=None).exists()
            findings.append(("agent_enrolled", enrolled, node.name))
            findings.append(("agent_heard", self.ready(node=node), node.name))
        return CheckResult(findings)

    def discover(self, *, cluster: Cluster) -> list[Found]:
        """Agents report themselves: what is known is in the rows."""
        return [Found(node.name, node.facts) for node in Node.objects.filter(cluster=cluster)]

    def ready(self, *, node: Node) -> bool:
        """Whether the agent was heard of within 30 s."""
        return node.last_heartbeat_at is not None and node.last_heartbeat_at > now() - FRESH

    def start(self, *, member: AllocationMember) -> None:
        """Queue the start; `agent_away` (retryable) where the node is not heard of."""
        if not self.ready(node=member.node):
            raise RetryableFailure("agent_away", f"{member.node.name} is not connected")
        command_send(
            node=member.node,
            kind=START,
            allocation=member.allocation,
            member=member.number,
            payload={"spec": start_spec(member)},
        )

    def observe(self, *, member: AllocationMember) -> Observation:
        """The member as its agent last reported it."""
        member.refresh_from_db()
        return Observation(STATES[AllocationMember.State(member.state)], member.pid, member.exit_code)

    def checkpoint(self, *, member: AllocationMember, order: dict[str, Any]) -> None:
        """Queue the checkpoint; the agent tells how it went."""
        command_send(
            node=member.node,
            kind=CHECKPOINT,
            allocation=member.allocation,
            member=member.number,
            payload=order,
        )

    def stop(self, *, member: AllocationMember, grace_s: float, signal: str = "SIGTERM") -> None:
        """Queue the stop. It waits in the row when the node is away: the agent gets it when it is back."""
        command_send(
            node=member.node,
            kind=STOP,
            allocation=member.allocation,
            member=member.number,
            payload={"grace_s": grace_s, "signal": signal},
        )

    def release(self, *, member: AllocationMember) -> None:
        """Queue the look at the member's cards and slices."""
        leases = Lease.objects.filter(
            allocation=member.allocation, member=member.number, ended_at=None
        ).select_related("gpu", "mig_slice")
        uuids = [lease.mig_slice.uuid if lease.mig_slice is not None else lease.gpu.uuid for lease in leases]
        command_send(
            node=member.node,
            kind=CHECK_FREE,
            allocation=member.allocation,
            member=member.number,
            payload={"gpu_uuids": uuids},
        )
