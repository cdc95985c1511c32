"""Nodes in the same state are alike: each distinct state gets a number, its *kind*, and is judged once.

A kind is all that a score may look at: free host CPU and memory, and the free share, free memory, sort and link group
of each usable card, as an unordered set. What a class of work costs on a kind never changes, so a what-if that returns
to an earlier state, another what-if over the same pool, and a second node in the same state cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from pool.engine.fleet import Fleet, Floats, Ints

_SORT_SHIFT = 36
_MILLI_SHIFT = 24
_MILLI_MASK = (1 << (_SORT_SHIFT - _MILLI_SHIFT)) - 1
_MIB_MASK = (1 << _MILLI_SHIFT) - 1
_GROUPS = 64

Key = tuple[int, ...]
T = TypeVar("T", bound=np.generic)


@dataclass(frozen=True, slots=True)
class MigCard:
    """A split card as a score sees it: its flavour, whether nobody holds a slice, and the free profiles."""

    flavour: str
    untouched: bool
    profiles: tuple[str, ...]


@dataclass(slots=True)
class Overlay:
    """Kinds of the nodes on which a view must keep off some places; valid while the nodes' versions stand."""

    rows: list[int]
    versions: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)


class Kinds:
    """All kinds met so far, by number, as arrays with one line each."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.width = max([1, *(b - a for a, b in zip(fleet.first, fleet.first[1:], strict=False))])
        self.card_code: list[int] = []
        """What is fixed of a card's code: sort and link group; −1 for a card that takes no ordinary work."""
        self.chassis: list[int] = []
        self.chassis_facts: list[tuple[int, int, int, int]] = []
        self.mig_rows: frozenset[int] = frozenset()
        self._describe()
        self._number: dict[Key, int] = {}
        self._fresh: list[Key] = []
        self._mig_number: dict[MigCard, int] = {}
        self.mig_cards: list[MigCard] = []
        self.mig: dict[int, tuple[MigCard, ...]] = {}
        """The split cards of the kinds that have some."""
        self.count = 0
        self.milli: Floats = np.zeros((0, self.width))
        self.mib: Floats = np.zeros((0, self.width))
        self.sort: npt.NDArray[np.int32] = np.zeros((0, self.width), dtype=np.int32)
        self.group: npt.NDArray[np.int32] = np.zeros((0, self.width), dtype=np.int32)
        self.cpu: Floats = np.zeros(0)
        self.memory: Floats = np.zeros(0)
        self.total_cpu: Floats = np.zeros(0)
        self.total_memory: Floats = np.zeros(0)
        self.cards: Floats = np.zeros(0)
        self.flavour: Ints = np.zeros(0, dtype=np.int64)

    def _describe(self) -> None:
        fleet = self.fleet
        numbers: dict[tuple[int, int, int, int], int] = {}
        split: set[int] = set()
        for row, node in enumerate(fleet.nodes):
            first, last = fleet.first[row], fleet.first[row + 1]
            groups: dict[int, int] = {}
            for card in range(first, last):
                gpu, sort = fleet.cards[card], fleet.card_sort[card]
                group = groups.setdefault(gpu.link_group, len(groups)) % _GROUPS
                self.card_code.append((sort * _GROUPS + group) << _SORT_SHIFT if sort else -1)
                if gpu.mig and gpu.blocked is None:
                    split.add(row)
            facts = (node.cpu_milli or 0, node.memory_mib or 0, last - first, fleet.node_flavour[row])
            number = numbers.setdefault(facts, len(numbers))
            if number == len(self.chassis_facts):
                self.chassis_facts.append(facts)
            self.chassis.append(number)
        self.mig_rows = frozenset(split)

    def of(self, row: int, cpu: int, memory: int, codes: list[int]) -> int:
        """The number of the kind with these free amounts and card codes (in any order)."""
        codes.sort()
        key = (self.chassis[row], cpu, memory, *codes)
        found = self._number.get(key)
        if found is None:
            found = len(self._number)
            self._number[key] = found
            self._fresh.append(key)
        return found

    def code(self, card: int, milli: int, mib: int) -> int:
        """The code of an ordinary card with so much free; the card must be a usable one."""
        return self.card_code[card] | milli << _MILLI_SHIFT | (mib if milli else 0)

    def mig_code(self, card: MigCard) -> int:
        """The code of a split card: negative."""
        number = self._mig_number.get(card)
        if number is None:
            number = len(self.mig_cards)
            self._mig_number[card] = number
            self.mig_cards.append(card)
        return -1 - number

    def settle(self) -> range:
        """Write the kinds met since the last call into the arrays; their numbers."""
        fresh, start = self._fresh, self.count
        if not fresh:
            return range(start, start)
        self._fresh = []
        self.count = end = start + len(fresh)
        if end > len(self.cpu):
            self._grow(max(64, 2 * end))
        codes = np.zeros((len(fresh), self.width), dtype=np.int64)
        for line, key in enumerate(fresh):
            codes[line, : len(key) - 3] = key[3:]
            if len(key) > 3 and key[3] < 0:
                self.mig[start + line] = tuple(self.mig_cards[-1 - code] for code in key[3:] if code < 0)
        codes = np.maximum(codes, 0)
        lines = slice(start, end)
        self.milli[lines] = codes >> _MILLI_SHIFT & _MILLI_MASK
        self.mib[lines] = codes & _MIB_MASK
        static = codes >> _SORT_SHIFT
        self.sort[lines] = static // _GROUPS
        self.group[lines] = static % _GROUPS
        self.cpu[lines] = [key[1] for key in fresh]
        self.memory[lines] = [key[2] for key in fresh]
        facts = np.array([self.chassis_facts[key[0]] for key in fresh])
        self.total_cpu[lines], self.total_memory[lines] = facts[:, 0], facts[:, 1]
        self.cards[lines], self.flavour[lines] = facts[:, 2], facts[:, 3]
        return range(start, end)

    def _grow(self, size: int) -> None:
        for name in (
            "milli", "mib", "sort", "group", "cpu", "memory", "total_cpu", "total_memory", "cards", "flavour",
        ):  # fmt: skip
            setattr(self, name, grown(getattr(self, name), size))


def grown(old: npt.NDArray[T], size: int) -> npt.NDArray[T]:
    """A longer copy of an array, zeros at the end."""
    new = np.zeros((size, *old.shape[1:]), dtype=old.dtype)
    new[: len(old)] = old
    return new
