"""Short cuts of the tests about taking back: running work, an owner who waits, an eviction as a plan names it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from pool.engine.model import WHOLE, Evict, Kept, Member, Take
from pool.models import Allocation, Node, ReclaimCase
from pool.services.cycle import schedule_cycle
from pool.services.ladder import ladder_sweep
from pool.services.reclaim import Evicted, evictions_apply
from portal.kernel.clock import set_clock
from portal.kernel.units import to_ms
from quotas.models import CapacityRequest
from tests.pool import builders as pool

T = datetime(2026, 6, 16, 6, 0, tzinfo=UTC)


def at(seconds: float) -> set_clock:
    """The clock so many seconds after T."""
    return set_clock(T + timedelta(seconds=seconds))


def moment(seconds: float) -> datetime:
    return T + timedelta(seconds=seconds)


def running(where: Any, what: Any, gpus: int = 1, **values: Any) -> Allocation:
    """A request that was placed by a cycle and is confirmed to run now."""
    request = pool.queued(where, what, gpus, **values)
    schedule_cycle()
    allocation = Allocation.objects.get(request=request)
    pool.report_running(allocation)
    allocation.refresh_from_db()
    assert allocation.state == "running", allocation.state
    return allocation


def gone(allocation: Allocation, exit_code: int | None = None, open_nodes: bool = False) -> None:
    """All its processes ended and its cards were seen free. Nodes are cordoned before, unless told otherwise, so
    that the cycle which follows does not place it again at once."""
    if not open_nodes:
        Node.objects.filter(schedulable="open").update(schedulable="cordoned")
    pool.report_ended(allocation, exit_code)  # type: ignore[arg-type]
    pool.report_free(allocation)
    allocation.refresh_from_db()


def members_of(*allocations: Allocation) -> tuple[Member, ...]:
    """The whole cards that allocations hold, as places for one request."""
    by_node: dict[int, list[Take]] = {}
    for allocation in allocations:
        for lease in allocation.leases.filter(ended_at=None).select_related("gpu").order_by("gpu_id"):
            by_node.setdefault(lease.gpu.node_id, []).append(Take(lease.gpu_id, (WHOLE,), 1000, 0))
    return tuple(
        Member(number, node_id, 0, 0, tuple(takes)) for number, (node_id, takes) in enumerate(by_node.items())
    )


def evict(*victims: Allocation, owner: CapacityRequest, keep: bool = True, until: float = 900) -> Evicted:
    """Evict these for the owner, as a plan would, and keep their cards for it."""
    from portal.kernel.clock import now

    kept = Kept(owner.pk, members_of(*victims), to_ms(now() + timedelta(seconds=until))) if keep else None
    evicts = [
        Evict(victim.pk, owner.pk, "reclaim", "owner_below_guarantee", {"guarantee": 4000})
        for victim in victims
    ]
    return evictions_apply(evicts=evicts, keep=kept)


def case_of(allocation: Allocation) -> ReclaimCase:
    """Its newest case."""
    found = ReclaimCase.objects.filter(allocation=allocation).order_by("-id").first()
    assert found is not None
    return found


def sweep() -> dict[str, int]:
    return ladder_sweep()


def kinds(allocation: Allocation) -> list[str]:
    return list(allocation.events.order_by("id").values_list("kind", flat=True))
