"""Decisions on record: each cycle that decided something, with what is needed to judge and to replay it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.utils.translation import gettext as _

from pool.engine.canonical import plan_hash
from pool.engine.decide import decide
from pool.engine.model import Evict, Kept, Layout, Member, Move, Place, Plan, Reserve, Snapshot
from pool.models import SchedulerCycle, SchedulerSnapshot, SchedulingPolicy
from pool.services.plan_apply import Applied
from pool.services.snapshot import policy_from
from pool.services.snapshot_store import snapshot_stored
from portal.kernel.errors import Conflict
from portal.kernel.units import to_ms

Op = Place | Reserve | Evict | Kept | Move | Layout


def decides(plan: Plan) -> bool:
    """Whether a plan does anything that must be accounted for; promises alone change nothing yet."""
    return bool(plan.places or plan.evicts or plan.moves or plan.layouts)


def cycle_open(
    *,
    plan: Plan,
    stored: SchedulerSnapshot,
    snapshot: Snapshot,
    policy: SchedulingPolicy | None,
    cause: str,
    at: datetime,
    only: tuple[int, ...] | None,
) -> SchedulerCycle:
    """Put a decision on record before it is carried out."""
    return SchedulerCycle.objects.create(
        started_at=at,
        cause=cause[:48],
        snapshot_hash=stored.hash,
        snapshot=stored,
        policy=policy,
        decided_at_ms=to_ms(at),
        only=None if only is None else list(only),
        plan_hash=plan_hash(plan),
        considered=len(snapshot.pending) if only is None else len(only),
        evicted=len(plan.evicts),
        waiting=len(plan.waiting),
        sizes={
            "nodes": len(snapshot.nodes),
            "cards": sum(len(node.gpus) for node in snapshot.nodes),
            "running": len(snapshot.running),
            "pending": len(snapshot.pending),
            "flavours": len(snapshot.quotas),
            "quota_nodes": sum(len(nodes) for nodes in snapshot.quotas.values()),
        },
        ops=ops_json(plan),
    )


def cycle_close(
    *, cycle: SchedulerCycle, applied: Sequence[Applied], steps: dict[str, int], took_ms: int
) -> None:
    """Note what became of it."""
    refused = [one for one in applied if one.allocation is None]
    SchedulerCycle.objects.filter(pk=cycle.pk).update(
        took_ms=took_ms,
        timings=steps,
        placed=len(applied) - len(refused),
        refused_on_apply=len(refused),
        refusals=[{"request": one.request_id, "code": one.refusal} for one in refused],
    )


def ops_json(plan: Plan) -> list[dict[str, Any]]:
    """The operations of a plan as they are stored and shown."""
    return [_op(op) for op in plan.ops]


def _op(op: Op) -> dict[str, Any]:
    match op:
        case Place():
            return {
                "op": "place",
                "request": op.request_id,
                "flavour": op.flavour,
                "charge_milli": op.charge_milli,
                "borrowed_milli": op.borrowed_milli,
                "ends_at": op.ends_at,
                "members": _members(op.members),
            }
        case Reserve():
            return {
                "op": "reserve",
                "request": op.request_id,
                "flavour": op.flavour,
                "at": op.start_at,
                "members": _members(op.members),
            }
        case Evict():
            return {
                "op": "evict",
                "allocation": op.allocation_id,
                "request": op.for_request_id,
                "cause": op.cause,
                "rule": op.rule,
                "figures": dict(op.figures),
                "ranks": list(op.members),
            }
        case Kept():
            return {
                "op": "keep",
                "request": op.request_id,
                "until": op.until,
                "members": _members(op.members),
            }
        case Move():
            return {
                "op": "move",
                "allocation": op.allocation_id,
                "request": op.for_request_id,
                "members": _members(op.members),
            }
        case Layout():
            return {
                "op": "layout",
                "gpu": op.gpu_id,
                "request": op.for_request_id,
                "profiles": [list(one) for one in op.profiles],
            }


def _members(members: Iterable[Member]) -> list[dict[str, Any]]:
    return [{"node": member.node_id, "gpus": [take.gpu_id for take in member.takes]} for member in members]


@dataclass(frozen=True, slots=True)
class Replayed:
    """A decision made again from what was kept of it. ``differing``: operations that only one of both has."""

    identical: bool
    plan_hash: str
    ops: int
    differing: tuple[dict[str, Any], ...] = ()


def decision_replay(*, cycle: SchedulerCycle) -> Replayed:
    """Decide again on the stored snapshot under the stored policy version at the stored moment, and compare.

    Conflict `decision_not_kept` where the snapshot is past its retention, `snapshot_damaged` where what was kept
    is not what the decision saw.
    """
    if cycle.snapshot is None or cycle.decided_at_ms is None:
        raise Conflict(
            code="decision_not_kept",
            detail=_("What this decision saw is past its retention."),
            extra={"cycle": cycle.pk},
        )
    plan = plan_again(cycle, snapshot_stored(cycle.snapshot))
    found = plan_hash(plan)
    if found == cycle.plan_hash:
        return Replayed(True, found, len(plan.ops))
    was, is_now = cycle.ops, ops_json(plan)
    differing = [{"only_in": "record", **op} for op in was if op not in is_now]
    differing += [{"only_in": "replay", **op} for op in is_now if op not in was]
    return Replayed(False, found, len(plan.ops), tuple(differing))


def plan_again(cycle: SchedulerCycle, snapshot: Snapshot, policy: dict[str, Any] | None = None) -> Plan:
    """The plan of a stored decision, under its own policy version or other switches."""
    values = policy if policy is not None else (cycle.policy.values if cycle.policy is not None else {})
    assert cycle.decided_at_ms is not None
    only = None if cycle.only is None else tuple(cycle.only)
    return decide(snapshot, policy_from(values), cycle.decided_at_ms, only=only)
