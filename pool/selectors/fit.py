"""Would a wish start now, and if not, why and when: the answer beside the request form and on the request
page.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from pool.engine.model import Policy, Waiting
from pool.engine.whatif import Check, place_check
from pool.models import Node
from pool.services.queue_entries import figures_for_people
from pool.services.snapshot import Bundle, policy_active, request_item, snapshot_load
from portal.accounts.models import Department
from portal.kernel.clock import now
from portal.kernel.units import from_ms, to_ms
from quotas.models import CapacityRequest

HYPOTHETICAL = (1 << 62) - 1
"""Id of a wish that has none yet: later than every request in line."""
MAX_AGE_S = 3.0

_last: tuple[float, Bundle, Policy] | None = None


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
    bundle, policy = _bundle(max_age_s)
    item = request_item(request)
    snapshot = bundle.snapshot
    if item.id in bundle.uids:
        snapshot = replace(snapshot, pending=tuple(one for one in snapshot.pending if one.id != item.id))
    if not item.id:
        item = replace(item, id=HYPOTHETICAL, queued_at=to_ms(now()))
    check = place_check(snapshot, policy, to_ms(now()), item, in_line=in_line)
    return _answer(check, bundle)


def _answer(check: Check, bundle: Bundle) -> Fit:
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
        figures=figures_for_people(figures, bundle.uids, departments),
        nodes=tuple(names[pk] for pk in ids if pk in names),
        flavour=chosen.flavour if chosen else None,
        charge_milli={one.flavour: one.charge_milli for one in check.flavours if one.flavour is not None},
        position=waiting.position if waiting is not None else None,
        of=waiting.of if waiting is not None else None,
        start_from=from_ms(estimate.earliest) if estimate else None,
        start_to=from_ms(estimate.latest) if estimate else None,
        basis=estimate.basis if estimate else "",
    )


def _bundle(max_age_s: float) -> tuple[Bundle, Policy]:
    """The last snapshot of this process while it is fresh: somebody who types asks many times a second."""
    global _last
    moment = time.monotonic()
    if _last is not None and moment - _last[0] < max_age_s:
        return _last[1], _last[2]
    _row, policy = policy_active()
    bundle = snapshot_load()
    _last = (moment, bundle, policy)
    return bundle, policy
