"""What a played past (`pool.engine.past`) comes to: waits, use, borrowing, what was taken back, guarantees not met.

All amounts are GPU-milliseconds (milli-GPU × ms ÷ 1000, floored once per sum), all waits milliseconds, over the window
[``since``, ``until``). Definitions:

* wait: from arriving in line to the first start, of those who arrived in the window and started;
* idle while wanted: the integral of min(free, what waits and would each fit by amount into what is free);
* shortfall: the integral of what a department lacks to its guarantee, as far as it has waiting work that fits under it;
* borrowed: the integral of what is held above a guarantee. The guarantee that counts is that of the requester's own
  department, or of the nearest one above it that has any; without one all use is borrowed;
* lost: the work of a run that was taken back, since its start (a lower bound is what checkpoints save).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pool.engine.past import Piece, Played, Setting
from quotas.engine.ids import NodeId
from quotas.engine.tree import QuotaNode

Key = tuple[int, str]
"""Department and flavour."""


@dataclass(slots=True)
class Group:
    """The figures of one department's asks for one flavour."""

    asked: int = 0
    started: int = 0
    waits: list[int] = field(default_factory=list)
    held: int = 0
    lost: int = 0
    taken: Counter[str] = field(default_factory=Counter)
    """How many runs were taken back, by cause."""

    def wait(self, permille: int) -> int | None:
        """The wait below which so many of a thousand lie; None without one."""
        return percentile(self.waits, permille)


@dataclass(slots=True)
class FlavourSum:
    """The integrals of one flavour over the window."""

    installed: int = 0
    held: int = 0
    idle_wanted: int = 0
    shortfall: int = 0
    borrowed: int = 0


@dataclass(slots=True)
class Measures:
    """All of them. ``groups`` by department and flavour (the one that a piece ran on, else the first it asked for)."""

    groups: dict[Key, Group]
    flavours: dict[str, FlavourSum]

    def waits(self) -> list[int]:
        """Of all groups."""
        return [wait for group in self.groups.values() for wait in group.waits]


