"""One round of a decision: what the actions, in their order, have worked out so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pool.engine.backfill import Occupancy, Occupied
from pool.engine.fit import Need
from pool.engine.model import Evict, Kept, Layout, Move, Place, Policy, Request, Reserve, Snapshot, UserRoom
from pool.engine.reasons import Reason
from pool.engine.world import Charge, World
from quotas.engine.ids import NodeId

Shares = Mapping[str, Mapping[NodeId, float]]


@dataclass(slots=True)
class Blocked:
    """A request that stays in line, in the order it was looked at. ``lacks``: the flavour it would be charged,
    with what it takes of it, where taking back could help; None where nothing running is in its way."""

    request: Request
    reason: Reason
    reserve: Reserve | None
    lacks: Need | None = None


@dataclass(frozen=True, slots=True)
class Placed:
    request: Request
    need: Need
    place: Place


@dataclass(slots=True)
class Round:
    """``keeps``: places kept for requests that wait for them, by request. ``explain`` False: reasons without
    figures, and none for those of a kind that is known to be blocked."""

    world: World
    snapshot: Snapshot
    policy: Policy
    now: int
    shares: Shares
    keeps: dict[int, Kept] = field(default_factory=dict)
    explain: bool = True
    users: dict[int, UserRoom] = field(default_factory=dict)
    placed: list[Placed] = field(default_factory=list)
    reserves: list[Reserve] = field(default_factory=list)
    windows: list[Reserve] = field(default_factory=list)
    blocked: list[Blocked] = field(default_factory=list)
    evicts: list[Evict] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    layouts: list[Layout] = field(default_factory=list)
    new_keeps: list[Kept] = field(default_factory=list)
    spared: list[Evict] = field(default_factory=list)
    searches: int = 0
    preemptors: int = 0
    withdrawn: set[int] = field(default_factory=set)
    """Requests whose placement of this round gave way before it began."""
    leaving: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Allocations that end for somebody already, with the members that do (empty = all): one preemptor per
    victim."""
    made_room: dict[int, Reason] = field(default_factory=dict)
    """Requests that this plan frees places for already, with what to tell them."""
    _occupancy: Occupancy | None = None
    _early: list[Occupied] = field(default_factory=list)
    _charged: dict[int, list[Charge]] = field(default_factory=dict)

    def share(self, flavour: str, department: NodeId) -> float:
        return self.shares.get(flavour, {}).get(department, 0.0)

    @property
    def occupancy(self) -> Occupancy:
        """What holds places until when, with what this round placed; worked out when first asked for."""
        if self._occupancy is None:
            self._occupancy = Occupancy()
            for one in self.world.running.values():
                self._occupancy.add(Occupied(one.members, one.ends_at))
            for placed in self.placed:
                self._occupancy.add(Occupied(placed.place.members, placed.place.ends_at))
            for promised in self._early:
                self._occupancy.add(promised)
        return self._occupancy

    def occupy(self, one: Occupied) -> None:
        """Note what holds places by promise."""
        if self._occupancy is None:
            self._early.append(one)
        else:
            self._occupancy.add(one)

    def has_ends(self) -> bool:
        """Whether anything that holds places has an end: else no promise can be made."""
        if self._occupancy is not None and self._occupancy.window_ends:
            return True
        if any(one.starts_at is not None and one.ends_at is not None for one in self._early):
            return True
        return self.world.with_end > 0 or any(one.place.ends_at is not None for one in self.placed)

    def add(self, placed: Placed) -> None:
        """Note a placement that is booked in the world."""
        self.placed.append(placed)
        if self._occupancy is not None:
            self._occupancy.add(Occupied(placed.place.members, placed.place.ends_at))

    def hold(self, request: Request, kept: Kept) -> None:
        """Keep everybody else off places that are kept for a request; what of them is free already is charged
        to its department, the rest still is to those who stand there."""
        flavour = next(iter(request.flavours), "")
        free = [take for member in kept.members for take in member.takes if self.world.is_free(take)]
        self.world.hold_kept(kept)
        charge = [(flavour, sum(take.charge_milli for take in free))]
        self.world.charge(request.department_id, charge, request.interruptible)
        self.keeps[request.id] = kept
        self._charged[request.id] = charge

    def let_go(self, request: Request) -> Kept:
        """The places kept for a request, free for itself again (and for others)."""
        kept = self.keeps.pop(request.id)
        charge = self._charged.pop(request.id)
        self.world.uncharge(request.department_id, charge, request.interruptible)
        self.world.drop_kept(kept)
        return kept
