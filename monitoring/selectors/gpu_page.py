"""What the page of one card shows beside its measures: who holds and held it, events, incidents, hours of the week."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db import connection
from django.db.models import Q

from monitoring.engine.rollup import mean
from monitoring.models import GpuEvent, GpuState
from monitoring.selectors.access import may_see_holding
from pool.models import Gpu, Lease
from portal.accounts.policy import Policy
from portal.kernel.clock import now
from portal.kernel.units import to_ms
from portal.ops.models import Incident

_BUSY = """
SELECT l.id, sum(r.util_n), sum(r.util_sum), sum(r.sm_n), sum(r.sm_sum)
FROM pool_lease l LEFT JOIN pool_migslice m ON m.id = l.mig_slice_id
JOIN monitoring_gpurollup r ON r.gpu_id = l.gpu_id AND r.slot = COALESCE(m.gpu_instance + 1, 0) AND r.step = 3600
    AND r.bucket >= date_trunc('hour', l.started_at, 'UTC') AND r.bucket < COALESCE(l.ended_at, %(now)s)
WHERE l.id = ANY(%(leases)s) GROUP BY l.id
"""


@dataclass
class Held:
    """A lease of the past or present. `seen`: whether the reader may know by whom."""

    lease: Lease
    seen: bool
    gpu_ms: int
    busy: float | None
    sm: float | None


def holdings(policy: Policy, card: Gpu, *, limit: int = 10) -> list[Held]:
    """The last leases of a card, newest first, with their mean busy time from hourly rollups (two queries)."""
    leases = list(
        Lease.objects.filter(gpu=card)
        .select_related("allocation__holder", "allocation__department", "mig_slice")
        .order_by("-started_at", "-id")[:limit]
    )
    moment = now()
    with connection.cursor() as cursor:
        cursor.execute(_BUSY, {"leases": [lease.pk for lease in leases], "now": moment})
        busy = {
            pk: (mean(int(us), int(un)), mean(int(ss), int(sn))) for pk, un, us, sn, ss in cursor.fetchall()
        }
    out = []
    for lease in leases:
        a = lease.allocation
        util, sm = busy.get(lease.pk, (None, None))
        span_ms = to_ms(lease.ended_at or moment) - to_ms(lease.started_at)
        out.append(
            Held(
                lease=lease,
                seen=may_see_holding(policy, holder_id=a.holder_id, department_id=a.department_id),
                gpu_ms=max(0, span_ms) * lease.charge // 1000,
                busy=None if util is None else util / 10,
                sm=None if sm is None else sm / 10,
            )
        )
    return out


def states_of(card: Gpu) -> dict[int, GpuState]:
    """Slot → last state of a card and its slices."""
    return {state.slot: state for state in GpuState.objects.filter(gpu=card).order_by("slot")}


def processes_of(policy: Policy, held: list[Held], state: GpuState | None) -> list[dict[str, Any]] | None:
    """Processes of the last sample; None where the reader may not see them."""
    if not may_see_processes(policy, held):
        return None
    return list(state.processes) if state is not None else []


def may_see_processes(policy: Policy, holdings_now: list[Held]) -> bool:
    """Processes follow the lease: shown when the reader may see every open lease of the card. On a card that
    nobody holds they belong to the pool, and are shown to those who keep or audit it."""
    current = [held for held in holdings_now if held.lease.ended_at is None]
    return all(held.seen for held in current) if current else policy.audits


def events_of(card: Gpu, *, limit: int = 12) -> list[GpuEvent]:
    """What happened to the card, newest first."""
    return list(GpuEvent.objects.filter(gpu=card).order_by("-at", "-id")[:limit])


def incidents_of(card: Gpu, *, limit: int = 6) -> list[Incident]:
    """Incidents about the card, open ones first."""
    found = Incident.objects.filter(Q(subject_type="pool.gpu", subject_uid=card.uid)).order_by("-opened_at")[
        :limit
    ]
    return sorted(found, key=lambda incident: incident.state == "closed")


_CUTS = (1, 20, 40, 60, 80)
_HOURS = """
SELECT bucket, util_n, util_sum FROM monitoring_gpurollup
WHERE gpu_id = %(gpu)s AND slot = 0 AND step = 3600 AND bucket >= %(start)s ORDER BY bucket
"""


def hours(card: Gpu, zone: Any, *, days: int = 7) -> list[dict[str, Any]]:
    """Mean busy time of each hour of the last days in the reader's zone: [{day, hours: [24 cells]}].

    A cell is {value, step} with the shade of the load ramp, {ahead} for an hour to come, None without data.

    On the day a clock goes back one hour comes twice and shows the mean of both; a day it goes forward has a hole.
    """
    local_now = now().astimezone(zone)
    today, present = local_now.date(), (local_now.date(), local_now.hour)
    first = today - timedelta(days=days - 1)
    start = datetime(first.year, first.month, first.day, tzinfo=zone)
    sums: dict[tuple[Any, int], list[int]] = {}
    with connection.cursor() as cursor:
        cursor.execute(_HOURS, {"gpu": card.pk, "start": start})
        for bucket, n, total in cursor.fetchall():
            local = bucket.astimezone(zone)
            slot = sums.setdefault((local.date(), local.hour), [0, 0])
            slot[0] += n
            slot[1] += total
    out = []
    for back in range(days):
        day = first + timedelta(days=back)
        cells: list[dict[str, Any] | None] = []
        for hour in range(24):
            n, total = sums.get((day, hour), (0, 0))
            value = mean(total, n)
            percent = None if value is None else value / 10
            if percent is not None:
                cells.append({"value": percent, "step": sum(percent >= cut for cut in _CUTS)})
            else:
                cells.append({"ahead": True} if (day, hour) > present else None)
        out.append({"day": datetime(day.year, day.month, day.day, 12, tzinfo=zone), "hours": cells})
    return out