def percentile(values: Sequence[int], permille: int) -> int | None:
    """The value at rank floor((n − 1) × permille ÷ 1000) of the sorted ones."""
    return sorted(values)[(len(values) - 1) * permille // 1000] if values else None


def measure(pieces: Iterable[Piece], setting: Setting, played: Played, since: int, until: int) -> Measures:
    """Measure what was played under a setting."""
    by_id = {one.request.id: one for one in pieces}
    groups: dict[Key, Group] = defaultdict(Group)
    first: dict[int, int] = {}
    ran_on: dict[int, str] = {}
    for run in played.runs:
        if run.request_id not in first or run.start < first[run.request_id]:
            first[run.request_id], ran_on[run.request_id] = run.start, run.flavour
    for request_id, piece in by_id.items():
        flavour = ran_on.get(request_id) or next(iter(piece.request.flavours), "")
        group = groups[piece.request.department_id, flavour]
        if since <= piece.arrives < until:
            group.asked += 1
            if request_id in first:
                group.started += 1
                group.waits.append(first[request_id] - piece.arrives)
    for run in played.runs:
        group = groups[by_id[run.request_id].request.department_id, run.flavour]
        group.held += run.charge_milli * max(0, min(run.end, until) - max(run.start, since)) // 1000
        if run.ending == "taken" and since <= run.end < until:
            group.taken[run.cause or ""] += 1
            group.lost += run.charge_milli * (run.end - run.start) // 1000
    flavours = {
        code: _integrals(code, by_id, setting, played, since, until) for code in sorted(setting.cards)
    }
    return Measures(dict(groups), flavours)


_FREED, _ARRIVED, _LEFT, _BEGAN = 0, 1, 2, 3
"""The order of what happens at one moment: room is made before it is taken."""


def _integrals(
    code: str, by_id: Mapping[int, Piece], setting: Setting, played: Played, since: int, until: int
) -> FlavourSum:
    """One sweep over everything that happened to a flavour. Waits count for the first flavour asked for."""
    nodes = {node.id: node for node in setting.quotas.get(code, ())}
    installed = 1000 * setting.cards.get(code, 0)
    state = _State(nodes, installed)
    for at, kind, request_id, amount in sorted(_happenings(code, by_id, played)):
        state.move(at, since, until)
        department = by_id[request_id].request.department_id
        if kind == _ARRIVED:
            state.wait(department, amount, 1)
        elif kind == _LEFT:
            state.wait(department, amount, -1)
        elif kind == _BEGAN:
            state.wait(department, amount, -1)
            state.hold(department, amount)
        else:
            state.hold(department, -amount)
    state.move(until, since, until)
    sums = FlavourSum(installed=installed * (until - since) // 1000)
    sums.held, sums.idle_wanted = state.held // 1000, state.idle // 1000
    sums.shortfall, sums.borrowed = state.short // 1000, state.borrowed // 1000
    return sums


def _happenings(code: str, by_id: Mapping[int, Piece], played: Played) -> Iterable[tuple[int, int, int, int]]:
    """(when, what, request, milli-GPU); each run is a wait that ended, and a hold."""
    runs: dict[int, list[tuple[int, int, int, str | None]]] = defaultdict(list)
    for run in played.runs:
        if run.flavour == code:
            runs[run.request_id].append((run.start, run.end, run.charge_milli, run.ending))
    for request_id, piece in by_id.items():
        found = sorted(runs.get(request_id, []))
        if not found and next(iter(piece.request.flavours), "") != code:
            continue
        amount = found[0][2] if found else _asked(piece)
        if not found or found[0][0] >= piece.arrives:
            yield piece.arrives, _ARRIVED, request_id, amount
        for number, (start, end, charge, ending) in enumerate(found):
            yield start, _BEGAN, request_id, charge
            yield end, _FREED, request_id, charge
            if ending == "taken" or number + 1 < len(found):
                yield end, _ARRIVED, request_id, found[number + 1][2] if number + 1 < len(found) else charge
        if not found and request_id in played.left:
            yield played.left[request_id], _LEFT, request_id, amount


def _asked(piece: Piece) -> int:
    """What a piece that never ran would be charged, near enough for waits: cards, or its share of one."""
    request = piece.request
    each = request.milli if request.shape == "fraction" and request.milli else 1000
    return each * max(1, request.per_node) * max(1, request.nodes)


class _State:
    """Use and waits of one flavour at a moment, and the integrals up to it (milli-GPU × ms).

    Each department belongs to its home, the nearest one at or above it with a guarantee; what a home has of its own
    is its guarantee without those of the homes below it, so that the homes' figures add up.
    """

    def __init__(self, nodes: Mapping[NodeId, QuotaNode], installed: int) -> None:
        self.nodes, self.installed = nodes, installed
        self.homes: dict[NodeId, NodeId | None] = {}
        self.own: Counter[NodeId] = Counter()
        for node_id, node in nodes.items():
            if node.guarantee and node.parent is not None:
                self.own[node_id] += node.guarantee
                above = self._home(node.parent)
                if above is not None:
                    self.own[above] -= node.guarantee
        self.use: Counter[NodeId] = Counter()
        self.bare = 0
        self.total = 0
        self.waiting: dict[NodeId | None, Counter[int]] = defaultdict(Counter)
        self.at: int | None = None
        self.held = self.idle = self.short = self.borrowed = 0

    def _home(self, department: NodeId) -> NodeId | None:
        if department not in self.homes:
            step: NodeId | None = department if department in self.nodes else None
            while step is not None:
                node = self.nodes[step]
                if node.guarantee and node.parent is not None:
                    break
                step = node.parent
            self.homes[department] = step
        return self.homes[department]

    def wait(self, department: int, amount: int, change: int) -> None:
        line = self.waiting[self._home(department)]
        line[amount] += change
        if not line[amount]:
            del line[amount]

    def hold(self, department: int, amount: int) -> None:
        self.total += amount
        home = self._home(department)
        if home is None:
            self.bare += amount
        else:
            self.use[home] += amount

    def move(self, to: int, since: int, until: int) -> None:
        """Count the time up to ``to``."""
        if self.at is not None and to > self.at:
            passed = min(to, until) - max(self.at, since)
            if passed > 0:
                self._count(passed)
        self.at = to if self.at is None else max(self.at, to)

    def _count(self, passed: int) -> None:
        free = self.installed - self.total
        wanted = 0
        self.borrowed += passed * self.bare
        for home, line in self.waiting.items():
            wanted += sum(amount * n for amount, n in line.items() if amount <= free)
            room = 0 if home is None else self.own[home] - self.use[home]
            if room > 0 and line:
                self.short += passed * min(room, sum(a * n for a, n in line.items() if a <= room))
        for home, used in self.use.items():
            self.borrowed += passed * max(0, used - max(0, self.own[home]))
        self.held += passed * self.total
        self.idle += passed * max(0, min(free, wanted))
