"""What waste findings rest on: what held cards did by the hour, foreign processes, layouts that leave a rest."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from django.db import connection

from monitoring.engine.waste import CardUse, Part, Rules, fractions_of
from pool.engine.mig import Geometry, Placed, geometry, geometry_for_product
from pool.models import Gpu, Lease, MigSlice
from quotas.models import GpuFlavour

# Only hours that were held from end to end count: the first minutes of a program are no measure of it.
_USES = """
WITH held AS (
    SELECT l.allocation_id, l.gpu_id, COALESCE(m.gpu_instance + 1, 0) AS slot, l.charge, g.memory_mib, n.name, g.index,
        greatest(%(start)s, date_trunc('hour', greatest(l.started_at, a.started_at) + interval '1 hour'
            - interval '1 microsecond', 'UTC')) AS begin
    FROM pool_lease l JOIN pool_allocation a ON a.id = l.allocation_id JOIN pool_gpu g ON g.id = l.gpu_id
    JOIN pool_node n ON n.id = g.node_id LEFT JOIN pool_migslice m ON m.id = l.mig_slice_id
    WHERE l.ended_at IS NULL AND a.state = 'running' AND a.started_at < %(latest)s
)
SELECT h.allocation_id, h.name, h.index, h.charge, h.memory_mib,
    extract(epoch FROM %(end)s - h.begin)::int, COALESCE(sum(r.covered_s), 0)::int,
    COALESCE(sum(r.covered_s) FILTER (WHERE COALESCE(r.sm, r.util) < %(quiet)s), 0)::int,
    count(*) FILTER (WHERE r.sm IS NULL AND r.util IS NOT NULL),
    percentile_disc(0.95) WITHIN GROUP (ORDER BY r.sm), max(r.sm),
    percentile_disc(0.95) WITHIN GROUP (ORDER BY r.util), max(r.util), max(r.mem_max)
FROM held h LEFT JOIN LATERAL (
    SELECT covered_s, mem_max, CASE WHEN sm_n > 0 THEN sm_sum / sm_n END AS sm,
        CASE WHEN util_n > 0 THEN util_sum / util_n END AS util
    FROM monitoring_gpurollup WHERE gpu_id = h.gpu_id AND slot = h.slot AND step = 3600
        AND bucket >= h.begin AND bucket < %(end)s
) r ON true
WHERE h.begin < %(end)s
GROUP BY h.allocation_id, h.gpu_id, h.slot, h.charge, h.memory_mib, h.name, h.index, h.begin
ORDER BY h.allocation_id, h.name, h.index, h.slot
"""


def card_uses(*, start: datetime, end: datetime, latest: datetime, rules: Rules) -> dict[int, list[CardUse]]:
    """Allocation → what each of its cards did in its full hours of [start, end); only of work that runs since before
    `latest`. `end` is the begin of an hour. One query."""
    out: dict[int, list[CardUse]] = {}
    with connection.cursor() as cursor:
        cursor.execute(_USES, {"start": start, "end": end, "latest": latest, "quiet": rules.quiet_pm})
        for row in cursor.fetchall():
            allocation, node, index, charge, memory, held, covered, quiet, without_sm = row[:9]
            sm_p95, sm_top, util_p95, util_top, peak = row[9:]
            by_sm = sm_top is not None and not without_sm
            out.setdefault(allocation, []).append(
                CardUse(
                    label=f"{node}/{index}",
                    charge=charge,
                    held_s=held,
                    covered_s=min(covered, held),
                    quiet_s=quiet,
                    p95_pm=sm_p95 if by_sm else util_p95,
                    peak_pm=sm_top if by_sm else util_top,
                    basis="sm" if by_sm else "busy" if util_top is not None else "",
                    memory_peak_mib=peak,
                    memory_mib=memory,
                )
            )
    return out


def parts_of(flavour: GpuFlavour | None, memory_mib: int) -> list[Part]:
    """What of a card of this flavour could be asked for instead of all of it."""
    found = fractions_of(memory_mib)
    table = geometry(flavour.mig_table) if flavour is not None and flavour.mig_table else None
    if table is None:
        return found
    return found + [
        Part(
            p.name,
            table.charge(p.name),
            p.memory_mib if p.memory_mib is not None else memory_mib * p.size // table.memory_slices,
        )
        for p in table.profiles
        if "+" not in p.name
    ]


def foreign_cards() -> list[Gpu]:
    """Cards with processes that nobody holds them for."""
    return list(
        Gpu.objects.exclude(foreign_use=[]).select_related("node__cluster__site", "flavour").order_by("id")
    )


def split_cards() -> list[tuple[Gpu, list[MigSlice]]]:
    """Split cards in service with their instances."""
    cards = list(
        Gpu.objects.filter(mig_enabled=True, condition="ok")
        .select_related("node__cluster__site", "flavour")
        .order_by("id")
    )
    parts: dict[int, list[MigSlice]] = {}
    for one in MigSlice.objects.filter(gpu__in=cards, gone_at=None).order_by("gpu_id", "start"):
        parts.setdefault(one.gpu_id, []).append(one)
    return [(card, parts[card.pk]) for card in cards if card.pk in parts]


def table_of(card: Gpu) -> Geometry | None:
    """The table of MIG profiles of a card."""
    own = geometry(card.flavour.mig_table) if card.flavour is not None and card.flavour.mig_table else None
    return own or geometry_for_product(card.model_name)


def mig_rest(table: Geometry, slices: Sequence[MigSlice]) -> int:
    """Milli-GPU of a split card that no further instance could take: what its layout strands. What one more
    instance could still use is free, not stranded."""
    placed = [Placed(one.profile, one.start, one.size) for one in slices]
    taken = sum(one.compute_slices for one in slices)
    while True:
        fits = [
            (profile.compute_slices, profile.name, starts[0], profile.size)
            for profile in table.profiles
            if "+" not in profile.name
            and taken + profile.compute_slices <= table.compute_slices
            and (starts := table.free_starts(placed, profile.name))
        ]
        if not fits:
            break
        compute, name, start, size = max(fits)
        placed.append(Placed(name, start, size))
        taken += compute
    return max(0, 1000 - 1000 * taken // table.compute_slices)


def shared_cards() -> list[tuple[int, int, datetime]]:
    """(card, milli-GPU held, since when it is so) of whole cards shared by fractions."""
    rows: dict[int, list[Any]] = {}
    leases = Lease.objects.filter(ended_at=None, mig_slice=None, charge__lt=1000)
    for gpu_id, charge, started in leases.values_list("gpu_id", "charge", "started_at"):
        row = rows.setdefault(gpu_id, [0, started])
        row[0] += charge
        row[1] = max(row[1], started)
    return [(gpu_id, used, since) for gpu_id, (used, since) in sorted(rows.items())]
