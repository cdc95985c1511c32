"""The smallest set of running work whose going lets a request start: candidates, order, put-back.

Candidates are offered in an order (``reclaim`` and ``preempt`` say which). They are taken away in thought, one
after the other, until quota and a place are there; then, backwards, each one without whom the request still
fits is put back. Who does not stand where the request will goes first. Gangs go whole, except the members that
an elastic one can do without. Work that this very plan would start gives way before anything that runs: that
costs nothing.
Source: BEHAVIOUR 5 (Reclaim, Preemption within a department).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from pool.engine.fit import Need
from pool.engine.ground import Ground
from pool.engine.loop_guard import MinimumRuns
from pool.engine.model import Member, Request, Running
from pool.engine.round import Placed, Round
from pool.engine.world import World

LOOK_FURTHER = 512
"""So many further candidates are looked at for a set of fewer."""
LOOK_AT_EACH = 16
"""So many victims are tried one by one; past that the steps grow and the answer is sought back between."""


@dataclass(slots=True, eq=False)
class Candidate:
    """Something that could give way: running work, some members of it, or a placement of this plan."""

    department: int
    flavour: str
    charge: int
    members: tuple[Member, ...]
    key: tuple[int, ...]
    running: Running | None = None
    placed: Placed | None = None
    numbers: tuple[int, ...] = ()

    @property
    def priority(self) -> int:
        return self.key[1]

    def release(self, world: World) -> None:
        """Free its places, and what it is charged."""
        for member in self.members:
            world.state.give_back(member)
        self.uncharge(world)

    def uncharge(self, world: World) -> None:
        """Take back only what it is charged."""
        if self.running is not None:
            one = self.running
            charges = world.charges_of(one, self.members if self.numbers else None)
            world.uncharge(one.department_id, charges, one.interruptible)
        elif self.placed is not None:
            request = self.placed.request
            charges = world.charges(request, self.placed.need)
            world.uncharge(request.department_id, charges, request.interruptible)


@dataclass(frozen=True, slots=True)
class Found:
    """A set that is enough, and where the request goes then."""

    victims: tuple[Candidate, ...]
    request: Request
    need: Need
    members: tuple[Member, ...]


class Bench:
    """All that could give way in this round, by flavour and department, best victim first."""

    def __init__(self, round_: Round) -> None:
        self.round, self.world = round_, round_.world
        self.minimum = MinimumRuns(round_.snapshot, round_.policy, round_.now)
        self._lists: dict[tuple[str, int], list[Candidate]] = {}
        self._unbegun: dict[tuple[str, int], list[Candidate]] = {}
        self._above: dict[str, tuple[int, list[int]]] = {}
        self._lowest: dict[tuple[str, int], int | None] = {}
        self._placed: dict[tuple[str, int], list[Placed]] = {}
        self._departments: dict[str, list[int]] | None = None
        for placed in round_.placed:
            key = (placed.need.flavour or "", placed.request.department_id)
            self._placed.setdefault(key, []).append(placed)

    def departments(self, flavour: str) -> list[int]:
        """Departments with work of a flavour, by id."""
        if self._departments is None:
            found: dict[str, set[int]] = {}
            for code, department in (*self.world.by_department, *self._placed):
                found.setdefault(code, set()).add(department)
            self._departments = {code: sorted(ids) for code, ids in found.items()}
        return self._departments.get(flavour, [])

    def of(self, flavour: str, department: int) -> list[Candidate]:
        """What runs in a department: lowest priority, newest start, smallest, id."""
        key = (flavour, department)
        if key not in self._lists:
            running = self.world.by_department.get(key, {}).values()
            found = [one for row in running for one in self._candidates(row)]
            found.sort(key=lambda one: one.key)
            self._lists[key] = found
        return self._lists[key]

    def above(self, flavour: str) -> list[int]:
        """Departments with work of a flavour that use more than their guarantee, by id."""
        tree = self.world.trees[flavour]
        known = self._above.get(flavour)
        if known is None or known[0] != tree.version:
            counters, guarantee = tree.counters, tree.guarantee
            found = [
                department
                for department in self.departments(flavour)
                if department in counters and counters[department].total > guarantee(department)
            ]
            known = self._above[flavour] = (tree.version, found)
        return known[1]

    def unbegun(self, flavour: str, department: int) -> list[Candidate]:
        """What this plan would start in a department, lowest priority and newest first."""
        key = (flavour, department)
        if key not in self._unbegun:
            found = [self._withdrawable(placed) for placed in self._placed.get(key, ())]
            self._unbegun[key] = sorted(found, key=lambda one: one.key)
        return self._unbegun[key]

    def lowest_priority(self, flavour: str, department: int) -> int | None:
        """The lowest priority of what a department runs or is to start, or None without any."""
        key = (flavour, department)
        if key not in self._lowest:
            found = list(self.world.priorities.get(key, ()))
            found += [placed.request.priority for placed in self._placed.get(key, ())]
            self._lowest[key] = min(found, default=None)
        return self._lowest[key]

    def used(self, victims: Iterable[Candidate]) -> None:
        """Take victims off the lists: one preemptor per victim."""
        gone = set(map(id, victims))
        for key in {(one.flavour, one.department) for one in victims}:
            for lists in (self._lists, self._unbegun):
                if key in lists:
                    lists[key] = [one for one in lists[key] if id(one) not in gone]

    def _candidates(self, one: Running) -> Iterator[Candidate]:
        if not one.interruptible or one.ending or one.allocation_id in self.round.leaving:
            return
        key = (1, one.priority, -one.started_at)
        core = one.members
        if one.min_nodes is not None and one.min_nodes < len(core):
            core = one.members[: one.min_nodes]
            for member in reversed(one.members[one.min_nodes :]):
                charge = sum(take.charge_milli for take in member.takes)
                rank = (*key, charge, one.allocation_id, -member.number)
                yield self._candidate(one, (member,), rank, (member.number,))
        numbers = tuple(member.number for member in core) if len(core) < len(one.members) else ()
        yield self._candidate(one, core, (*key, one.charge_milli, one.allocation_id, 1), numbers)

    def _candidate(
        self, one: Running, members: tuple[Member, ...], key: tuple[int, ...], numbers: tuple[int, ...]
    ) -> Candidate:
        flavour = one.flavour or ""
        charge = (
            sum(take.charge_milli for member in members for take in member.takes)
            if numbers
            else one.charge_milli
        )
        return Candidate(one.department_id, flavour, charge, members, key, running=one, numbers=numbers)

    def _withdrawable(self, placed: Placed) -> Candidate:
        request, place = placed.request, placed.place
        return Candidate(
            request.department_id,
            placed.need.flavour or "",
            placed.need.charge_milli,
            place.members,
            (0, request.priority, -request.queued_at, place.charge_milli, request.id, 0),
            placed=placed,
        )


@dataclass(slots=True)
class Search:
    """One request looking for room."""

    round: Round
    request: Request
    need: Need

    def find(self, line: Iterable[Candidate]) -> Found | None:
        """The smallest sufficient set from the front of a line; the world is left as it was."""
        self.round.searches += 1
        found = self._at_once()
        if found is not None:
            return found
        offered = iter(line)
        ground = None if self.request.parts else Ground(self.round.world, self.request, self.need)
        taken: list[Candidate] = []
        look_at = 1
        while found is None:
            one = next(offered, None)
            if one is not None:
                taken.append(one)
                if ground is not None:
                    ground.give_way(one.members)
                if len(taken) < look_at or (ground is not None and not ground.enough):
                    continue
            elif ground is not None and not ground.enough:
                return None
            found = self._look(taken, ground)
            if one is None and found is None:
                return None
            look_at = len(taken) + max(1, len(taken) // 2 if len(taken) >= LOOK_AT_EACH else 1)
        if ground is not None and len(found.victims) > 1:
            return self._fewer(found, [*taken, *islice(offered, LOOK_FURTHER)])
        return found

    def _at_once(self) -> Found | None:
        """The answer where what is ending anyway is enough: nobody needs be asked."""
        members = self._fits()
        return None if members is None else Found((), self.request, self.need, members)

    def _look(self, taken: Sequence[Candidate], ground: Ground | None) -> Found | None:
        """Who of those taken so far must go: first those on the nodes with room, else the first few of all."""
        if not self._quota_fits(taken):
            return None
        if ground is not None:
            standing = [one for one in taken if ground.stands_on(one.members)]
            members = self.without(standing)
            if members is not None:
                return self._put_back(standing, members)
            if len(standing) == len(taken):
                return None
        members = self.without(taken)
        if members is None:
            return None
        count, members = self._shortest(taken, members)
        return self._put_back(list(taken[:count]), members)

    def _fewer(self, found: Found, offered: Sequence[Candidate]) -> Found:
        """The same room from fewer pieces of work, where the order offers such: the smallest single one that is
        enough, else the largest and on; none more important than the order took, and not more than twice as
        much in all. One stopped gang is less harm than a dozen stopped jobs."""
        begun = [one for one in found.victims if one.running is not None]
        if len(begun) < 2:
            return found
        most, much = max(one.priority for one in begun), 2 * sum(one.charge for one in begun)
        unbegun = [one for one in found.victims if one.running is None]
        rest = [one for one in offered if one.running is not None and one.priority <= most]
        chosen = self._few(rest, unbegun, len(begun) - 1)
        if chosen is None or sum(one.charge for one in chosen) > much:
            return found
        members = self.without([*unbegun, *chosen])
        return found if members is None else self._put_back([*unbegun, *chosen], members)

    def _few(self, rest: list[Candidate], unbegun: Sequence[Candidate], most: int) -> list[Candidate] | None:
        """At most so many pieces that free what is lacking by amount; equal ones in the order offered."""
        lacking = self.need.charge_milli - self.round.world.state.free_milli.get(self.need.flavour or "", 0)
        lacking -= sum(one.charge for one in unbegun)
        chosen: list[Candidate] = []
        while lacking > 0:
            enough = [one for one in rest if one.charge >= lacking]
            if not rest or len(chosen) == most:
                return None
            one = min(enough, key=lambda row: row.charge) if enough else max(rest, key=lambda row: row.charge)
            chosen.append(one)
            rest = [other for other in rest if other is not one]
            lacking -= one.charge
        return chosen

    def _quota_fits(self, victims: Sequence[Candidate]) -> bool:
        """Whether the request may be charged once these are gone: far cheaper to know than a place, and what most
        searches fail on."""
        world = self.round.world
        with world.what_if():
            for one in victims:
                one.uncharge(world)
            return world.fits_quota(self.request, self.need)

    def _fits(self) -> tuple[Member, ...] | None:
        """Where the request goes as the world is now."""
        world = self.round.world
        if not world.fits_quota(self.request, self.need):
            return None
        if world.state.free_milli.get(self.need.flavour or "", 0) < self.need.charge_milli:
            return None
        ends_at = None if self.request.duration_ms is None else self.round.now + self.request.duration_ms
        return world.find(self.request, self.need, world.state.view(ends_at, request_id=self.request.id))

    def without(self, victims: Sequence[Candidate]) -> tuple[Member, ...] | None:
        """Where the request goes once these are gone; None where that is not enough."""
        world = self.round.world
        if not self._quota_fits(victims):
            return None
        with world.what_if():
            for one in victims:
                one.release(world)
            return self._fits()

    def _shortest(
        self, taken: Sequence[Candidate], members: tuple[Member, ...]
    ) -> tuple[int, tuple[Member, ...]]:
        low, high = -1, len(taken)
        while high - low > 1:
            middle = (low + high) // 2
            found = self.without(taken[:middle])
            if found is None:
                low = middle
            else:
                high, members = middle, found
        return high, members

    def _put_back(self, taken: list[Candidate], members: tuple[Member, ...]) -> Found:
        standing = [one for one in taken if _in_the_way(one, members, self.request)]
        if len(standing) < len(taken):
            found = self.without(standing)
            if found is not None:
                taken, members = standing, found
        for index in range(len(taken) - 1, -1, -1):
            rest = taken[:index] + taken[index + 1 :]
            found = self.without(rest)
            if found is not None:
                taken, members = rest, found
        return Found(tuple(taken), self.request, self.need, members)


def _in_the_way(one: Candidate, members: Sequence[Member], request: Request) -> bool:
    cards = {take.gpu_id: take for member in members for take in member.takes}
    hosts = {member.node_id for member in members} if _asks_host(request) else set()
    for member in one.members:
        if member.node_id in hosts:
            return True
        for take in member.takes:
            mine = cards.get(take.gpu_id)
            if mine is not None and any(a[0] < b[1] and b[0] < a[1] for a in take.spans for b in mine.spans):
                return True
    return False


def _asks_host(request: Request) -> bool:
    parts = request.parts or (request,)
    return any(part.cpu_milli or part.memory_mib for part in parts)
