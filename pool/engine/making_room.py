"""What reclaim and preempt share: who asks, what is written down when room is made, and what is spared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pool.engine.fit import Need
from pool.engine.model import Evict, EvictCause, Kept, Request
from pool.engine.reasons import Reason
from pool.engine.round import Blocked, Round
from pool.engine.victims import Bench, Candidate, Found

Figures = Callable[[Candidate], Mapping[str, Any]]


def settle(
    round_: Round,
    bench: Bench,
    blocked: Blocked,
    found: Found,
    cause: EvictCause,
    rule: str,
    figures: Figures,
) -> None:
    """Book the answer of a search: victims leave, placements of this plan are withdrawn, the place is kept."""
    world, request = round_.world, blocked.request
    round_.preemptors += 1
    until = round_.now + round_.policy.keep_for_preemptor_ms
    evicted = evictions(round_, found.victims, request, cause, rule, figures)
    for one in found.victims:
        one.release(world)
        if one.placed is not None:
            round_.withdrawn.add(one.placed.request.id)
    world.take(found.request, found.need, found.members)
    bench.used(found.victims)
    round_.evicts += evicted
    for evict in evicted:
        round_.leaving[evict.allocation_id] = evict.members
    round_.new_keeps.append(Kept(request.id, found.members, until))
    blocked.lacks = None
    blocked.reason = making_room(round_, request, found.need, len(evicted), until)
    if evicted:
        round_.made_room[request.id] = blocked.reason


def evictions(
    round_: Round,
    victims: Sequence[Candidate],
    request: Request,
    cause: EvictCause,
    rule: str,
    figures: Figures,
) -> list[Evict]:
    """One eviction per allocation, by id; members taken alone are named, unless all of them go."""
    by_allocation: dict[int, list[Candidate]] = {}
    for one in victims:
        if one.running is not None:
            by_allocation.setdefault(one.running.allocation_id, []).append(one)
    answer: list[Evict] = []
    for allocation_id, parts in sorted(by_allocation.items()):
        running = parts[0].running
        assert running is not None
        numbers = tuple(sorted(number for part in parts for number in part.numbers))
        if len(numbers) == len(running.members):
            numbers = ()
        answer.append(Evict(allocation_id, request.id, cause, rule, figures(parts[0]), numbers))
    return answer


def making_room(round_: Round, request: Request, need: Need, evicted: int, until: int) -> Reason:
    """The reason of a request for which places are being freed."""
    figures = {"flavour": need.flavour, "evicts": evicted, "until": until}
    return Reason("making_room", figures, need.flavour)
