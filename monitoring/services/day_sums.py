"""Make the sums of a local day: each card's hours, and each lease's held, idle and unseen time with its money.

A day is made again while it lasts, until its telemetry has settled, and whenever the ledger got a line for it since:
the same facts give the same rows. Readers see a day's old rows or its new ones, never a mixture.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import connection, transaction
from django.db.models import Max, Min, Q, Sum

from monitoring.engine.fleet_day import Held, Hour, StateSpan, StrandedSpan, card_day, use_days
from monitoring.models import BuiltDay, CardDay, CardSpan, GpuRollup, UseDay
from pool.engine.mig import geometry_for_product
from pool.models import Gpu, MigSlice
from portal.kernel.clock import now
from portal.kernel.units import MILLI_PER_GPU, MS_PER_SECOND, round_half_up, to_ms
from quotas.engine.billing import day_bounds, local_day
from quotas.engine.charge import mig_charge
from quotas.models import LedgerEntry, UsageSpan
from quotas.selectors.billing_time import billing_zone
from quotas.selectors.cutting import Names
from quotas.selectors.running import running_now

SETTLE_DAYS = 2
"""Days after its end in which a day is made again at each run: late telemetry mends it."""

RUN_DAYS = 60
"""Days made in one run at most, the newest first, so that a long history is worked off in several."""

_LOCK = 7_301_006


def days_sum(*, limit: int = RUN_DAYS) -> int:
    """Make the days that are due, newest first; returns their number. One run at a time.

    A day whose telemetry was dropped since (GPUPOOL_HOUR_DAYS) keeps the sums it has.
    """
    made = 0
    for day in sorted(_due(), reverse=True)[:limit]:
        with transaction.atomic():
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_try_advisory_xact_lock(%s)", [_LOCK])
                if not cursor.fetchone()[0]:
                    return made
            day_sum(day=day)
        made += 1
    return made


def _due() -> list[date]:
    first = _first_day()
    if first is None:
        return []
    today = local_day(now(), billing_zone())
    built = {row.local_day: row for row in BuiltDay.objects.all()}
    late = dict(
        LedgerEntry.objects.order_by()
        .values("local_day")
        .annotate(last=Max("id"))
        .values_list("local_day", "last")
    )
    days = [first + timedelta(days=n) for n in range((today - first).days + 1)]
    settled = today - timedelta(days=SETTLE_DAYS)
    seen_from = today - timedelta(days=int(settings.GPUPOOL_HOUR_DAYS))
    return [
        day
        for day in days
        if (row := built.get(day)) is None
        or not row.whole
        or day >= settled
        or (day > seen_from and late.get(day, 0) > row.ledger_mark)
    ]


def _first_day() -> date | None:
    starts = [
        CardSpan.objects.aggregate(first=Min("started_at"))["first"],
        UsageSpan.objects.aggregate(first=Min("started_at"))["first"],
    ]
    found = [start for start in starts if start is not None]
    return local_day(min(found), billing_zone()) if found else None


@dataclass(frozen=True, slots=True)
class _Day:
    day: date
    start: datetime
    end: datetime

    @property
    def ms(self) -> tuple[int, int]:
        return to_ms(self.start), to_ms(self.end)


def day_sum(*, day: date) -> None:
    """Make one day anew, up to now where it still lasts."""
    start, whole_end = day_bounds(day, billing_zone())
    moment = now()
    if moment <= start:
        return
    span = _Day(day, start, min(whole_end, moment))
    with transaction.atomic():
        mark = LedgerEntry.objects.aggregate(last=Max("id"))["last"] or 0
        spans = _spans(span)
        cards = _cards(spans)
        held = _held(span, spans, cards)
        hours = _hours(span, [gpu for gpu in held if gpu is not None])
        states = _states(span)
        wasted = _stranded(span)
        uses: dict[int, Any] = {}
        card_rows = []
        for gpu in sorted({*held, *states}, key=lambda pk: pk or 0):
            own = held.get(gpu, [])
            if gpu is None:
                continue
            sums = card_day(*span.ms, [s for s, _row in states.get(gpu, [])], own, wasted.get(gpu, []))
            uses |= {use.key: use for use in use_days(*span.ms, own, hours.get(gpu, {}))}
            card_rows.append(_card_row(day, gpu, sums, states.get(gpu, []), spans, own))
        for use_ in held.get(None, []):
            uses |= {use.key: use for use in use_days(*span.ms, [use_], {})}
        card_rows += _cardless(day, held.get(None, []), spans, uses)
        CardDay.objects.filter(local_day=day).delete()
        UseDay.objects.filter(local_day=day).delete()
        CardDay.objects.bulk_create(card_rows, batch_size=2000)
        UseDay.objects.bulk_create(_use_rows(span, spans, uses), batch_size=2000)
        BuiltDay.objects.update_or_create(
            local_day=day,
            defaults={
                "ledger_mark": mark,
                "built_at": moment,
                "whole": moment >= whole_end + timedelta(hours=1),
            },
        )


def _spans(span: _Day) -> dict[int, UsageSpan]:
    found = (
        UsageSpan.objects.filter(started_at__lt=span.end)
        .filter(Q(ended_at=None) | Q(ended_at__gt=span.start))
        .select_related("request", "department", "user")
        .only(
            "id", "started_at", "ended_at", "charge_milli", "gpu_uid", "department_id", "user_id", "flavour_id",
            "request_id", "site_code", "node_name", "gpu_label", "request__cost_code", "department__cost_center",
            "user__display_name", "user__username",
        )
    )  # fmt: skip
    return {row.pk: row for row in found}


def _cards(spans: dict[int, UsageSpan]) -> dict[Any, int]:
    uids = {row.gpu_uid for row in spans.values() if row.gpu_uid is not None}
    return dict(Gpu.objects.filter(uid__in=uids).values_list("uid", "id"))


def _held(span: _Day, spans: dict[int, UsageSpan], cards: dict[Any, int]) -> dict[int | None, list[Held]]:
    held: dict[int | None, list[Held]] = defaultdict(list)
    last = span.ms[1]
    for row in spans.values():
        end = to_ms(row.ended_at) if row.ended_at is not None else last
        use = Held(row.pk, to_ms(row.started_at), max(end, to_ms(row.started_at)), row.charge_milli)
        held[cards.get(row.gpu_uid)].append(use)
    return held


def _hours(span: _Day, gpus: Iterable[int]) -> dict[int, dict[int, Hour]]:
    rows = GpuRollup.objects.filter(
        step=GpuRollup.Step.HOUR,
        slot=0,
        bucket__gt=span.start - timedelta(hours=1),
        bucket__lt=span.end,
        gpu_id__in=list(gpus),
    ).values_list("gpu_id", "bucket", "covered_s", "util_n", "util_sum")
    hours: dict[int, dict[int, Hour]] = defaultdict(dict)
    for gpu, bucket, covered_s, n, total in rows:
        covered = covered_s * MS_PER_SECOND
        busy = covered * total // (1000 * n) if n else None
        hours[gpu][to_ms(bucket)] = Hour(covered, busy)
    return hours


def _states(span: _Day) -> dict[int, list[tuple[StateSpan, CardSpan]]]:
    found = (
        CardSpan.objects.filter(started_at__lt=span.end)
        .filter(Q(ended_at=None) | Q(ended_at__gt=span.start))
        .order_by("started_at")
    )
    states: dict[int, list[tuple[StateSpan, CardSpan]]] = defaultdict(list)
    for row in found:
        end = row.ended_at if row.ended_at is not None else span.end
        states[row.gpu_id].append((StateSpan(to_ms(row.started_at), to_ms(end), row.state), row))
    return states


def _stranded(span: _Day) -> dict[int, list[StrandedSpan]]:
    """Shares of cut cards that no slice of their layout offers, while the layout lasts."""
    slices = (
        MigSlice.objects.filter(created_at__lt=span.end)
        .filter(Q(gone_at=None) | Q(gone_at__gt=span.start))
        .values_list("gpu_id", "compute_slices", "gpu__model_name", "created_at", "gone_at")
    )
    by_card: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for gpu, compute, model, created, gone in slices:
        table = geometry_for_product(model)
        if table is not None:
            charge = mig_charge(compute, table.compute_slices)
            by_card[gpu].append((to_ms(created), to_ms(gone or span.end), charge))
    out: dict[int, list[StrandedSpan]] = {}
    for gpu, rows in by_card.items():
        marks = sorted({mark for start, end, _charge in rows for mark in (start, end)})
        pieces = []
        for left, right in zip(marks, marks[1:], strict=False):
            offered = sum(charge for start, end, charge in rows if start <= left < end)
            if offered and offered < MILLI_PER_GPU:
                pieces.append(StrandedSpan(left, right, MILLI_PER_GPU - offered))
        out[gpu] = pieces
    return out


def _card_row(
    day: date,
    gpu: int,
    sums: Any,
    states: list[tuple[StateSpan, CardSpan]],
    spans: dict[int, UsageSpan],
    held: list[Held],
) -> CardDay:
    """Flavour and place are those of the day's last state, or of what was held where no state is known."""
    if states:
        last = states[-1][1]
        flavour, site, node = last.flavour_id, last.site_code, last.node_name
    else:
        use = spans[held[-1].key]
        flavour, site, node = use.flavour_id, use.site_code, use.node_name
    return CardDay(
        local_day=day,
        gpu_id=gpu,
        flavour_id=flavour,
        site_code=site,
        node_name=node,
        installed_ms=sums.installed,
        down_ms=sums.down,
        maintenance_ms=sums.maintenance,
        allocated_ms=sums.allocated,
        stranded_ms=min(sums.stranded, sums.unallocated),
    )


