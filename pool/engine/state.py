"""The pool as it changes during one decision: what is free on each card and node, and what is promised from
when.

Built from nodes and from what holds places; ``take`` books a member, ``give_back`` undoes that for one that is
booked. ``mark`` and ``rollback`` bracket a what-if: all that happened in between is undone, at the cost of what
changed. Outside of these free space only shrinks, so what did not fit once does not fit later in the same cycle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from pool.engine.model import WHOLE, Gpu, Member, Node, Slice, Span, Take

AMPLE = 1 << 60


class Overbooked(ValueError):
    """A take lies outside what is free: the snapshot contradicts itself, or a caller erred."""


@dataclass(slots=True)
class GpuState:
    """Free space of one card. ``free`` are sorted disjoint spans."""

    gpu: Gpu
    node: NodeState
    free: list[Span] = field(default_factory=lambda: [WHOLE])
    free_mib: int = 0
    free_slices: dict[int, Slice] = field(default_factory=dict)
    held: tuple[Take, ...] = ()

    @property
    def untouched(self) -> bool:
        return self.free == [WHOLE]

    @property
    def free_milli(self) -> int:
        return sum(high - low for low, high in self.free)


@dataclass(slots=True)
class NodeState:
    """Free host resources of a node and its usable cards."""

    node: Node
    cpu: int
    memory: int
    gpus: list[GpuState] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Hold:
    """Places promised to a blocked request from ``start_at`` on: whoever runs past that must keep off
    them.
    """

    request_id: int
    start_at: int
    spans: dict[int, tuple[Span, ...]]
    slices: frozenset[int]


class PoolState:
    """Free places of some nodes. ``nodes`` in any order; all iteration is by id."""

    def __init__(self, nodes: Iterable[Node], members: Iterable[Member] = ()) -> None:
        self.nodes: dict[int, NodeState] = {}
        self.gpus: dict[int, GpuState] = {}
        self.by_flavour: dict[str, list[NodeState]] = {}
        self.free_milli: dict[str, int] = {}
        self.holds: list[Hold] = []
        self.host_slack: dict[int, list[tuple[int, int, int]]] = {}
        self._undo: list[Callable[[], None]] = []
        for node in sorted(nodes, key=lambda one: one.id):
            state = NodeState(node, _known(node.cpu_milli), _known(node.memory_mib))
            self.nodes[node.id] = state
            flavours: set[str] = set()
            for gpu in sorted(node.gpus, key=lambda one: (one.index, one.id)):
                card = GpuState(gpu, state, [WHOLE], gpu.memory_mib, {one.id: one for one in gpu.slices})
                state.gpus.append(card)
                self.gpus[gpu.id] = card
                flavours.add(gpu.flavour)
                if gpu.blocked is None:
                    self.free_milli[gpu.flavour] = self.free_milli.get(gpu.flavour, 0) + 1000
            for flavour in sorted(flavours):
                self.by_flavour.setdefault(flavour, []).append(state)
        for member in members:
            self.take(member, lenient=True)

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

    def rollback(self, token: int) -> None:
        """Undo every take, give-back and hold since ``mark`` gave the token."""
        while len(self._undo) > token:
            self._undo.pop()()

    def _host(self, member: Member, sign: int) -> None:
        node = self.nodes.get(member.node_id)
        if node is None:
            return
        before = (node.cpu, node.memory)

        def restore() -> None:
            node.cpu, node.memory = before

        self._undo.append(restore)
        if node.cpu != AMPLE:
            node.cpu += sign * member.cpu_milli
        if node.memory != AMPLE:
            node.memory += sign * member.memory_mib

    def _take(self, take: Take, lenient: bool) -> None:
        card = self.gpus.get(take.gpu_id)
        if card is None:
            if lenient:
                return
            raise Overbooked(f"card {take.gpu_id} is not in the pool")
        if not lenient:
            for low, high in take.spans:
                if not any(start <= low and high <= end for start, end in card.free):
                    raise Overbooked(f"card {take.gpu_id}: [{low}, {high}) is not free")
            if take.slice_id is not None and take.slice_id not in card.free_slices:
                raise Overbooked(f"slice {take.slice_id} is not free")
        self._hold(card, (*card.held, take))

    def _give_back(self, take: Take) -> None:
        card = self.gpus.get(take.gpu_id)
        if card is None:
            return
        if take not in card.held:
            raise Overbooked(f"card {take.gpu_id}: nobody holds {take.spans}")
        position = card.held.index(take)
        self._hold(card, card.held[:position] + card.held[position + 1 :])

    def _hold(self, card: GpuState, held: tuple[Take, ...]) -> None:
        """Set what is held of a card; all that is free follows from it."""
        before = (card.held, card.free, card.free_mib, card.free_slices)
        milli = card.free_milli

        def restore() -> None:
            self._count(card, card.free_milli, -1)
            card.held, card.free, card.free_mib, card.free_slices = before
            self._count(card, card.free_milli, 1)

        self._undo.append(restore)
        spans = [span for take in held for span in take.spans]
        slices = {take.slice_id for take in held if take.slice_id is not None}
        card.held = held
        card.free = subtract([WHOLE], spans)
        # Memory 0 means the whole card's: nothing is left to share then.
        shared = [take.memory_mib or card.gpu.memory_mib for take in held if take.slice_id is None]
        card.free_mib = max(0, card.gpu.memory_mib - sum(shared))
        card.free_slices = {
            one.id: one
            for one in card.gpu.slices
            if one.id not in slices and not (card.gpu.mig and overlaps(one.span, spans))
        }
        self._count(card, milli, -1)
        self._count(card, card.free_milli, 1)

    def _count(self, card: GpuState, milli: int, sign: int) -> None:
        if card.gpu.blocked is None:
            self.free_milli[card.gpu.flavour] += sign * milli

    def add_hold(self, request_id: int, start_at: int, members: Iterable[Member], later: PoolState) -> None:
        """Promise ``members`` from ``start_at``; ``later`` is the pool as expected then, without them.

        Keeps per node how much host CPU and memory others may still use past ``start_at``.
        """
        before, slack_before = list(self.holds), dict(self.host_slack)

        def restore() -> None:
            self.holds, self.host_slack = before, slack_before

        self._undo.append(restore)
        spans: dict[int, tuple[Span, ...]] = {}
        slices: set[int] = set()
        for member in members:
            for take in member.takes:
                spans[take.gpu_id] = (*spans.get(take.gpu_id, ()), *take.spans)
                if take.slice_id is not None:
                    slices.add(take.slice_id)
            host = later.nodes[member.node_id]
            slack = (start_at, max(0, host.cpu - member.cpu_milli), max(0, host.memory - member.memory_mib))
            self.host_slack[member.node_id] = [*self.host_slack.get(member.node_id, ()), slack]
        self.holds.append(Hold(request_id, start_at, spans, frozenset(slices)))

    def spend_slack(self, member: Member, ends_at: int | None) -> None:
        """A placed member that runs past a promise uses up the host slack left beside it."""
        slacks = self.host_slack.get(member.node_id)
        if slacks:
            before = slacks
            self._undo.append(lambda: self.host_slack.__setitem__(member.node_id, before))
            self.host_slack[member.node_id] = [
                (start, cpu - member.cpu_milli, memory - member.memory_mib)
                if ends_at is None or ends_at > start
                else (start, cpu, memory)
                for start, cpu, memory in slacks
            ]

    def view(self, ends_at: int | None, *, holds: bool = True) -> View:
        """What somebody who runs until ``ends_at`` (None = for ever) may use."""
        if not holds:
            return View({}, frozenset(), {})
        spans: dict[int, list[Span]] = {}
        slices: set[int] = set()
        for hold in self.holds:
            if ends_at is None or ends_at > hold.start_at:
                for gpu_id, held in hold.spans.items():
                    spans.setdefault(gpu_id, []).extend(held)
                slices |= hold.slices
        host: dict[int, tuple[int, int]] = {}
        for node_id, slacks in self.host_slack.items():
            mine = [(cpu, mib) for start, cpu, mib in slacks if ends_at is None or ends_at > start]
            if mine:
                host[node_id] = (min(cpu for cpu, _ in mine), min(mib for _, mib in mine))
        return View(spans, frozenset(slices), host)


@dataclass(frozen=True, slots=True)
class View:
    """Places to keep off, by card and node."""

    spans: dict[int, list[Span]]
    slices: frozenset[int]
    host: dict[int, tuple[int, int]]

    def free(self, card: GpuState) -> list[Span]:
        held = self.spans.get(card.gpu.id)
        return card.free if held is None else subtract(card.free, held)

    def cpu(self, state: NodeState) -> int:
        limit = self.host.get(state.node.id)
        return max(0, state.cpu if limit is None else min(state.cpu, limit[0]))

    def memory(self, state: NodeState) -> int:
        limit = self.host.get(state.node.id)
        return max(0, state.memory if limit is None else min(state.memory, limit[1]))


def subtract(free: list[Span], taken: Iterable[Span]) -> list[Span]:
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
        left = parts
    return left


def overlaps(span: Span, others: Iterable[Span]) -> bool:
    """Whether a span shares a point with any of the others."""
    return any(span[0] < high and low < span[1] for low, high in others)


def _known(amount: int | None) -> int:
    return AMPLE if amount is None else amount
