"""The part of the pool that no decision changes: nodes and cards in fixed order, by row.

A *row* is the position of a node among all nodes by id, or of a card among all cards by node, index and id. State
and scores are kept in lists and arrays by row; a fleet is built once per snapshot and shared by all what-ifs over it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

from pool.engine.fit import gpu_refusal, node_refusal
from pool.engine.model import Gpu, Node, Request

AMPLE: Final = 1 << 50
"""Host CPU or memory that is not known counts as this much."""

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]


class Fleet:
    """Nodes and cards by row, and what is the same for many requests: who may use which node."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self.nodes: list[Node] = sorted(nodes, key=lambda one: one.id)
        self.node_row: dict[int, int] = {node.id: row for row, node in enumerate(self.nodes)}
        self.cards: list[Gpu] = []
        self.card_node: list[int] = []
        self.first: list[int] = [0]
        """``first[row]`` to ``first[row + 1]`` are the cards of a node."""
        for row, node in enumerate(self.nodes):
            gpus = node.gpus
            if any(a.index >= b.index for a, b in zip(gpus, gpus[1:], strict=False)):
                gpus = tuple(sorted(gpus, key=lambda one: (one.index, one.id)))
            self.cards.extend(gpus)
            self.card_node.extend([row] * len(gpus))
            self.first.append(len(self.cards))
        self.card_row: dict[int, int] = {gpu.id: row for row, gpu in enumerate(self.cards)}
        self.card_mib: list[int] = [gpu.memory_mib for gpu in self.cards]
        self.open_milli: dict[str, int] = {}
        """Milli-GPU of each flavour on cards that are not blocked."""
        for gpu in self.cards:
            if gpu.blocked is None:
                self.open_milli[gpu.flavour] = self.open_milli.get(gpu.flavour, 0) + 1000
        self.flavours: list[str] = []
        self.sorts: list[tuple[str, int]] = [("", 0)]
        """Distinct (flavour, memory) of cards on which ordinary work may start; 0 is no such card."""
        self.card_sort: list[int] = []
        self.by_flavour: dict[str, list[int]] = {}
        self.node_flavour: list[int] = []
        self.mixed = False
        """Whether some node has cards of several flavours."""
        self._sort()
        self.flavour_of_node: Ints = np.array(self.node_flavour, dtype=np.int64)
        """Main flavour of each node by number; nodes without cards have the number past the last."""
        self.groups: dict[Hashable, Ints] = {}
        self.offsets: dict[Hashable, Floats] = {}
        """What nodes cost requests of one sort beside the loss of room; kept by ``placement``."""
        self.headroom: list[float] = [
            float("inf") if node.power_headroom_mw is None else float(node.power_headroom_mw)
            for node in self.nodes
        ]
        """Milliwatts that each node may still draw."""
        self.power_limited = any(node.power_headroom_mw is not None for node in self.nodes)
        self.card_power: Floats = np.array(
            [max((gpu.power_mw for gpu in node.gpus), default=0) for node in self.nodes], dtype=float
        )
        """Milliwatts that a card of each node may draw; 0 = not known."""
        self.capacities: dict[Hashable, Ints] = {}
        """Places for requests of one sort by node; kept by ``placement``."""
        self._serving: dict[Hashable, list[list[Gpu]]] = {}
        self._eligible: dict[Hashable, Bools] = {}
        self._refusals: dict[Hashable, list[str | None]] = {}
        self._usable: dict[Hashable, tuple[list[int], dict[str, list[int]]]] = {}

    def __len__(self) -> int:
        return len(self.nodes)

    def _sort(self) -> None:
        """Number flavours and sorts; find the nodes of each flavour and the main flavour of each node."""
        known: dict[tuple[str, int], int] = {}
        flavours = sorted({gpu.flavour for gpu in self.cards})
        number = {flavour: index for index, flavour in enumerate(flavours)}
        self.flavours = flavours
        sorts = sorted({(gpu.flavour, gpu.memory_mib) for gpu in self.cards})
        for one in sorts:
            known[one] = len(self.sorts)
            self.sorts.append(one)
        for row in range(len(self.nodes)):
            cards = self.cards[self.first[row] : self.first[row + 1]]
            counts: dict[str, int] = {}
            for gpu in cards:
                counts[gpu.flavour] = counts.get(gpu.flavour, 0) + 1
                open_ = gpu.blocked is None and not gpu.mig
                self.card_sort.append(known[gpu.flavour, gpu.memory_mib] if open_ else 0)
            self.mixed = self.mixed or len(counts) > 1
            for flavour in counts:
                self.by_flavour.setdefault(flavour, []).append(row)
            main = min(counts, key=lambda flavour: (-counts[flavour], flavour)) if counts else None
            self.node_flavour.append(len(flavours) if main is None else number[main])

    def eligibility_key(self, request: Request) -> tuple[Hashable, ...]:
        """All of a request that ``node_refusal`` looks at."""
        return (
            request.shape == "cpu", request.site, request.min_driver, request.min_cuda,
            request.nvlink and request.per_node > 1, request.storage, request.fabric, request.min_fabric_gbps,
            request.domain_required if request.nodes > 1 else None, request.within,
            () if request.stage_datasets else request.datasets, request.image,
        )  # fmt: skip

    def refusals(self, request: Request) -> list[str | None]:
        """By row: why a node cannot serve a request, whatever is free on it; None where it can."""
        key = self.eligibility_key(request)
        found = self._refusals.get(key)
        if found is None:
            found = self._refusals[key] = [node_refusal(node, request) for node in self.nodes]
        return found

    def usable(self, request: Request, flavour: str | None) -> tuple[list[int], dict[str, list[int]]]:
        """The nodes with a flavour (None: all) that may serve a request, whatever is free, and the others by why
        they cannot. Do not write to it."""
        key = (flavour, self.eligibility_key(request))
        found = self._usable.get(key)
        if found is None:
            rows = range(len(self.nodes)) if flavour is None else self.by_flavour.get(flavour, ())
            refusals = self.refusals(request)
            refused: dict[str, list[int]] = {}
            usable: list[int] = []
            for row in rows:
                code = refusals[row]
                (usable if code is None else refused.setdefault(code, [])).append(row)
            found = self._usable[key] = (usable, refused)
        return found

    def serving(self, request: Request, flavour: str) -> list[list[Gpu]]:
        """By row: the cards of a flavour that could serve a request, in use or not. Do not write to it."""
        key = (flavour, request.shape == "mig", request.min_gpu_mib)
        found = self._serving.get(key)
        if found is None:
            found = self._serving[key] = [
                [
                    gpu
                    for gpu in self.cards[self.first[row] : self.first[row + 1]]
                    if gpu_refusal(gpu, request, flavour) is None
                ]
                for row in range(len(self.nodes))
            ]
        return found

    def eligible(self, request: Request) -> Bools:
        """Which nodes may serve a request at all, whatever is free: their own rules and the request's."""
        key = self.eligibility_key(request)
        found = self._eligible.get(key)
        if found is None:
            found = np.array([refusal is None for refusal in self.refusals(request)], dtype=bool)
            self._eligible[key] = found
        return found

    def group_of(self, key: Hashable, name: Callable[[Node], Hashable | None]) -> Ints:
        """Nodes as numbers of the group that ``name`` gives (numbered in row order), −1 where it gives none.

        Kept under ``key``: the same key must always come with the same function.
        """
        found = self.groups.get(key)
        if found is None:
            numbers: dict[Hashable, int] = {}
            rows: list[int] = []
            for node in self.nodes:
                value = name(node)
                rows.append(-1 if value is None else numbers.setdefault(value, len(numbers)))
            found = np.array(rows, dtype=np.int64)
            self.groups[key] = found
        return found
