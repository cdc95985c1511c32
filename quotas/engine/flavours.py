"""Which acceptable flavour an ask takes: the ordered search with borrow and preempt stops.

mode of a flavour: fit if request ≤ nominal − used, borrow if ≤ that + borrowable, preempt if ≤ that +
evictable, else none. ``fit`` ends the search and wins; ``borrow`` (``preempt``) ends it where the policy
says stop; otherwise the best so far by preference is kept, the earlier one on a tie. Source:
cases_quota.json, kind flavour_choice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Mode = Literal["fit", "borrow", "preempt", "none"]
Stop = Literal["stop", "next"]
Preference = Literal["borrowing_over_preemption", "preemption_over_borrowing"]

_RANKS: dict[str, dict[Mode, int]] = {
    "borrowing_over_preemption": {"fit": 0, "borrow": 1, "preempt": 2, "none": 3},
    "preemption_over_borrowing": {"fit": 0, "preempt": 1, "borrow": 2, "none": 3},
}


@dataclass(frozen=True, slots=True)
class FlavourRoom:
    """One flavour as the department sees it; ``borrowable`` and ``evictable`` are further units beyond
    nominal.
    """

    id: str
    nominal: int
    used: int
    borrowable: int = 0
    evictable: int = 0

    def mode(self, request: int) -> Mode:
        free = self.nominal - self.used
        if request <= free:
            return "fit"
        if request <= free + self.borrowable:
            return "borrow"
        return "preempt" if request <= free + self.evictable else "none"


@dataclass(frozen=True, slots=True)
class FlavourPolicy:
    """When to stop at the first flavour that borrows or evicts, and which of the two is the lesser evil."""

    when_can_borrow: Stop = "next"
    when_can_preempt: Stop = "next"
    preference: Preference = "borrowing_over_preemption"


@dataclass(frozen=True, slots=True)
class FlavourChoice:
    flavour: str | None
    mode: Mode


def choose_flavour(request: int, rooms: Iterable[FlavourRoom], policy: FlavourPolicy) -> FlavourChoice:
    """The flavour that the rule picks, or ``FlavourChoice(None, "none")``."""
    ranks = _RANKS[policy.preference]
    best = FlavourChoice(None, "none")
    for room in rooms:
        mode = room.mode(request)
        if mode == "fit":
            return FlavourChoice(room.id, mode)
        if ranks[mode] < ranks[best.mode]:
            best = FlavourChoice(room.id, mode)
        if (mode == "borrow" and policy.when_can_borrow == "stop") or (
            mode == "preempt" and policy.when_can_preempt == "stop"
        ):
            return FlavourChoice(room.id, mode)
    return best


def rank_modes(preference: Preference, mode: Mode) -> int:
    """0 for the mode to take first; for ordering flavours when the first choice has no place."""
    return _RANKS[preference][mode]
