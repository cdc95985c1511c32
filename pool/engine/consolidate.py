"""The consolidate action (opt-in): movable work is moved where that lets a blocked request start.

Only work that said it can be started again elsewhere from its checkpoint is moved, the newest first, as little
as is enough; and only where every piece moved has another place at once. Quotas do not change by it: nobody
loses anything but the time of a restart. Source: KAI-Scheduler's consolidation; BEHAVIOUR 5.
"""

from __future__ import annotations

from pool.engine.loop_guard import MinimumRuns
from pool.engine.making_room import making_room
from pool.engine.model import Kept, Move, Running
from pool.engine.reclaim import Kind, kind_of
from pool.engine.round import Blocked, Round
from pool.engine.victims import Candidate, Found, Search


def run(round_: Round) -> None:
    """Find moves for blocked requests, in line order."""
    if not round_.policy.consolidate:
        return
    minimum = MinimumRuns(round_.snapshot, round_.policy, round_.now)
    hopeless: set[Kind] = set()
    for blocked in round_.blocked:
        if blocked.lacks is None or blocked.request.id in round_.keeps:
            continue
        kind = kind_of(round_, blocked.request)
        if kind not in hopeless and not _consolidate(round_, blocked, minimum):
            hopeless.add(kind)


def _consolidate(round_: Round, blocked: Blocked, minimum: MinimumRuns) -> bool:
    need = blocked.lacks
    assert need is not None
    world = round_.world
    if not world.fits_quota(blocked.request, need):
        return False
    movable = [
        one
        for one in world.running.values()
        if one.movable
        and one.asks is not None
        and one.flavour == need.flavour
        and not one.ending
        and one.allocation_id not in round_.leaving
        and not minimum.protects(one, blocked.request.department_id, None, reclaim=False)
    ]
    movable.sort(key=lambda one: (-one.started_at, one.charge_milli, one.allocation_id))
    line = [_candidate(one) for one in movable]
    found = Search(round_, blocked.request, need).find(line)
    if found is None or not found.victims or len(found.victims) > round_.policy.max_victims:
        return False
    return _carry_out(round_, blocked, found)


def _candidate(one: Running) -> Candidate:
    return Candidate(
        one.department_id, one.flavour or "", one.charge_milli, one.members, (1, one.priority), running=one
    )


def _carry_out(round_: Round, blocked: Blocked, found: Found) -> bool:
    """Book the request and every piece moved; undone where one of them has no other place."""
    world, token = round_.world, round_.world.mark()
    movers = [one.running for one in found.victims if one.running is not None]
    for one in movers:
        world.release(one)
    world.take(found.request, found.need, found.members)
    moves: list[Move] = []
    for one in sorted(movers, key=lambda row: (-row.charge_milli, row.allocation_id)):
        asks = one.asks
        need = world.need(asks, one.flavour or "") if asks is not None else None
        view = world.state.view(one.ends_at)
        members = world.find(asks, need, view) if asks is not None and need is not None else None
        if members is None or asks is None or need is None:
            world.rollback(token)
            return False
        world.take(asks, need, members)
        moves.append(Move(one.allocation_id, blocked.request.id, members))
    until = round_.now + round_.policy.keep_for_preemptor_ms
    round_.moves += moves
    round_.new_keeps.append(Kept(blocked.request.id, found.members, until))
    for move in moves:
        round_.leaving[move.allocation_id] = ()
        moved = world.running[move.allocation_id]
        round_.new_keeps.append(Kept(moved.request_id, move.members, until))
    blocked.lacks = None
    blocked.reason = making_room(round_, blocked.request, found.need, len(moves), until)
    round_.made_room[blocked.request.id] = blocked.reason
    return True
