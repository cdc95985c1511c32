"""Look at every held card once a minute beside its host's load, and keep counts by the hour.

What only the two together can tell: a card that waits while its host reads or computes, and clocks that are held
down while it works. A card without a fresh sample is not counted, nor is the same sample twice.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from django.db import connection, transaction

from monitoring.engine.tiles import NO_DATA_MS
from monitoring.engine.waste import Look, Rules, Tally, tally_of
from monitoring.models import GpuState, NodeState, WatchHour
from pool.models import Allocation, Lease
from portal.kernel.clock import now

_LOCK = 7_301_011
FRESH = timedelta(milliseconds=NO_DATA_MS)
KEPT = timedelta(days=15)
# Usable payload of a PCIe lane in KiB/s by generation (PCI-SIG rates less line code); full from four fifths on
_LANE_KIB_S = {1: 244_140, 2: 488_281, 3: 961_914, 4: 1_922_851, 5: 3_845_703, 6: 7_385_253}
_FULL = 0.8
_SUMS = (
    "looks", "low", "io", "cpu", "pcie", "activity_pm", "busy", "hot", "brake", "capped",
    "slow_n", "slow_clock", "free_n", "free_clock",
)  # fmt: skip
_KEYS = "gpu_id, slot, allocation_id, bucket"
_UPSERT = f"""
INSERT INTO monitoring_watchhour AS w ({_KEYS}, {", ".join(_SUMS)}, temp_max, seen_at)
SELECT * FROM unnest(%s::bigint[], %s::smallint[], %s::bigint[], %s::timestamptz[],
    {", ".join("%s::bigint[]" for _ in _SUMS)}, %s::smallint[], %s::timestamptz[])
ON CONFLICT ({_KEYS}) DO UPDATE SET {", ".join(f"{c} = w.{c} + EXCLUDED.{c}" for c in _SUMS)},
    temp_max = GREATEST(w.temp_max, EXCLUDED.temp_max), seen_at = EXCLUDED.seen_at
WHERE w.seen_at < EXCLUDED.seen_at
"""


def watch_look(*, rules: Rules | None = None) -> int:
    """One look at all cards of running work; returns how many were counted. A second run at once does nothing."""
    rules = rules or Rules()
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_try_advisory_xact_lock(%s)", [_LOCK])
            if not cursor.fetchone()[0]:
                return 0
        rows = list(_looks(now(), rules))
        if rows:
            columns = [list(column) for column in zip(*rows, strict=True)]
            with connection.cursor() as cursor:
                cursor.execute(_UPSERT, columns)
                return int(cursor.rowcount)
    return 0


def _looks(at: datetime, rules: Rules) -> Any:
    leases = Lease.objects.filter(ended_at=None, allocation__state=Allocation.State.RUNNING)
    held = {
        (gpu_id, 0 if instance is None else instance + 1): (allocation_id, node_id)
        for gpu_id, instance, allocation_id, node_id in leases.order_by("id").values_list(
            "gpu_id", "mig_slice__gpu_instance", "allocation_id", "gpu__node_id"
        )
    }
    hosts = {
        node: (cpu, iowait)
        for node, cpu, iowait in NodeState.objects.filter(at__gt=at - FRESH).values_list(
            "node_id", "cpu_pm", "iowait_pm"
        )
    }
    states = GpuState.objects.filter(gpu_id__in={gpu for gpu, _slot in held}, at__gt=at - FRESH)
    for gpu_id, slot, seen, util, sm, clock, temp, throttle, latched, more in states.values_list(
        "gpu_id", "slot", "at", "util_pm", "sm_pm", "sm_clock_mhz", "temp_c", "throttle", "latched", "more"
    ):
        key = (gpu_id, slot)
        if key not in held:
            continue
        allocation_id, node_id = held[key]
        cpu, iowait = hosts.get(node_id, (None, None))
        activity = sm if sm is not None else (None if latched else util)
        look = Look(activity, throttle, clock, temp, cpu, iowait, pcie_full(more))
        tally = tally_of(look, rules)
        bucket = seen.replace(minute=0, second=0, microsecond=0)
        yield (
            gpu_id, slot, allocation_id, bucket, *(getattr(tally, name) for name in _SUMS), tally.temp_max, seen,
        )  # fmt: skip


def pcie_full(more: dict[str, Any]) -> bool | None:
    """Whether the bus to the card carries four fifths of what its present link can; None where it is not known."""
    rates = [more[name] for name in ("pcie_rx_kib_s", "pcie_tx_kib_s") if name in more]
    lane, width = _LANE_KIB_S.get(more.get("pcie_gen", 0)), more.get("pcie_width")
    if not rates or lane is None or not width:
        return None
    return bool(max(rates) >= _FULL * lane * width)


def tallies(*, since: datetime) -> dict[tuple[int, int, int], Tally]:
    """(allocation, card, slot) → the sum of its looks since then."""
    out: dict[tuple[int, int, int], Tally] = {}
    rows = WatchHour.objects.filter(bucket__gte=since).values_list(
        "allocation_id", "gpu_id", "slot", "temp_max", *_SUMS
    )
    for allocation_id, gpu_id, slot, temp, *sums in rows:
        tally = Tally(temp_max=temp, **dict(zip(_SUMS, sums, strict=True)))
        out.setdefault((allocation_id, gpu_id, slot), Tally()).add(tally)
    return out


def watch_keep() -> int:
    """Drop looks past their retention; returns rows dropped."""
    return WatchHour.objects.filter(bucket__lt=now() - KEPT).delete()[0]
