"""The backfill action: when a blocked request could start, from the ends of what runs, and the promise that
keeps its place.

Each node gets the moment at which enough of its cards (fractions, slices) are free again; the earliest moment
at which enough nodes are there is tried first, and the place is sought in the pool as it will be then.
Earlier promises count as held until they end. Work without an end gives nothing back.
Rule: a request behind a promise starts early only if it ends before, or keeps off the promised places.
Source: BEHAVIOUR 5 (Backfill); EASY and conservative backfilling differ in how many blocked requests have a
promise (``Policy.max_reservations``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pool.engine.fit import Need
from pool.engine.model import Estimate, Gpu, Member, Node, Policy, Request, Take
from pool.engine.placement import find
from pool.engine.state import PoolState

BASIS_LEASE_ENDS = "lease_ends"
BASIS_WINDOW = "reservation"
NEVER = 1 << 62
"""A moment after all others: what has no end."""


@dataclass(frozen=True, slots=True)
class Occupied:
    """Something that holds places until ``ends_at`` (None = no end known), for windows not before
    ``starts_at``.
    """

    members: tuple[Member, ...]
    ends_at: int | None
    starts_at: int | None = None
    promise: bool = False
    """Nobody stands there yet: it is held for somebody."""

    def in_the_way(self, moment: int, duration_ms: int | None, floor: int) -> bool:
        """Whether it holds its places at some time of [moment, moment + duration)."""
        if self.ends_at is not None and max(self.ends_at, floor) <= moment:
            return False
        return self.starts_at is None or duration_ms is None or moment + duration_ms > self.starts_at


@dataclass(slots=True)
class Occupancy:
    """All that holds places, now or by promise, by node."""

    by_node: dict[int, list[tuple[Occupied, Member]]] = field(default_factory=dict)
    windows: list[int] = field(default_factory=list)
    """Beginnings of windows."""
    window_ends: set[int] = field(default_factory=set)

    _ends: dict[int, Ends] = field(default_factory=dict)

    def add(self, one: Occupied) -> None:
        for member in one.members:
            self.by_node.setdefault(member.node_id, []).append((one, member))
            self._ends.pop(member.node_id, None)
        if one.starts_at is not None:
            self.windows.append(one.starts_at)
            if one.ends_at is not None:
                self.window_ends.add(one.ends_at)

    def ends(self, node_id: int, floor: int) -> Ends:
        """When what holds places on a node ends; kept until more does. ``floor`` must always be the same."""
        found = self._ends.get(node_id)
        if found is None:
            found = self._ends[node_id] = Ends.of(self.by_node.get(node_id, ()), floor)
        return found


@dataclass(frozen=True, slots=True)
class Ends:
    """``moments``: when something on a node ends; by card what is held until when, windows aside, and until when
    anything of it is."""

    moments: set[int]
    takes: dict[int, list[tuple[int, Take]]]
    last: dict[int, int]

    @classmethod
    def of(cls, held: Iterable[tuple[Occupied, Member]], floor: int) -> Ends:
        moments: set[int] = set()
        takes: dict[int, list[tuple[int, Take]]] = {}
        last: dict[int, int] = {}
        for one, member in held:
            end = NEVER if one.ends_at is None else max(one.ends_at, floor)
            moments.add(end)
            if one.starts_at is not None:
                continue
            for take in member.takes:
                takes.setdefault(take.gpu_id, []).append((end, take))
                if end > last.get(take.gpu_id, floor):
                    last[take.gpu_id] = end
        return cls(moments, takes, last)


@dataclass(frozen=True, slots=True)
class Opening:
    """The first moment at which a request fits, where, and the hosts of those nodes as expected then."""

    at: int
    members: tuple[Member, ...]
    later: PoolState


@dataclass(frozen=True, slots=True)
class Horizon:
    """The pool over time: what is free now (``state``), and what holds places until when."""

    state: PoolState
    nodes: Sequence[Node]
    occupancy: Occupancy
    floor: int
    """What is past its end counts as free from this moment: it is being stopped."""

    def first_opening(self, request: Request, need: Need) -> Opening | None:
        """The earliest opening for a request, or None where what has an end never gives enough back."""
        if request.parts:
            return None
        openings = self._node_openings(request, need)
        # Before the first window that could be in the way space only grows, so bisection finds the earliest
        # moment; past it the answer is a moment that fits, if perhaps not the very first.
        if self.occupancy.windows and request.duration_ms is not None:
            bound = min(self.occupancy.windows) - request.duration_ms
            found = self._first([one for one in openings if one[0] <= bound], request, need)
            if found is not None:
                return found
        return self._first(openings, request, need)

    def opening_at(
        self, request: Request, need: Need, moment: int, nodes: Iterable[Node] | None = None
    ) -> Opening | None:
        """Whether a request fits at one given moment, for as long as it runs. Of other than ``nodes`` only what
        is free now counts."""
        if request.parts:
            return None
        state = self.state
        token = state.mark()
        for node in self.nodes if nodes is None else nodes:
            for one, member in self.occupancy.by_node.get(node.id, ()):
                if one.in_the_way(moment, request.duration_ms, self.floor) == one.promise:
                    (state.take(member, lenient=True) if one.promise else state.give_back(member))
        members = find(state, state.view(None, holds=False), request, need)
        held = (
            []
            if members is None
            else [self._hosts_held(member.node_id, moment, request) for member in members]
        )
        state.rollback(token)
        if members is None:
            return None
        return Opening(moment, members, state.fresh([member for rows in held for member in rows]))

    def _hosts_held(self, node_id: int, moment: int, request: Request) -> list[Member]:
        return [
            member
            for one, member in self.occupancy.by_node.get(node_id, ())
            if one.in_the_way(moment, request.duration_ms, self.floor)
        ]

    def _first(self, openings: Sequence[tuple[int, Node]], request: Request, need: Need) -> Opening | None:
        """The earliest of the moments at which the request fits: forward in growing steps, then back between."""
        least = request.nodes if request.min_nodes is None else max(1, request.min_nodes)
        moments = sorted({moment for moment, _ in openings[least - 1 :]})
        low, step, index = -1, 1, 0
        best: Opening | None = None
        while best is None and moments:
            best = self._try(openings, request, need, moments[index])
            if best is None:
                if index == len(moments) - 1:
                    return None
                low, index, step = index, min(index + step, len(moments) - 1), step * 2
        high = index
        while high - low > 1:
            middle = (low + high) // 2
            found = self._try(openings, request, need, moments[middle])
            if found is None:
                low = middle
            else:
                best, high = found, middle
        return best

    def _try(
        self, openings: Sequence[tuple[int, Node]], request: Request, need: Need, moment: int
    ) -> Opening | None:
        nodes = {node.id: node for at, node in openings if at <= moment}
        return self.opening_at(request, need, moment, nodes.values())

    def _node_openings(self, request: Request, need: Need) -> list[tuple[int, Node]]:
        """The moments at which each node may have room for one member: when enough of its cards are free, and,
        where the host's CPU or memory counts, whenever more of it comes back; and the ends of windows."""
        found: list[tuple[int, Node]] = []
        fleet, occupancy, floor = self.state.fleet, self.occupancy, self.floor
        asks_host, windows = request.cpu_milli or request.memory_mib, occupancy.window_ends
        cards = None if need.flavour is None else fleet.serving(request, need.flavour)
        whole = request.shape == "whole"
        for row in fleet.usable(request, need.flavour)[0]:
            node = fleet.nodes[row]
            ends, first = occupancy.ends(node.id, floor), floor
            if cards is not None:
                if len(cards[row]) < request.per_node and request.shape != "mig":
                    continue
                if whole:
                    moments = [ends.last.get(gpu.id, floor) for gpu in cards[row]]
                else:
                    moments = [
                        moment
                        for gpu in cards[row]
                        for moment in _card_openings(gpu, ends.takes.get(gpu.id, ()), request, need, floor)
                    ]
                if len(moments) < request.per_node:
                    continue
                moments.sort()
                first = moments[request.per_node - 1]
            if first < NEVER:
                found.append((first, node))
                again = ends.moments if asks_host else ends.moments & windows if windows else ()
                found += [(end, node) for end in sorted(again) if first < end < NEVER]
        found.sort(key=lambda row: (row[0], row[1].id))
        return found


