"""Nodes in the same state are alike: each distinct state gets a number, its *kind*, and is judged once.

A kind is all that a score may look at: free host CPU and memory, and the free share, free memory, sort and link group
of each usable card, as an unordered set. What a class of work costs on a kind never changes, so a what-if that returns
to an earlier state, another what-if over the same pool, and a second node in the same state cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from pool.engine.fleet import Fleet, Ints

_SORT_SHIFT = 36
MILLI_SHIFT = 24
MILLI_MASK = (1 << (_SORT_SHIFT - MILLI_SHIFT)) - 1
_MIB_MASK = (1 << MILLI_SHIFT) - 1
_GROUP_BITS = 6

Key = tuple[int, ...]
T = TypeVar("T", bound=np.generic)


@dataclass(frozen=True, slots=True)
class MigCard:
    """A split card as a score sees it: its flavour, whether nobody holds a slice, and the free profiles."""

    flavour: str
    untouched: bool
    profiles: tuple[str, ...]


class Kind(NamedTuple):
    """A kind in plain numbers: free CPU and memory, the node's CPU and number of cards, codes of ordinary cards."""

    cpu: int
    memory: int
    node_cpu: int
    cards: int
    codes: list[int]


@dataclass(slots=True)
class Overlay:
    """Kinds of the nodes on which a view must keep off some places; valid while the nodes' versions stand."""

    owner: Kinds
    rows: list[int]
    versions: list[int]
    kinds: list[int]


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
        self.uniform = True
        """Whether no node has ordinary cards of several sorts, so that its sums speak for each card."""
        self._describe()
        self._number: dict[Key, int] = {}
        self._fresh: list[Key] = []
        self._mig_number: dict[MigCard, int] = {}
        self.mig_cards: list[MigCard] = []
        self.mig: dict[int, tuple[MigCard, ...]] = {}
        """The split cards of the kinds that have some."""
        self.count = 0
        self.codes: Ints = np.zeros((0, self.width), dtype=np.int64)
        """Codes of the ordinary cards, ascending from the end of the line; 0 is no card."""
        self.flavour: Ints = np.zeros(0, dtype=np.int64)
        """Main flavour of the node."""
        self.sort: Ints = np.zeros(0, dtype=np.int64)
        """The sort of all ordinary cards of the node (0: it has none, or several)."""

    def _describe(self) -> None:
        fleet = self.fleet
        numbers: dict[tuple[int, int, int, int], int] = {}
        split: set[int] = set()
        for row, node in enumerate(fleet.nodes):
            first, last = fleet.first[row], fleet.first[row + 1]
            groups: dict[int, int] = {}
            for card in range(first, last):
                gpu, sort = fleet.cards[card], fleet.card_sort[card]
                group = min(groups.setdefault(gpu.link_group, len(groups)), (1 << _GROUP_BITS) - 1)
                self.card_code.append((sort << _GROUP_BITS | group) << _SORT_SHIFT if sort else -1)
                if gpu.mig and gpu.blocked is None:
                    split.add(row)
            sorts = set(fleet.card_sort[first:last]) - {0}
            self.uniform = self.uniform and len(sorts) <= 1
            sort = sorts.pop() if len(sorts) == 1 else 0
            facts = (node.cpu_milli or 0, last - first, fleet.node_flavour[row], sort)
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

    def mig_code(self, card: MigCard) -> int:
        """The code of a split card: negative."""
        number = self._mig_number.get(card)
        if number is None:
            number = len(self.mig_cards)
            self._mig_number[card] = number
            self.mig_cards.append(card)
        return -1 - number

    def settle(self) -> tuple[int, list[Kind]]:
        """Write the kinds met since the last call into the arrays: the first number, and all of them."""
        fresh, start = self._fresh, self.count
        if not fresh:
            return start, []
        self._fresh = []
        self.count = end = start + len(fresh)
        if end > len(self.flavour):
            for name in ("codes", "flavour", "sort"):
                setattr(self, name, grown(getattr(self, name), max(64, 2 * end)))
        met: list[Kind] = []
        for number, (chassis, cpu, memory, *codes) in enumerate(fresh, start):
            if codes and codes[0] < 0:
                self.mig[number] = tuple(self.mig_cards[-1 - code] for code in codes if code < 0)
                codes = [code for code in codes if code >= 0]
            node_cpu, cards, flavour, sort = self.chassis_facts[chassis]
            met.append(Kind(cpu, memory, node_cpu, cards, codes))
            self.flavour[number], self.sort[number] = flavour, sort
        width = self.width
        self.codes[start:end] = [[*(0,) * (width - len(kind.codes)), *kind.codes] for kind in met]
        return start, met


def milli_of(codes: Ints) -> Ints:
    """Free milli of cards by their codes."""
    return codes >> MILLI_SHIFT & MILLI_MASK


def mib_of(codes: Ints) -> Ints:
    """Free memory of cards by their codes."""
    return codes & _MIB_MASK


def sort_of(codes: Ints) -> Ints:
    """Sorts of cards by their codes."""
    return codes >> (_SORT_SHIFT + _GROUP_BITS)


def group_of(codes: Ints) -> Ints:
    """Link groups of cards by their codes, numbered within the node."""
    return codes >> _SORT_SHIFT & (1 << _GROUP_BITS) - 1


def grown(old: npt.NDArray[T], size: int) -> npt.NDArray[T]:
    """A longer copy of an array, zeros at the end."""
    new = np.zeros((size, *old.shape[1:]), dtype=old.dtype)
    new[: len(old)] = old
    return new
