"""When a blocked request could start, from the ends of what runs, and the promise that keeps its place.

The earliest end time at which the request fits is found by bisection over the known ends: between now and
then space is only given back, since earlier promises are booked as held until they end. Work without an end
gives nothing back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pool.engine.fit import Need
from pool.engine.model import Estimate, Member, Node, Policy, Request
from pool.engine.placement import find
from pool.engine.state import PoolState

BASIS_LEASE_ENDS = "lease_ends"
BASIS_WINDOW = "reservation"


@dataclass(frozen=True, slots=True)
class Occupied:
    """Something that holds places until ``ends_at`` (None = no end known), for windows not before
    ``starts_at``.
    """

    members: tuple[Member, ...]
    ends_at: int | None
    starts_at: int | None = None

    def in_the_way(self, moment: int, duration_ms: int | None, floor: int) -> bool:
        """Whether it holds its places at some time of [moment, moment + duration)."""
        if self.ends_at is not None and max(self.ends_at, floor) <= moment:
            return False
        return self.starts_at is None or duration_ms is None or moment + duration_ms > self.starts_at


@dataclass(frozen=True, slots=True)
class Opening:
    """The first moment at which a request fits, where, and the pool as expected then."""

    at: int
    members: tuple[Member, ...]
    later: PoolState


def first_opening(
    nodes: Sequence[Node],
    occupied: Sequence[Occupied],
    request: Request,
    need: Need,
    now: int,
    overdue_ms: int,
) -> Opening | None:
    """The earliest opening for a request, or None where what has an end never gives enough back.

    What is past its end counts as free ``overdue_ms`` from now: it is being stopped.
    """
    floor = now + overdue_ms
    moments = sorted({max(one.ends_at, floor) for one in occupied if one.ends_at is not None})
    relevant = _relevant(nodes, need)
    # Before the first window that could be in the way space only grows, so bisection finds the earliest moment;
    # past it the answer is a moment that fits, if perhaps not the very first.
    windows = [one.starts_at for one in occupied if one.starts_at is not None]
    if windows and request.duration_ms is not None:
        bound = min(windows) - request.duration_ms
        found = _bisect([one for one in moments if one <= bound], relevant, occupied, request, need, floor)
        if found is not None:
            return found
    return _bisect(moments, relevant, occupied, request, need, floor)


def opening_at(
    nodes: Sequence[Node], occupied: Sequence[Occupied], request: Request, need: Need, moment: int, floor: int
) -> Opening | None:
    """Whether a request fits at one given moment, for as long as it runs."""
    return _opening_at(_relevant(nodes, need), occupied, request, need, moment, floor)


def _bisect(
    moments: Sequence[int],
    nodes: Sequence[Node],
    occupied: Sequence[Occupied],
    request: Request,
    need: Need,
    floor: int,
) -> Opening | None:
    best: Opening | None = None
    low, high = 0, len(moments) - 1
    while low <= high:
        middle = (low + high) // 2 if best is not None else high
        opening = _opening_at(nodes, occupied, request, need, moments[middle], floor)
        if opening is not None:
            best, high = opening, middle - 1
        elif best is None:
            return None
        else:
            low = middle + 1
    return best


def _opening_at(
    nodes: Sequence[Node], occupied: Sequence[Occupied], request: Request, need: Need, moment: int, floor: int
) -> Opening | None:
    held = [
        member
        for one in occupied
        if one.in_the_way(moment, request.duration_ms, floor)
        for member in one.members
    ]
    later = PoolState(nodes, held)
    members = find(later, later.view(None), request, need)
    return None if members is None else Opening(moment, members, later)


def _relevant(nodes: Sequence[Node], need: Need) -> list[Node]:
    if need.flavour is None:
        return list(nodes)
    return [node for node in nodes if any(gpu.flavour == need.flavour for gpu in node.gpus)]


def estimate_from(opening: int, now: int, policy: Policy, basis: str = BASIS_LEASE_ENDS) -> Estimate:
    """A range that begins at the planned moment and allows for leases that are extended or end late."""
    wait = max(0, opening - now)
    slack = max(policy.estimate_min_slack_ms, wait * policy.estimate_slack_permille // 1000)
    return Estimate(opening, opening + slack, basis)
