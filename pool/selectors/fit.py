"""Would a wish start now, and if not, why and when: the answer beside the request form and on the request
page.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from threading import Lock
from typing import Any

from django.db import connection

from pool.engine.model import Policy, Reserve, Snapshot, Waiting
from pool.engine.whatif import Check, place_check
from pool.engine.world import World
from pool.models import Node
from pool.services.cycle import Planner
from pool.services.promises import promises_told
from pool.services.queue_entries import figures_for_people
from pool.services.snapshot import policy_active, request_item, snapshot_load
from portal.accounts.models import Department
from portal.kernel.clock import now
from portal.kernel.units import from_ms, to_ms
from quotas.models import CapacityRequest

HYPOTHETICAL = (1 << 62) - 1
"""Id of a wish that has none yet: later than every request in line."""
MAX_AGE_S = 3.0

LONG_LINE = 1000
"""With more in line only the wish is decided about, beside the promises of the last whole plan: all others are known
to wait."""


@dataclass(frozen=True, slots=True)
class Fit:
    """``free_now``: quota and place are there, others aside; ``starts_now``: it would start in the next
    cycle.

    ``reason`` with ``figures`` as in a queue entry, "" when it starts. ``nodes`` are the names it would
    take now.
    ``charge_milli`` by acceptable flavour that could be charged.
    """

    free_now: bool
    starts_now: bool
    reason: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    nodes: tuple[str, ...] = ()
    flavour: str | None = None
    charge_milli: dict[str, int] = field(default_factory=dict)
    position: int | None = None
    of: int | None = None
    start_from: datetime | None = None
    start_to: datetime | None = None
    basis: str = ""


def fit_check(request: CapacityRequest, *, in_line: bool = True, max_age_s: float = MAX_AGE_S) -> Fit:
    """Judge a (possibly unsaved) request against the pool as it was at most ``max_age_s`` seconds ago."""
    with _watcher.lock:
        return _check(_watcher.look(max_age_s), request, in_line=in_line)


def _check(watcher: Watcher, request: CapacityRequest, *, in_line: bool) -> Fit:
    item, seen, at = request_item(request), watcher.snapshot, to_ms(now())
    assert seen is not None  # it has looked
    snapshot = seen
    if not item.id:
        item = replace(item, id=HYPOTHETICAL, queued_at=at)
    elif item.id in watcher.uids:
        snapshot = replace(snapshot, pending=tuple(one for one in snapshot.pending if one.id != item.id))
    alone = len(snapshot.pending) > LONG_LINE
    with watcher.planner.in_world(seen) as world:
        if alone and in_line:
            snapshot = replace(snapshot, promised=tuple(_standing(promises_told(), world)))
        check = place_check(snapshot, watcher.policy, at, item, in_line=in_line, world=world, alone=alone)
    return _answer(check, watcher.uids)


def _standing(promised: Iterable[Reserve], world: World) -> Iterator[Reserve]:
    """Promises whose nodes are still there."""
    rows = world.state.fleet.node_row
    return (one for one in promised if all(member.node_id in rows for member in one.members))


class Watcher:
    """The pool as this process saw it last, brought up to date by the change feed as the planner's memory is: who types
    asks many times a minute, and nothing of a large pool is read or built anew for it. One thread at a time (``lock``).
    """

    def __init__(self) -> None:
        self.lock = Lock()
        self.planner = Planner()
        self.snapshot: Snapshot | None = None
        self.uids: dict[int, str] = {}
        self.policy = Policy()
        self._seen = 0.0

    def look(self, max_age_s: float) -> Watcher:
        """Be as of at most so long ago."""
        moment = time.monotonic()
        if self.snapshot is None or moment - self._seen >= max_age_s:
            self.policy = policy_active()[1]
            if connection.in_atomic_block:  # a memory must not be made of what is not committed: all is read
                bundle = snapshot_load()
                self.snapshot, self.uids = bundle.snapshot, bundle.uids
            else:
                self.snapshot, self.uids = self._remembered()
            self._seen = moment
        return self

    def _remembered(self) -> tuple[Snapshot, dict[int, str]]:
        memory = self.planner.memory
        try:
            memory.refresh()
            self.planner.learn(now())
        except BaseException:
            memory.forget()
            raise
        return memory.snapshot(self.policy), memory.uids


_watcher = Watcher()


def _answer(check: Check, uids: Mapping[int, str]) -> Fit:
    chosen = next((one for one in check.flavours if one.members is not None), None)
    ids = [member.node_id for member in chosen.members or ()] if chosen else []
    names = dict(Node.objects.filter(pk__in=ids).values_list("pk", "name"))
    waiting: Waiting | None = check.waiting
    code, figures = "", {}
    if waiting is not None:
        code, figures = waiting.code, dict(waiting.figures)
    elif not check.starts_now:
        reason = check.refusal or next((one.reason for one in check.flavours if one.reason), None)
        code, figures = (reason.code, dict(reason.figures)) if reason else ("", {})
    departments = (
        dict(Department.objects.without_tree_fields().values_list("pk", "name")) if "level" in figures else {}
    )
    estimate = waiting.estimate if waiting is not None else None
    return Fit(
        free_now=check.free_now,
        starts_now=check.starts_now,
        reason=code,
        figures=figures_for_people(figures, uids, departments),
        nodes=tuple(names[pk] for pk in ids if pk in names),
        flavour=chosen.flavour if chosen else None,
        charge_milli={one.flavour: one.charge_milli for one in check.flavours if one.flavour is not None},
        position=waiting.position if waiting is not None else None,
        of=waiting.of if waiting is not None else None,
        start_from=from_ms(estimate.earliest) if estimate else None,
        start_to=from_ms(estimate.latest) if estimate else None,
        basis=estimate.basis if estimate else "",
    )
