"""Would this fit? The answer for an ask that nobody has made yet: place, quota, line, and what blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pool.engine.allocate import Allocate
from pool.engine.decide import decide
from pool.engine.fit import Need
from pool.engine.model import Member, Plan, Policy, Request, Snapshot, Waiting
from pool.engine.reasons import Reason, place_reason
from pool.engine.round import Round
from pool.engine.world import World
from quotas.engine.available import Admission, admit


@dataclass(frozen=True, slots=True)
class FlavourCheck:
    """One acceptable flavour: the quota's answer, and a free place or why there is none."""

    flavour: str | None
    charge_milli: int
    admission: Admission | None
    members: tuple[Member, ...] | None
    reason: Reason | None


@dataclass(frozen=True, slots=True)
class Check:
    """``free_now``: place and quota are there, others aside. ``starts_now``: it would start in the next
    cycle.

    ``waiting`` is the reason, position and range it would have in line; None when it starts.
    """

    free_now: bool
    starts_now: bool
    flavours: tuple[FlavourCheck, ...]
    refusal: Reason | None
    waiting: Waiting | None


def place_check(
    snapshot: Snapshot, policy: Policy, now: int, request: Request, *, in_line: bool = True
) -> Check:
    """Judge a hypothetical request as the newest in line. Its id must differ from all pending ones.

    With ``in_line`` False only place and quota are judged (no decision over all who wait).
    """
    world = World(snapshot)
    allocate = Allocate(Round(world, snapshot, policy, now, {}, users=dict(snapshot.users)))
    options = allocate.options(request)
    checks: list[FlavourCheck] = []
    for need in (need for needs in options.usable for need in needs):
        members = world.find(request, need, world.state.view(None))
        reason = None if members is not None else place_reason(world.state, request, need, policy)
        checks.append(
            FlavourCheck(need.flavour, need.charge_milli, _admission(world, request, need), members, reason)
        )
    free_now = any(check.members is not None for check in checks)
    if not in_line:
        return Check(free_now, free_now, tuple(checks), options.why(), None)
    plan = decide(replace(snapshot, pending=(*snapshot.pending, request)), policy, now, world=world)
    waiting = _waiting_of(plan, request.id)
    return Check(free_now, waiting is None, tuple(checks), options.why(), waiting)


def _admission(world: World, request: Request, need: Need) -> Admission | None:
    """The quota's answer, or None where the flavour has no quota tree (nothing is limited then)."""
    tree = world.trees.get(need.flavour or "")
    if tree is None or request.department_id not in tree.nodes:
        return None
    return admit(tree, request.department_id, need.charge_milli, interruptible=request.interruptible)


def _waiting_of(plan: Plan, request_id: int) -> Waiting | None:
    return next((one for one in plan.waiting if one.request_id == request_id), None)
