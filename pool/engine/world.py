"""The world of one decision: free places, quota counters and running work, changed by what-ifs and undone.

Built from a snapshot in time linear in its size. A caller that decides again and again over a pool that
changes little may keep one: it tells it what started and what ended (``start``, ``end``), or has it brought up
to the next snapshot (``follow``). A decision leaves it as it was.

Quota trees are by flavour. Two further ones may be given, in milli-CPU and MiB of the hosts: ``HOST_CPU`` and
``HOST_MEMORY``; what a request asks of its hosts is charged there.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from operator import is_

from pool.engine.fit import Need, flavour_refusal, need_of
from pool.engine.mix import learn
from pool.engine.model import FlavourFacts, Kept, Member, Node, Request, Running, Snapshot, Take
from pool.engine.placement import Found, find, find_among
from pool.engine.state import PoolState, View
from quotas.engine.available import headroom
from quotas.engine.ids import NodeId
from quotas.engine.tree import QuotaTree

HOST_CPU = "host:cpu_milli"
HOST_MEMORY = "host:memory_mib"

Charge = tuple[str, int]
"""A quota tree and an amount in its unit."""
FitKey = int
"""The number of a sort of requests in one world: equal for requests that fit in equal places."""
KEEP_KNOWN = 1000
"""What was worked out for requests is forgotten when it is twice the line and so many more."""


@dataclass(slots=True)
class Known:
    """What was worked out for a request; it never changes. ``kind``: the number of its department and all that
    decides where it fits and what it is charged for; ``spots``: a number for ``place`` and each flavour."""

    request: Request
    key: FitKey
    place: FitKey
    kind: int
    needs: dict[str, Need | None] = field(default_factory=dict)
    spots: dict[str | None, int] = field(default_factory=dict)
    charge: int | None = None


class World:
    """State of the pool and the quotas. ``running`` by allocation id; ``by_department`` by flavour and id."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.facts: dict[str, FlavourFacts] = {facts.code: facts for facts in snapshot.flavours}
        self.trees = {code: QuotaTree(nodes) for code, nodes in snapshot.quotas.items()}
        self.host_trees = tuple(code for code in (HOST_CPU, HOST_MEMORY) if code in self.trees)
        self.nodes = sorted(snapshot.nodes, key=lambda node: node.id)
        running = sorted(snapshot.running, key=lambda one: one.allocation_id)
        mix = snapshot.mix or learn(snapshot.pending, running, self.facts)
        members = [member for one in running for member in one.members]
        self.state = PoolState(self.nodes, members, mix=mix)
        self.running: dict[int, Running] = {one.allocation_id: one for one in running}
        self.by_department: dict[tuple[str, int], dict[int, Running]] = {}
        self.capacity: dict[str, int] = {}
        for node in self.nodes:
            for gpu in node.gpus:
                if gpu.blocked is None and node.blocked is None:
                    self.capacity[gpu.flavour] = self.capacity.get(gpu.flavour, 0) + 1000
        self.with_end = 0
        """How much running work has a known end."""
        self.priorities: dict[tuple[str, int], dict[int, int]] = {}
        """How much runs of each priority, by flavour and department."""
        for one in running:
            self._index(one)
        self._booked: list[tuple[str, int, int, bool]] = []
        self._known: dict[int, Known] = {}
        self._numbers: dict[Hashable, int] = {}
        self._rooms: dict[tuple[str, int, bool], tuple[int, int]] = {}
        self.shares: dict[str, tuple[Hashable, dict[NodeId, float]]] = {}
        """Fair shares worked out last, by flavour, with what they rest on; kept by ``order``."""

    def start(self, one: Running) -> None:
        """Something started: it holds its places and is charged from now on."""
        for member in one.members:
            self.state.take(member)
        self.charge(one.department_id, self.charges_of(one), one.interruptible)
        self.running[one.allocation_id] = one
        self._index(one)
        self.state.commit()
        self._booked.clear()

    def end(self, allocation_id: int) -> None:
        """Something ended and was seen free. KeyError for what does not run."""
        one = self.running.pop(allocation_id)
        self._unindex(one)
        for member in one.members:
            self.state.give_back(member)
        self.uncharge(one.department_id, self.charges_of(one), one.interruptible)
        self.state.commit()
        self._booked.clear()

    def follow(self, snapshot: Snapshot) -> bool:
        """Become the world of a later snapshot: decisions are the same as in one built from it.

        Items are compared by identity first, so whoever makes snapshots keeps what did not change. False, and
        nothing done, where nodes, flavours or the learnt mix changed: then a new world is due.
        """
        before = self.snapshot
        learnt = snapshot.mix is not None and (snapshot.mix is before.mix or snapshot.mix == before.mix)
        if not learnt or not _same(snapshot.nodes, before.nodes) or snapshot.flavours != before.flavours:
            return False
        self._follow_running(snapshot.running)
        if snapshot.quotas != before.quotas:
            self.trees = {
                code: self.trees[code] if before.quotas.get(code) == nodes else QuotaTree(nodes)
                for code, nodes in snapshot.quotas.items()
            }
            self.host_trees = tuple(code for code in (HOST_CPU, HOST_MEMORY) if code in self.trees)
            self._rooms.clear()
            self.shares.clear()
        if len(self._known) > 2 * len(snapshot.pending) + KEEP_KNOWN:
            self._known.clear()
            self._numbers.clear()
        self.snapshot = snapshot
        return True

    def _follow_running(self, running: Sequence[Running]) -> None:
        now = {one.allocation_id: one for one in running}
        for allocation_id, one in list(self.running.items()):
            after = now.get(allocation_id)
            if after is one:
                continue
            self._unindex(one)
            if after is None:
                del self.running[allocation_id]
            else:
                self.running[allocation_id] = after
                self._index(after)
            if after is None or after.members != one.members:
                for member in one.members:
                    self.state.give_back(member)
                for member in () if after is None else after.members:
                    self.state.take(member, lenient=True)
        for allocation_id in sorted(now.keys() - self.running.keys()):
            one = self.running[allocation_id] = now[allocation_id]
            self._index(one)
            for member in one.members:
                self.state.take(member, lenient=True)
        ids = list(self.running)
        if any(a > b for a, b in zip(ids, ids[1:], strict=False)):
            self.running = dict(sorted(self.running.items()))
        self.state.settle()

    def _unindex(self, one: Running) -> None:
        key = (one.flavour or "", one.department_id)
        mine = self.by_department[key]
        del mine[one.allocation_id]
        self.with_end -= one.ends_at is not None
        priorities = self.priorities[key]
        priorities[one.priority] -= 1
        if not priorities[one.priority]:
            del priorities[one.priority]
        if not mine:
            del self.by_department[key], self.priorities[key]

    def _index(self, one: Running) -> None:
        self.by_department.setdefault((one.flavour or "", one.department_id), {})[one.allocation_id] = one
        self.with_end += one.ends_at is not None
        priorities = self.priorities.setdefault((one.flavour or "", one.department_id), {})
        priorities[one.priority] = priorities.get(one.priority, 0) + 1

    # What-if

    @contextmanager
    def what_if(self) -> Iterator[None]:
        """All bookings inside are undone at the end."""
        token = self.mark()
        try:
            yield
        finally:
            self.rollback(token)

    def mark(self) -> tuple[int, int]:
        return self.state.mark(), len(self._booked)

    def rollback(self, token: tuple[int, int]) -> None:
        self.state.rollback(token[0])
        while len(self._booked) > token[1]:
            code, department, amount, interruptible = self._booked.pop()
            if amount >= 0:
                self.trees[code].remove(department, amount, interruptible=interruptible)
            else:
                self.trees[code].add(department, -amount, interruptible=interruptible)

    # Requests

    def known(self, request: Request) -> Known:
        """What was worked out for a request, kept as long as it is the same."""
        known = self._known.get(request.id)
        if known is None or known.request is not request:
            place = _place_key(request)
            key = self._number((request.flavours, place))
            kind = self._number((request.department_id, key, request.interruptible))
            known = self._known[request.id] = Known(request, key, self._number(place), kind)
        return known

    def fit_key(self, request: Request) -> FitKey:
        """All that decides where a request fits: requests of equal keys fit in equal places."""
        return self.known(request).key

    def spot(self, known: Known, flavour: str | None) -> int:
        """The number of all that decides where a request fits on one flavour, whichever others it accepts."""
        found = known.spots.get(flavour)
        if found is None:
            found = known.spots[flavour] = self._number((known.place, flavour))
        return found

    def need(self, request: Request, flavour: str) -> Need | None:
        """What a request takes of a flavour; None where the flavour can never serve it."""
        return self.need_of(self.known(request), flavour)

    def need_of(self, known: Known, flavour: str) -> Need | None:
        """The same of one that is known."""
        needs = known.needs
        if flavour not in needs:
            needs[flavour] = self._need(known.request, flavour)
        return needs[flavour]

    def charge_first(self, request: Request) -> int:
        """What a request would be charged of the first flavour it accepts; 0 where that cannot serve it."""
        known = self._known.get(request.id)
        if known is None or known.request is not request:
            known = self.known(request)
        if known.charge is None:
            need = self.need_of(known, request.flavours[0]) if request.flavours else None
            known.charge = need.charge_milli if need is not None else 0
        return known.charge

    def _number(self, key: Hashable) -> FitKey:
        return self._numbers.setdefault(key, len(self._numbers))

    def _need(self, request: Request, flavour: str) -> Need | None:
        facts = self.facts.get(flavour)
        if request.parts:
            parts = [self._need(part, flavour) for part in request.parts]
            if any(part is None for part in parts):
                return None
            return Need(flavour, 0, 0, sum(part.charge_milli for part in parts if part is not None))
        if flavour_refusal(request, facts) is not None:
            return None
        return need_of(request, facts)

    def find(self, request: Request, need: Need, view: View) -> tuple[Member, ...] | None:
        """Members for the whole request within ``view``, or None. Nothing is booked.

        Unlike parts are placed one after the other, largest first: in one domain where that is asked for,
        in one of the preferred level where possible.
        """
        if not request.parts:
            return find(self.state, view, request, need)
        for path in self._domains(request):
            found = self._find_parts(request, path, view)
            if found is not None:
                return found
        return None

    def find_among(
        self, request: Request, needs: Sequence[Need], view: View, *, scarcity: bool
    ) -> Found | None:
        """The best place over flavours that are equally welcome, or None."""
        if not request.parts:
            return find_among(self.state, view, request, needs, scarcity=scarcity)
        for need in needs:
            members = self.find(request, need, view)
            if members is not None:
                return Found(need, members)
        return None

    def _domains(self, request: Request) -> list[tuple[str, ...]]:
        """The domains to try, the closest level first; ``()`` is anywhere."""
        levels = []
        if request.domain_preferred is not None:
            levels += list(range(request.domain_preferred, (request.domain_required or 1) - 1, -1))
        if request.domain_required is not None and request.domain_required not in levels:
            levels.append(request.domain_required)
        paths = [
            path
            for level in levels
            for path in sorted({node.domain[:level] for node in self.nodes if len(node.domain) >= level})
        ]
        return paths if request.domain_required is not None else [*paths, request.within]

    def _find_parts(self, request: Request, within: tuple[str, ...], view: View) -> tuple[Member, ...] | None:
        flavour = next(iter(request.flavours), "")
        order = sorted(
            range(len(request.parts)),
            key=lambda index: (
                _size(request.parts[index], self._need(request.parts[index], flavour)),
                -index,
            ),
            reverse=True,
        )
        found: dict[int, tuple[Member, ...]] = {}
        token = self.state.mark()
        for index in order:
            part = request.parts[index]
            if within:
                part = replace(part, within=within)
            need = self._need(part, flavour)
            members = None if need is None else find(self.state, view, part, need)
            if members is None:
                break
            for member in members:
                self.state.take(member)
            found[index] = members
        self.state.rollback(token)
        if len(found) < len(order):
            return None
        flat = [member for index in range(len(order)) for member in found[index]]
        return tuple(replace(member, number=number) for number, member in enumerate(flat))

    # Quota

    def room(self, department: int, flavour: str, *, interruptible: bool) -> int | None:
        """How much more a department may be charged of a flavour now; None = nothing is limited."""
        tree = self.trees.get(flavour)
        if tree is None or department not in tree.nodes:
            return None
        key = (flavour, department, interruptible)
        known = self._rooms.get(key)
        if known is None or known[0] != tree.version:
            room = headroom(tree, department, interruptible=interruptible)
            known = self._rooms[key] = (tree.version, room)
        return known[1]

    def charges(self, request: Request, need: Need) -> list[Charge]:
        """What a request is charged, by quota tree."""
        if not self.host_trees and need.flavour is not None:
            return [(need.flavour, need.charge_milli)]
        charges = [(need.flavour, need.charge_milli)] if need.flavour is not None else []
        for code in self.host_trees:
            charges.append((code, _host_amount(code, request)))
        return charges

    def charges_of(self, one: Running, members: Sequence[Member] | None = None) -> list[Charge]:
        """What running work, or some members of it, is charged."""
        held = one.members if members is None else members
        whole = len(held) == len(one.members)
        charges: list[Charge] = []
        if one.flavour is not None:
            milli = sum(take.charge_milli for member in held for take in member.takes)
            charges.append((one.flavour, one.charge_milli if whole else milli))
        for code in self.host_trees:
            amounts = (m.cpu_milli if code == HOST_CPU else m.memory_mib for m in held)
            charges.append((code, sum(amounts)))
        return charges

    def charge(self, department: int, charges: Iterable[Charge], interruptible: bool) -> None:
        for code, amount in charges:
            tree = self.trees.get(code)
            if tree is not None and department in tree.nodes and amount:
                tree.add(department, amount, interruptible=interruptible)
                self._booked.append((code, department, amount, interruptible))

    def uncharge(self, department: int, charges: Iterable[Charge], interruptible: bool) -> None:
        """Take charges away again; what a contradictory snapshot never charged is left at nothing."""
        for code, amount in charges:
            tree = self.trees.get(code)
            if tree is None or department not in tree.nodes:
                continue
            path = [tree.counters[step] for step in tree.path(department)]
            there = min(one.total if interruptible else one.total_noninterruptible for one in path)
            amount = min(amount, there)
            if amount:
                tree.remove(department, amount, interruptible=interruptible)
                self._booked.append((code, department, -amount, interruptible))

    def fits_quota(self, request: Request, need: Need) -> bool:
        """Whether a request may be charged now on all its trees."""
        if not self.host_trees:
            if need.flavour is None or need.charge_milli <= 0:
                return True
            room = self.room(request.department_id, need.flavour, interruptible=request.interruptible)
            return room is None or need.charge_milli <= room
        for code, amount in self.charges(request, need):
            room = self.room(request.department_id, code, interruptible=request.interruptible)
            if room is not None and amount > 0 and amount > room:
                return False
        return True

    def take(self, request: Request, need: Need, members: Iterable[Member]) -> None:
        """Book places and charge for a request."""
        for member in members:
            self.state.take(member)
        self.charge(request.department_id, self.charges(request, need), request.interruptible)

    def release(self, one: Running, members: Sequence[Member] | None = None) -> None:
        """Free what running work, or some members of it, holds."""
        for member in one.members if members is None else members:
            self.state.give_back(member)
        self.uncharge(one.department_id, self.charges_of(one, members), one.interruptible)

    # Places kept for a preemptor

    def is_free(self, take: Take) -> bool:
        """Whether nobody holds what a take names, and its card may be used."""
        card = self.state.gpus.get(take.gpu_id)
        if card is None or card.gpu.blocked is not None:
            return False
        if take.slice_id is not None and take.slice_id not in card.free_slices:
            return False
        return all(any(start <= low and high <= end for start, end in card.free) for low, high in take.spans)

    def hold_kept(self, kept: Kept) -> None:
        """Keep everybody else off kept places, on top of whatever still stands there."""
        for member in kept.members:
            self.state.take(member, lenient=True)

    def drop_kept(self, kept: Kept) -> None:
        for member in kept.members:
            self.state.give_back(member)


