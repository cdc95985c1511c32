"""What an act on people or departments would touch in upper rooms.

This room knows no leases and no quotas. Upper rooms register here, from `AppConfig.ready`: functions that
count what an act touches (shown before it is done; a blocking one refuses it), functions that run inside the
transaction of a move or a close, and the GPUs that people hold now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from portal.ops.actor import Actor


@dataclass(frozen=True)
class Effect:
    """One thing that an act touches; `label` is lazily translated, `blocks` refuses it while `count` > 0."""

    label: Any
    count: int
    blocks: bool = False
    url: str = ""


Counter = Callable[[str, list[int]], Iterable[Effect]]
Moved = Callable[[int, int | None, int | None], None]
Closed = Callable[[Actor, int, str], None]
Holdings = Callable[[list[int]], dict[int, int]]

_department_counters: list[Counter] = []
_person_counters: list[Counter] = []
_moved: list[Moved] = []
_closed: list[Closed] = []
_holdings: list[Holdings] = []


def register_department_effects(counter: Counter) -> None:
    """`counter(act, department_ids)` tells what "close", "move" or "reopen" of these departments touches."""
    if counter not in _department_counters:
        _department_counters.append(counter)


def register_person_effects(counter: Counter) -> None:
    """`counter(act, user_ids)` tells what "suspend" of these people touches."""
    if counter not in _person_counters:
        _person_counters.append(counter)


def register_moved(handler: Moved) -> None:
    """`handler(department_id, old_parent_id, new_parent_id)` runs in the transaction of a move, after it:
    counters of the levels above change with it. An error undoes the move."""
    if handler not in _moved:
        _moved.append(handler)


def register_closed(handler: Closed) -> None:
    """`handler(acting_user, department_id, reason)` runs in the transaction that closes a department. An error
    undoes it."""
    if handler not in _closed:
        _closed.append(handler)


def register_holdings(handler: Holdings) -> None:
    """`handler(user_ids)` gives milli-GPU held now by each person (only those above 0)."""
    if handler not in _holdings:
        _holdings.append(handler)


def department_effects(act: str, department_ids: list[int]) -> list[Effect]:
    """All that `act` on the departments touches."""
    return [e for counter in _department_counters for e in counter(act, department_ids)]


def person_effects(act: str, user_ids: list[int]) -> list[Effect]:
    """All that `act` on the people touches."""
    return [e for counter in _person_counters for e in counter(act, user_ids)]


def tell_moved(department_id: int, old_parent_id: int | None, new_parent_id: int | None) -> None:
    """Run the handlers of a move."""
    for handler in _moved:
        handler(department_id, old_parent_id, new_parent_id)


def tell_closed(acting_user: Actor, department_id: int, reason: str) -> None:
    """Run the handlers of a close."""
    for handler in _closed:
        handler(acting_user, department_id, reason)


def held_milli(user_ids: list[int]) -> dict[int, int] | None:
    """Milli-GPU held by each of the people; None where no room can tell."""
    if not _holdings:
        return None
    out: dict[int, int] = {}
    for handler in _holdings:
        for user_id, milli in handler(user_ids).items():
            out[user_id] = out.get(user_id, 0) + milli
    return out
