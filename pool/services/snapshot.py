"""The database as the scheduler's snapshot, read once for whoever asks beside the planner (which keeps its own,
pool/services/planner.py): some fifteen queries, whatever the size of the pool.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pool.engine import model
from pool.models import SchedulingPolicy
from pool.selectors.planner_nodes import facts_of, gpu_blocked, node_blocked, nodes_read
from pool.selectors.planner_queue import (
    held_now,
    request_item,
    requests_read,
    user_limits_read,
    user_rooms,
)
from pool.selectors.planner_running import running_read
from pool.selectors.reclaim import minimum_runs
from quotas.engine.flavours import FlavourPolicy
from quotas.models import CapacityRequest, GpuFlavour
from quotas.selectors.trees import quota_trees

__all__ = [
    "Bundle",
    "gpu_blocked",
    "node_blocked",
    "policy_active",
    "policy_from",
    "request_item",
    "snapshot_load",
]
FLAVOUR_SWITCHES = tuple(FlavourPolicy.__dataclass_fields__)


@dataclass(frozen=True, slots=True)
class Bundle:
    """The snapshot with what is needed to write its plan down: ``uids`` of the requests in line."""

    snapshot: model.Snapshot
    flavour_ids: dict[str, int]
    uids: dict[int, str]


def policy_active() -> tuple[SchedulingPolicy | None, model.Policy]:
    """The published policy and its engine form."""
    row = SchedulingPolicy.objects.filter(active=True).first()
    return row, policy_from(row.values if row is not None else {})


def policy_from(values: dict[str, Any]) -> model.Policy:
    """The engine's form of stored switches; what is not named has its default, unknown names of old versions are
    left aside.
    """
    flavour = {key: values[key] for key in FLAVOUR_SWITCHES if key in values}
    known = set(model.Policy.__dataclass_fields__) - {"flavour"}
    return model.Policy(
        flavour=FlavourPolicy(**flavour), **{key: values[key] for key in sorted(known & set(values))}
    )


def snapshot_load(*, requests: Iterable[CapacityRequest] | None = None) -> Bundle:
    """Everything one decision looks at. ``requests`` defaults to the queue."""
    flavours = list(GpuFlavour.objects.all())
    codes = {flavour.pk: flavour.code for flavour in flavours}
    asked, holding = requests_read()
    if requests is None:
        pending = {pk: one.item for pk, one in asked.items()}
        uids = {pk: one.uid for pk, one in asked.items()}
    else:
        given = list(requests)
        pending = {request.pk: request_item(request) for request in given}
        uids = {request.pk: str(request.uid) for request in given}
    people = {item.user_id for item in pending.values() if item.user_id is not None}
    running, limits = running_read(codes), user_limits_read()
    held = held_now(holding, running.values()) if limits else {}
    snapshot = model.Snapshot(
        nodes=tuple(nodes_read(flavours).values()),
        flavours=tuple(facts_of(flavour) for flavour in flavours),
        running=tuple(running.values()),
        pending=tuple(pending.values()),
        quotas={codes[pk]: tree.snapshot() for pk, tree in quota_trees().items() if pk in codes},
        users=user_rooms(limits, held, people, holding.values()),
        minimum_run=minimum_runs(),
    )
    return Bundle(snapshot, {code: pk for pk, code in codes.items()}, uids)
