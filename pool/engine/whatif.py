"""Would this fit? The answer for an ask that nobody has made yet: place, quota, line, and what blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import takewhile
from operator import attrgetter

from pool.engine.allocate import Allocate
from pool.engine.decide import AHEAD_TOLD, decide, line_of
from pool.engine.fit import Need
from pool.engine.model import Member, Policy, Request, Snapshot, Waiting
from pool.engine.order import Line, fair_shares, queues_of
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
    snapshot: Snapshot,
    policy: Policy,
    now: int,
    request: Request,
    *,
    in_line: bool = True,
    world: World | None = None,
    alone: bool = False,
) -> Check:
    """Judge a hypothetical request as the newest in line. Its id must differ from all pending ones.

    With ``in_line`` False only place and quota are judged (no decision over all who wait). ``world``: the world of
    this snapshot where the caller keeps one; it is left as it was. ``alone``: only this request is decided about, for
    long lines: all others are known to be blocked and hold what the last whole plan promised (``Snapshot.promised``).
    """
    world = world if world is not None else World(snapshot)
    allocate = Allocate(Round(world, snapshot, policy, now, {}, users=dict(snapshot.users)))
    options = allocate.options(world.known(request))
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
    asked = replace(snapshot, pending=(*snapshot.pending, request))
    waiting = (
        _alone(world, asked, policy, now, request) if alone else _whole(world, asked, policy, now, request)
    )
    return Check(free_now, waiting is None, tuple(checks), options.why(), waiting)


def _whole(world: World, asked: Snapshot, policy: Policy, now: int, request: Request) -> Waiting | None:
    plan = decide(replace(asked, promised=()), policy, now, world=world)
    return next((one for one in plan.waiting if one.request_id == request.id), None)


def _alone(world: World, asked: Snapshot, policy: Policy, now: int, request: Request) -> Waiting | None:
    """What the request is told when nobody else is judged: promises bind it only where they were made to somebody
    who stands before it."""
    before = _before(world, asked, policy, request)
    ahead = {one.id for one in before}
    promised = tuple(one for one in asked.promised if one.request_id in ahead)
    plan = decide(replace(asked, promised=promised), policy, now, only=(request.id,), world=world)
    waiting = next((one for one in plan.waiting if one.request_id == request.id), None)
    if waiting is None:
        return None
    mine = line_of(request)
    line = [one.id for one in before if line_of(one) == mine]
    of = sum(line_of(one) == mine for one in asked.pending)
    return waiting._replace(position=len(line) + 1, of=of, ahead=tuple(line[-AHEAD_TOLD:]))


def _before(world: World, asked: Snapshot, policy: Policy, request: Request) -> list[Request]:
    """Who stands before a request, in order, as long as none of them starts."""
    pending = sorted(asked.pending, key=attrgetter("id"))
    shares = fair_shares(world.trees, pending, world.capacity, world.charge_first, world.shares)
    use = asked.user_use if policy.user_decay else None
    queues = queues_of(pending, use, policy.class_weights)
    line = Line(queues, world.trees, shares, world.charge_first, order=policy.order)
    return list(takewhile(lambda one: one.id != request.id, line))


def _admission(world: World, request: Request, need: Need) -> Admission | None:
    """The quota's answer, or None where the flavour has no quota tree (nothing is limited then)."""
    tree = world.trees.get(need.flavour or "")
    if tree is None or request.department_id not in tree.nodes:
        return None
    return admit(tree, request.department_id, need.charge_milli, interruptible=request.interruptible)
