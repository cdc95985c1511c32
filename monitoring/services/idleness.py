"""Whether running work is idle: what the cards say, given to the pool, which decides what follows.

Idle needs two signals on every card of an allocation (``monitoring.engine.samples.activity``: activity below 5 %
*and* no kernel running or no process) since a moment; a card without a fresh sample makes it unknown.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

from monitoring.engine.tiles import NO_DATA_MS
from monitoring.models import GpuState
from pool.models import Allocation, Lease
from pool.services.idle import IdleFinding, idle_findings_take
from portal.kernel.clock import now

FRESH = timedelta(milliseconds=NO_DATA_MS)


def idle_judge() -> dict[str, int]:
    """Look at all running allocations and give the pool what was found."""
    return idle_findings_take(findings=findings(now()))


def findings(at: datetime) -> Iterator[IdleFinding]:
    """One finding for each running allocation that holds a GPU, from the last states of its cards or slices."""
    held: dict[int, list[tuple[int, int]]] = {}
    rows = Lease.objects.filter(ended_at=None, allocation__state=Allocation.State.RUNNING)
    for allocation_id, gpu_id, instance in rows.order_by("allocation_id", "id").values_list(
        "allocation_id", "gpu_id", "mig_slice__gpu_instance"
    ):
        held.setdefault(allocation_id, []).append((gpu_id, 0 if instance is None else instance + 1))
    states = {
        (state.gpu_id, state.slot): state
        for state in GpuState.objects.filter(
            gpu_id__in={gpu for keys in held.values() for gpu, _slot in keys}
        )
    }
    for allocation_id, keys in held.items():
        yield judge(allocation_id, [states.get(key) for key in dict.fromkeys(keys)], at)


def judge(allocation_id: int, states: list[GpuState | None], at: datetime) -> IdleFinding:
    """Idle when all its cards are, since the last of them was; one without fresh data makes it unknown."""
    evidence: dict[str, Any] = {"cards": len(states)}
    fresh = [state for state in states if state is not None and at - state.at <= FRESH]
    if not states or len(fresh) < len(states):
        return IdleFinding(
            allocation_id, "unknown", None, {**evidence, "without_data": len(states) - len(fresh)}
        )
    quiet = [state.quiet_since for state in fresh if state.quiet_since is not None]
    if len(quiet) < len(fresh):
        return IdleFinding(allocation_id, "busy", None, {**evidence, "quiet": len(quiet)})
    evidence |= {
        "activity_pm": max((_level(state) for state in fresh), default=0),
        "processes": sum(len(state.processes) for state in fresh),
    }
    return IdleFinding(allocation_id, "idle", max(quiet), evidence)


def _level(state: GpuState) -> int:
    """The activity that counts: of the SMs where it is known. A latched counter says nothing."""
    if state.sm_pm is not None:
        return state.sm_pm
    return 0 if state.latched or state.util_pm is None else state.util_pm