def _cardless(
    day: date, held: list[Held], spans: dict[int, UsageSpan], uses: dict[int, Any]
) -> list[CardDay]:
    sums: dict[tuple[int, str], int] = defaultdict(int)
    for use in held:
        if use.key in uses:
            row = spans[use.key]
            sums[row.flavour_id, row.site_code] += uses[use.key].allocated
    return [
        CardDay(local_day=day, gpu=None, flavour_id=flavour, site_code=site, installed_ms=ms, allocated_ms=ms)
        for (flavour, site), ms in sorted(sums.items())
        if ms
    ]


def _use_rows(span: _Day, spans: dict[int, UsageSpan], uses: dict[int, Any]) -> list[UseDay]:
    money = dict(
        LedgerEntry.objects.filter(local_day=span.day, span__in=list(spans))
        .order_by()
        .values("span")
        .annotate(micro=Sum("amount_micro"))
        .values_list("span", "micro")
    )
    surcharges = dict(
        LedgerEntry.objects.filter(
            Q(kind=LedgerEntry.Kind.IDLE) | Q(corrects__kind=LedgerEntry.Kind.IDLE),
            local_day=span.day,
            span__in=list(spans),
        )
        .order_by()
        .values("span")
        .annotate(micro=Sum("amount_micro"))
        .values_list("span", "micro")
    )
    for live in running_now().cuts:
        if live.cut.day == span.day:
            money[live.span_id] = money.get(live.span_id, 0) + live.cut.amount_micro
    names = Names.load({row.department_id for row in spans.values()})
    out = []
    for key, use in sorted(uses.items()):
        row = spans[key]
        start = max(row.started_at, span.start)
        then = next(
            (
                owner.department
                for owner in names.owners.get(row.department_id, ())
                if owner.start <= start and (owner.end is None or start < owner.end)
            ),
            None,
        )
        micro, surcharge = (
            money.get(key, 0),
            surcharges.get(key, 0),
        )  # a surcharge on idle hours is all for idle
        idle_micro = round_half_up((micro - surcharge) * use.idle, use.allocated) if use.allocated else 0
        out.append(
            UseDay(
                local_day=span.day,
                span_id=key,
                request_id_ref=row.request_id,
                department_id_ref=row.department_id,
                department_path=names.path(row.department_id, then),
                user_id_ref=row.user_id,
                user_name=row.user.get_full_name(),
                cost_code=row.request.cost_code or row.department.cost_center,
                flavour_id=row.flavour_id,
                site_code=row.site_code,
                node_name=row.node_name,
                gpu_label=row.gpu_label,
                allocated_ms=use.allocated,
                idle_ms=use.idle,
                unknown_ms=use.unknown,
                amount_micro=micro,
                idle_micro=idle_micro + surcharge,
            )
        )
    return out
