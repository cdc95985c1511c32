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
from dataclasses import dataclass, field

from pool.engine.fit import Need
from pool.engine.loop_guard import MinimumRuns
from pool.engine.model import Member, Request, Running
from pool.engine.round import Placed, Round
from pool.engine.world import World

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

    def release(self, world: World) -> None:
        if self.running is not None:
            world.release(self.running, self.members if self.numbers else None)
        elif self.placed is not None:
            request = self.placed.request
            for member in self.members:
                world.state.give_back(member)
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
        self._lowest: dict[tuple[str, int], int | None] = {}
        self._placed: dict[tuple[str, int], list[Placed]] = {}
        for placed in round_.placed:
            key = (placed.need.flavour or "", placed.request.department_id)
            self._placed.setdefault(key, []).append(placed)

    def departments(self, flavour: str) -> list[int]:
        """Departments with work of a flavour, by id."""
        found = {department for code, department in self.world.by_department if code == flavour}
        found |= {department for code, department in self._placed if code == flavour}
        return sorted(found)

    def of(self, flavour: str, department: int) -> list[Candidate]:
        """A department's candidates: not begun yet, lowest priority, newest start, smallest, id."""
        key = (flavour, department)
        if key not in self._lists:
            running = self.world.by_department.get(key, {}).values()
            found = [one for row in running for one in self._candidates(row)]
            found += [self._unbegun(placed) for placed in self._placed.get(key, ())]
            found.sort(key=lambda one: one.key)
            self._lists[key] = found
        return self._lists[key]

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
            self._lists[key] = [one for one in self._lists[key] if id(one) not in gone]

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

    def _unbegun(self, placed: Placed) -> Candidate:
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
    looks: int = field(default=0)

    def find(self, line: Iterable[Candidate]) -> Found | None:
        """The smallest sufficient set from the front of a line; the world is left as it was."""
        world = self.round.world
        token = world.mark()
        taken: list[Candidate] = []
        failed, look_at, members = 0, 1, None
        for one in line:
            one.release(world)
            taken.append(one)
            if len(taken) >= look_at:
                members = self._fits()
                if members is not None:
                    break
                failed = len(taken)
                look_at = failed + max(1, failed // 2 if failed >= LOOK_AT_EACH else 1)
        if members is None and failed < len(taken):
            members = self._fits()
        world.rollback(token)
        if members is None:
            return None
        count, members = self._shortest(taken, failed, members)
        return self._put_back(taken[:count], members)

    def _fits(self) -> tuple[Member, ...] | None:
        world = self.round.world
        self.looks += 1
        if not world.fits_quota(self.request, self.need):
            return None
        if world.state.free_milli.get(self.need.flavour or "", 0) < self.need.charge_milli:
            return None
        ends_at = None if self.request.duration_ms is None else self.round.now + self.request.duration_ms
        return world.find(self.request, self.need, world.state.view(ends_at, request_id=self.request.id))

    def without(self, victims: Sequence[Candidate]) -> tuple[Member, ...] | None:
        """Where the request goes once these are gone; None where that is not enough."""
        world = self.round.world
        with world.what_if():
            for one in victims:
                one.release(world)
            return self._fits()

    def _shortest(
        self, taken: Sequence[Candidate], failed: int, members: tuple[Member, ...]
    ) -> tuple[int, tuple[Member, ...]]:
        low, high = failed, len(taken)
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
