"""The pool as it changes during one decision: what is free on each card and node, and what is promised from
when.

Built from nodes and from what holds places; ``take`` books a member, ``give_back`` undoes that for one that is
booked. ``mark`` and ``rollback`` bracket a what-if: all that happened in between is undone, at the cost of what
changed. Outside of these free space only shrinks, so what did not fit once does not fit later in the same cycle.

Free space is kept by row in plain lists; ``GpuState`` and ``NodeState`` are live windows on one row of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from pool.engine.fleet import AMPLE, Fleet, Ints
from pool.engine.kinds import MILLI_SHIFT, MigCard, Overlay
from pool.engine.model import WHOLE, Gpu, Member, Mix, Node, Slice, Span, Take
from pool.engine.score import Scorer

Spans = tuple[Span, ...]
ALL: Spans = (WHOLE,)
MOST_KINDS = 200_000
"""A state that lives on forgets its scores after so many kinds of nodes."""
_FREE_CARD: tuple[Take, ...] = ()


class Overbooked(ValueError):
    """A take lies outside what is free: the snapshot contradicts itself, or a caller erred."""


class GpuState:
    """Free space of one card, as it is now. ``free`` are sorted disjoint spans."""

    __slots__ = ("_row", "_state", "gpu")

    def __init__(self, state: PoolState, row: int) -> None:
        self._state, self._row = state, row
        self.gpu: Gpu = state.fleet.cards[row]

    @property
    def free(self) -> Spans:
        return self._state.free[self._row]

    @property
    def free_mib(self) -> int:
        return self._state.free_mib[self._row]

    @property
    def free_milli(self) -> int:
        return self._state.milli[self._row]

    @property
    def untouched(self) -> bool:
        return self.free == ALL

    @property
    def free_slices(self) -> dict[int, Slice]:
        """Instances of the card that nobody holds, by id."""
        return {one.id: one for one in self._state.slices_of(self._row)}

    def slices(self, view: View) -> list[Slice]:
        """Free instances of the card within a view, by memory slot."""
        return self._state.slices_of(self._row, view)


class NodeState:
    """Free host resources of a node and its cards, as they are now."""

    __slots__ = ("_state", "node", "row")

    def __init__(self, state: PoolState, row: int) -> None:
        self._state, self.row = state, row
        self.node: Node = state.fleet.nodes[row]

    @property
    def cpu(self) -> int:
        return self._state.cpu[self.row]

    @property
    def memory(self) -> int:
        return self._state.memory[self.row]

    @property
    def gpus(self) -> list[GpuState]:
        first = self._state.fleet.first
        return [GpuState(self._state, row) for row in range(first[self.row], first[self.row + 1])]


@dataclass(frozen=True, slots=True)
class Hold:
    """Places promised to a blocked request from ``start_at`` on: whoever runs past that must keep off
    them.
    """

    request_id: int
    start_at: int
    spans: dict[int, tuple[Span, ...]]
    slices: frozenset[int]


@dataclass(frozen=True, slots=True)
class Slack:
    """Host CPU and memory of a node that others may still use past the start of a hold."""

    hold: int
    start_at: int
    cpu: int
    memory: int


@dataclass(slots=True)
class View:
    """Places to keep off, by card and node."""

    spans: dict[int, list[Span]]
    slices: frozenset[int]
    host: dict[int, tuple[int, int]]
    overlay: Overlay | None = field(default=None, compare=False)

    def free(self, card: GpuState) -> Spans:
        held = self.spans.get(card.gpu.id)
        return card.free if held is None else subtract(card.free, held)

    def cpu(self, state: NodeState) -> int:
        limit = self.host.get(state.node.id)
        return max(0, state.cpu if limit is None else min(state.cpu, limit[0]))

    def memory(self, state: NodeState) -> int:
        limit = self.host.get(state.node.id)
        return max(0, state.memory if limit is None else min(state.memory, limit[1]))


NOTHING_HELD = View({}, frozenset(), {})


class PoolState:
    """Free places of some nodes. ``nodes`` in any order; all iteration is by id."""

    def __init__(
        self,
        nodes: Iterable[Node] | Fleet,
        members: Iterable[Member] = (),
        *,
        mix: Mix | None = None,
        scorer: Scorer | None = None,
    ) -> None:
        self.fleet = fleet = nodes if isinstance(nodes, Fleet) else Fleet(nodes)
        self._mix, self._scorer = mix, scorer
        self.cpu: list[int] = [_known(node.cpu_milli) for node in fleet.nodes]
        self.memory: list[int] = [_known(node.memory_mib) for node in fleet.nodes]
        self.headroom: list[float] = list(fleet.headroom)
        """Milliwatts that each node may still draw; what held places from the beginning draws already."""
        count = len(fleet.cards)
        self.held: list[tuple[Take, ...]] = [_FREE_CARD] * count
        self.free: list[Spans] = [ALL] * count
        self.milli: list[int] = [1000] * count
        self.free_mib: list[int] = list(fleet.card_mib)
        self.free_milli: dict[str, int] = dict(fleet.open_milli)
        self.holds: list[Hold] = []
        self.host_slack: dict[int, list[Slack]] = {}
        self.versions: list[int] = [0] * len(fleet.nodes)
        """Grows with every change of a node: what was worked out for a node holds while its number stands."""
        self._changed: set[int] = set(range(len(fleet.nodes)))
        self._kinds: Ints = np.zeros(len(fleet.nodes), dtype=np.int64)
        self._undo: list[tuple[Any, ...]] = []
        self._views: dict[tuple[int, ...], View] = {}
        for member in members:
            self.take(member, lenient=True)
        self.settle()

    def fresh(self, members: Iterable[Member]) -> PoolState:
        """The same pool and scores with other members booked, and nothing promised."""
        return PoolState(self.fleet, members, scorer=self.scorer)

    def prepare(self) -> None:
        """Work out now what the first decision would have to: prices, weights, the kinds of all nodes."""
        self.kinds(NOTHING_HELD)
        self.scorer.settle()

    def relearn(self, mix: Mix) -> None:
        """Judge by another workload mix from now on."""
        self._scorer, self._mix = None, mix
        self._changed.update(range(len(self.fleet.nodes)))
        self._views.clear()

    @property
    def scorer(self) -> Scorer:
        """Scores of this fleet under its workload mix; made when first asked for."""
        if self._scorer is None:
            self._scorer = Scorer(self.fleet, self._mix)
        return self._scorer

    def kinds(self, view: View) -> Ints:
        """The kind of each node by row, with what ``view`` keeps off left out. Do not write to it."""
        if self.scorer.kinds.count > MOST_KINDS:
            self.relearn(self.scorer.mix)
        if self._changed:
            for row in self._changed:
                self._kinds[row] = self._kind(row)
            self._changed.clear()
        if not view.spans and not view.slices and not view.host:
            return self._kinds
        kinds = self._kinds.copy()
        overlay = self._overlay(view)
        kinds[overlay.rows] = overlay.kinds
        return kinds

    def _overlay(self, view: View) -> Overlay:
        if view.overlay is None or view.overlay.owner is not self.scorer.kinds:
            card_row, card_node = self.fleet.card_row, self.fleet.card_node
            rows = {card_node[card_row[gpu_id]] for gpu_id in view.spans if gpu_id in card_row}
            rows |= {self.fleet.node_row[node_id] for node_id in view.host}
            ordered = sorted(rows)
            view.overlay = Overlay(self.scorer.kinds, ordered, [-1] * len(ordered), [0] * len(ordered))
        overlay = view.overlay
        for place, row in enumerate(overlay.rows):
            if overlay.versions[place] != self.versions[row]:
                overlay.versions[place] = self.versions[row]
                overlay.kinds[place] = self._kind(row, view)
        return overlay

    def _kind(self, row: int, view: View | None = None) -> int:
        kinds = self.scorer.kinds
        first, last = self.fleet.first[row], self.fleet.first[row + 1]
        cpu, memory = max(0, self.cpu[row]), max(0, self.memory[row])
        milli, mib, code = self.milli, self.free_mib, kinds.card_code
        if view is None:
            codes = [
                code[c] | milli[c] << MILLI_SHIFT | mib[c] if milli[c] else code[c]
                for c in range(first, last)
                if code[c] >= 0
            ]
        else:
            limit = view.host.get(self.fleet.nodes[row].id)
            if limit is not None:
                cpu, memory = max(0, min(cpu, limit[0])), max(0, min(memory, limit[1]))
            codes = []
            for c in range(first, last):
                if code[c] >= 0:
                    free = room(view.free(GpuState(self, c)))
                    codes.append(code[c] | free << MILLI_SHIFT | mib[c] if free else code[c])
        if row in kinds.mig_rows:
            codes += self._mig_codes(first, last, view)
        return kinds.of(row, cpu, memory, codes)

    def _mig_codes(self, first: int, last: int, view: View | None) -> list[int]:
        codes: list[int] = []
        for card in range(first, last):
            gpu = self.fleet.cards[card]
            if gpu.mig and gpu.blocked is None:
                free = tuple(sorted(one.profile for one in self.slices_of(card, view)))
                codes.append(self.scorer.kinds.mig_code(MigCard(gpu.flavour, not self.held[card], free)))
        return codes

    def slices_of(self, card: int, view: View | None = None) -> list[Slice]:
        """Free instances of a card by memory slot."""
        gpu, held = self.fleet.cards[card], self.held[card]
        if not gpu.slices:
            return []
        taken = {take.slice_id for take in held}
        spans = [span for take in held for span in take.spans] if gpu.mig else []
        if view is not None:
            taken |= view.slices
            spans += view.spans.get(gpu.id, ())
        free = [one for one in gpu.slices if one.id not in taken and not overlaps(one.span, spans)]
        free.sort(key=lambda one: (one.span, one.id))
        return free

    @cached_property
    def nodes(self) -> dict[int, NodeState]:
        """Live windows on the nodes, by id."""
        return {node.id: NodeState(self, row) for row, node in enumerate(self.fleet.nodes)}

    @cached_property
    def gpus(self) -> dict[int, GpuState]:
        """Live windows on the cards, by id."""
        return {gpu.id: GpuState(self, row) for row, gpu in enumerate(self.fleet.cards)}

    @cached_property
    def by_flavour(self) -> dict[str, list[NodeState]]:
        """The nodes that carry a flavour, by id."""
        windows = list(self.nodes.values())
        return {flavour: [windows[row] for row in rows] for flavour, rows in self.fleet.by_flavour.items()}

    def take(self, member: Member, *, lenient: bool = False) -> None:
        """Book a member. Overbooked, and nothing booked, when a span is not free; ``lenient`` (for what already
        runs) takes what is there.
        """
        token = self.mark()
        try:
            for take in member.takes:
                self._take(take, lenient)
        except Overbooked:
            self.rollback(token)
            raise
        self._host(member, -1)

    def give_back(self, member: Member) -> None:
        """Free what a booked member holds. Overbooked, and nothing freed, when it does not hold it; cards and
        nodes that are not in the pool are left aside."""
        token = self.mark()
        try:
            for take in member.takes:
                self._give_back(take)
        except Overbooked:
            self.rollback(token)
            raise
        self._host(member, 1)

    def mark(self) -> int:
        """A point to return to with ``rollback``. Marks nest."""
        return len(self._undo)

    def commit(self) -> None:
        """What was changed so far stands: no mark given before may be returned to."""
        self._undo.clear()

    def settle(self) -> None:
        """What is held now stands, and draws its power already: the nodes' headroom is as they were given."""
        self.headroom = list(self.fleet.headroom)
        self._undo.clear()

    def rollback(self, token: int) -> None:
        """Undo every take, give-back and hold since ``mark`` gave the token."""
        while len(self._undo) > token:
            entry = self._undo.pop()
            if entry[0] == "card":
                self._put_card(*entry[1:])
            elif entry[0] == "host":
                _, row, self.cpu[row], self.memory[row], self.headroom[row] = entry
                self._touch(row)
            else:
                self.holds, self.host_slack = entry[1], entry[2]
                self._views.clear()

    def _host(self, member: Member, sign: int) -> None:
        row = self.fleet.node_row.get(member.node_id)
        if row is None:
            return
        cpu, memory = self.cpu[row], self.memory[row]
        self._undo.append(("host", row, cpu, memory, self.headroom[row]))
        if self.fleet.power_limited:
            milli = sum(take.charge_milli for take in member.takes)
            self.headroom[row] += sign * milli / 1000 * float(self.fleet.card_power[row])
        if cpu < AMPLE:
            self.cpu[row] = cpu + sign * member.cpu_milli
        if memory < AMPLE:
            self.memory[row] = memory + sign * member.memory_mib
        self._touch(row)

    def _take(self, take: Take, lenient: bool) -> None:
        row = self.fleet.card_row.get(take.gpu_id)
        if row is None:
            if lenient:
                return
            raise Overbooked(f"card {take.gpu_id} is not in the pool")
        held = self.held[row]
        if not held and take.spans == ALL and take.slice_id is None and not self.fleet.cards[row].slices:
            mib = self.fleet.cards[row].memory_mib - take.memory_mib if take.memory_mib else 0
            self._set_card(row, (take,), (), 0, max(0, mib))
            return
        if not lenient:
            free = self.free[row]
            for low, high in take.spans:
                if not any(start <= low and high <= end for start, end in free):
                    raise Overbooked(f"card {take.gpu_id}: [{low}, {high}) is not free")
            if take.slice_id is not None and all(one.id != take.slice_id for one in self.slices_of(row)):
                raise Overbooked(f"slice {take.slice_id} is not free")
        self._hold(row, (*held, take))

    def _give_back(self, take: Take) -> None:
        row = self.fleet.card_row.get(take.gpu_id)
        if row is None:
            return
        held = self.held[row]
        if take not in held:
            raise Overbooked(f"card {take.gpu_id}: nobody holds {take.spans}")
        place = held.index(take)
        self._hold(row, held[:place] + held[place + 1 :])

    def _hold(self, row: int, held: tuple[Take, ...]) -> None:
        """Set what is held of a card; all that is free follows from it."""
        whole = self.fleet.cards[row].memory_mib
        free = subtract(ALL, [span for take in held for span in take.spans])
        # Memory 0 means the whole card's: nothing is left to share then.
        shared = sum([take.memory_mib or whole for take in held if take.slice_id is None])
        self._set_card(row, held, free, room(free), max(0, whole - shared))

    def _set_card(self, row: int, held: tuple[Take, ...], free: Spans, milli: int, mib: int) -> None:
        before = self.milli[row]
        self._undo.append(("card", row, self.held[row], self.free[row], before, self.free_mib[row]))
        self._put_card(row, held, free, milli, mib)

    def _put_card(self, row: int, held: tuple[Take, ...], free: Spans, milli: int, mib: int) -> None:
        gpu = self.fleet.cards[row]
        if gpu.blocked is None:
            self.free_milli[gpu.flavour] += milli - self.milli[row]
        self.held[row], self.free[row], self.milli[row], self.free_mib[row] = held, free, milli, mib
        self._touch(self.fleet.card_node[row])

    def _touch(self, row: int) -> None:
        self.versions[row] += 1
        self._changed.add(row)

    def add_hold(
        self,
        request_id: int,
        start_at: int,
        members: Iterable[Member],
        later: PoolState | None = None,
    ) -> None:
        """Promise ``members`` from ``start_at``; ``later`` is the pool as expected then, without them (None: this
        state as it is now).

        Keeps per node how much host CPU and memory others may still use past ``start_at``.
        """
        later = later or self
        self._undo.append(("holds", list(self.holds), dict(self.host_slack)))
        spans: dict[int, tuple[Span, ...]] = {}
        slices: set[int] = set()
        host: dict[int, tuple[int, int]] = {}
        for member in members:
            for take in member.takes:
                spans[take.gpu_id] = (*spans.get(take.gpu_id, ()), *take.spans)
                if take.slice_id is not None:
                    slices.add(take.slice_id)
            cpu, memory = host.get(member.node_id, (0, 0))
            host[member.node_id] = cpu + member.cpu_milli, memory + member.memory_mib
        for node_id, (cpu, memory) in host.items():
            row = later.fleet.node_row[node_id]
            slack = Slack(
                len(self.holds), start_at, max(0, later.cpu[row] - cpu), max(0, later.memory[row] - memory)
            )
            self.host_slack[node_id] = [*self.host_slack.get(node_id, ()), slack]
        self.holds.append(Hold(request_id, start_at, spans, frozenset(slices)))
        self._views.clear()

    def spend_slack(self, member: Member, ends_at: int | None) -> None:
        """A placed member that runs past a promise uses up the host slack left beside it."""
        slacks = self.host_slack.get(member.node_id)
        if not slacks:
            return
        self._undo.append(("holds", list(self.holds), dict(self.host_slack)))
        self.host_slack[member.node_id] = [
            replace(one, cpu=one.cpu - member.cpu_milli, memory=one.memory - member.memory_mib)
            if ends_at is None or ends_at > one.start_at
            else one
            for one in slacks
        ]
        self._views.clear()

    def view(self, ends_at: int | None, *, holds: bool = True, request_id: int | None = None) -> View:
        """What somebody who runs until ``ends_at`` (None = for ever) may use; what is promised to ``request_id``
        itself does not bind it."""
        if not holds or not self.holds:
            return NOTHING_HELD
        binding = tuple(
            index
            for index, hold in enumerate(self.holds)
            if (ends_at is None or ends_at > hold.start_at) and hold.request_id != request_id
        )
        found = self._views.get(binding)
        if found is None:
            found = self._views[binding] = self._view(set(binding))
        return found

    def _view(self, binding: set[int]) -> View:
        spans: dict[int, list[Span]] = {}
        slices: set[int] = set()
        for index in sorted(binding):
            for gpu_id, held in self.holds[index].spans.items():
                spans.setdefault(gpu_id, []).extend(held)
            slices |= self.holds[index].slices
        host: dict[int, tuple[int, int]] = {}
        for node_id, slacks in self.host_slack.items():
            mine = [one for one in slacks if one.hold in binding]
            if mine:
                host[node_id] = (min(one.cpu for one in mine), min(one.memory for one in mine))
        return View(spans, frozenset(slices), host)


def subtract(free: Spans, taken: Iterable[Span]) -> Spans:
    """Sorted disjoint ``free`` without ``taken``."""
    left = free
    for low, high in taken:
        parts: list[Span] = []
        for start, end in left:
            if end <= low or high <= start:
                parts.append((start, end))
                continue
            if start < low:
                parts.append((start, low))
            if high < end:
                parts.append((high, end))
        left = tuple(parts)
    return left


def overlaps(span: Span, others: Iterable[Span]) -> bool:
    """Whether a span shares a point with any of the others."""
    return any(span[0] < high and low < span[1] for low, high in others)


def room(free: Iterable[Span]) -> int:
    """Milli-GPU in some disjoint spans."""
    return sum(high - low for low, high in free)


def _known(amount: int | None) -> int:
    return AMPLE if amount is None else amount
