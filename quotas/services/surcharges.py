"""Surcharges on idle hours: lines of their own, once per lease and day, when the day's telemetry has settled.

A surcharge counts no hours (the line of the use did); `surcharge_ms` says what it is of. Its rate is the one that held
where the lease's use of that day began, so that it never needs to be cut.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date

from django.db import transaction

from portal.kernel.clock import now
from portal.kernel.ids import uuid7
from portal.kernel.units import cost_micro
from quotas.models import LedgerEntry, PriceRate
from quotas.services.books import books_for_booking

OF_THE_USE = (
    "request_id_ref", "department_id_ref", "department_path", "user_id_ref", "user_name", "cost_code", "flavour_id",
    "flavour_name", "site_code", "node_name", "gpu_label", "charge_milli", "local_day", "currency", "span_id",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Idle:
    """What a lease held idle on one local day, GPU-milliseconds."""

    span_id: int
    day: date
    idle_ms: int


def idle_surcharges_book(found: Sequence[Idle]) -> int:
    """Book them; returns the lines added. What has a line already, no booked use or no surcharge is left out."""
    idle_rates = dict(
        PriceRate.objects.filter(idle_micro_per_gpu_hour__gt=0).values_list("uid", "idle_micro_per_gpu_hour")
    )
    wanted = {(one.span_id, one.day): one.idle_ms for one in found if one.idle_ms > 0}
    if not idle_rates or not wanted:
        return 0
    with transaction.atomic():
        books = books_for_booking()
        uses: dict[tuple[int, date], list[LedgerEntry]] = defaultdict(list)
        for line in LedgerEntry.objects.filter(
            span_id__in={span for span, _day in wanted}, local_day__in={day for _span, day in wanted}
        ).order_by("starts_at", "id"):
            assert line.span_id is not None
            uses[line.span_id, line.local_day].append(line)
        lines = []
        for key, idle_ms in sorted(wanted.items()):
            of_day = uses.get(key, [])
            use = [line for line in of_day if line.kind == LedgerEntry.Kind.USAGE]
            if not use or len({line.kind for line in of_day} & {LedgerEntry.Kind.IDLE}):
                continue
            micro = idle_rates.get(use[0].rate_uid, 0) if use[0].rate_uid is not None else 0
            held = sum(line.gpu_ms for line in of_day)
            idle = min(idle_ms, held)
            if not micro or idle <= 0:
                continue
            lines.append(
                LedgerEntry(
                    **{name: getattr(use[0], name) for name in OF_THE_USE},
                    uid=uuid7(),
                    kind=LedgerEntry.Kind.IDLE,
                    starts_at=use[0].starts_at,
                    ends_at=use[-1].ends_at,
                    gpu_ms=0,
                    surcharge_ms=idle,
                    micro_per_gpu_hour=micro,
                    rate_uid=use[0].rate_uid,
                    amount_micro=cost_micro(idle, micro),
                    booked_at=now(),
                    booked_month=books.month_for(key[1]),
                )
            )
        # Two workers at once: the database keeps the first line of a lease and day.
        LedgerEntry.objects.bulk_create(lines, ignore_conflicts=True, batch_size=1000)
    return len(lines)