def _card_openings(
    gpu: Gpu, takes: Iterable[tuple[int, Take]], request: Request, need: Need, floor: int
) -> list[int]:
    if request.shape == "mig":
        slices = [one for one in gpu.slices if one.profile == request.profile]
        return [
            max(
                (
                    end
                    for end, take in takes
                    if take.slice_id == one.id
                    or any(one.span[0] < high and low < one.span[1] for low, high in take.spans)
                ),
                default=floor,
            )
            for one in slices
        ]
    milli, mib = 1000, gpu.memory_mib
    held = sorted(takes, key=lambda row: row[0])
    used = sum(high - low for _, take in held for low, high in take.spans)
    shared = sum(take.memory_mib or gpu.memory_mib for _, take in held)
    moment = floor
    for end, take in held:
        if milli - used >= need.milli and mib - shared >= need.share_mib:
            break
        used -= sum(high - low for low, high in take.spans)
        shared -= take.memory_mib or gpu.memory_mib
        moment = end
    return [moment]


def estimate_from(opening: int, now: int, policy: Policy, basis: str = BASIS_LEASE_ENDS) -> Estimate:
    """A range that begins at the planned moment and allows for leases that are extended or end late."""
    wait = max(0, opening - now)
    slack = max(policy.estimate_min_slack_ms, wait * policy.estimate_slack_permille // 1000)
    return Estimate(opening, opening + slack, basis)