def is_elastic(request: Request) -> bool:
    """Whether a gang may start with fewer nodes than it asks for."""
    return request.min_nodes is not None and request.min_nodes < request.nodes


def smallest(request: Request, need: Need, world: World) -> tuple[Request, Need]:
    """An elastic request as the smallest gang that it would start with; any other as it is."""
    if not is_elastic(request):
        return request, need
    least = replace(request, nodes=max(1, request.min_nodes or 1))
    amount = world.need(least, need.flavour or "")
    return (request, need) if amount is None else (least, amount)


def _host_amount(code: str, request: Request) -> int:
    if request.parts:
        return sum(_host_amount(code, part) for part in request.parts)
    return (request.cpu_milli if code == HOST_CPU else request.memory_mib) * request.nodes


def _size(part: Request, need: Need | None) -> tuple[int, int]:
    return (part.per_node * part.nodes if need is None else need.charge_milli, part.cpu_milli)


def _same(now: Sequence[Node], before: Sequence[Node]) -> bool:
    return len(now) == len(before) and (all(map(is_, now, before)) or now == before)


def _place_key(request: Request) -> tuple[object, ...]:
    return (
        request.shape,
        request.per_node,
        request.nodes,
        request.milli,
        request.share_mib,
        request.profile,
        request.cpu_milli,
        request.memory_mib,
        request.min_gpu_mib,
        request.nvlink,
        request.fp8,
        request.min_driver,
        request.min_cuda,
        request.site,
        request.min_nodes,
        request.domain_required,
        request.domain_preferred,
        request.fabric,
        request.min_fabric_gbps,
        request.storage,
        request.datasets,
        request.stage_datasets,
        request.image,
        request.spread,
        request.within,
        tuple((part.flavours, _place_key(part)) for part in request.parts),
    )
