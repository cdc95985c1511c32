"""The ledger: what pool tells of leases becomes lines that are only ever added.

While a span is open its whole local days are booked; the rest is booked when it closes, so that no line has
to change. Should a span turn out to have ended before what was booked (a node seen lost late), corrections
take the surplus back. Lines of a closed month stand in the books of a later one.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from datetime import date, datetime, timedelta

from django.db import connection, transaction
from django.db.models import F, Q

from portal.kernel.clock import now
from portal.kernel.errors import NotFound
from portal.kernel.ids import uuid7
from portal.kernel.units import cost_micro
from portal.ops.services import incident_open
from quotas.engine.billing import day_start, gpu_ms_between, local_day
from quotas.models import LedgerEntry, UsageSpan
from quotas.selectors.billing_time import billing_zone
from quotas.selectors.cutting import Cutter, line_of
from quotas.services.books import Books, books_for_booking

ENDED_EARLIER = "ended_earlier"
"""Reason code of corrections that the installation itself writes when a span ended before what was booked."""

TAKEN_TWICE = "taken_back_twice"
"""Reason code of the correction that gives back what both a person and a late end took from a line."""

SETTLE = timedelta(minutes=15)
"""A day is booked this long after its end: most late news of it has arrived by then."""

BATCH = 500
_RELATED = ("request", "department", "user", "flavour")


def usage_span_open(
    *,
    key: uuid.UUID,
    request_id: int,
    department_id: int,
    user_id: int,
    flavour_id: int,
    site_code: str,
    node_name: str,
    gpu_label: str,
    gpu_uid: uuid.UUID | None,
    charge_milli: int,
    started_at: datetime,
) -> UsageSpan:
    """A lease began to hold `charge_milli` of a card. Told twice by the same `key` it changes nothing."""
    span = UsageSpan(
        key=key,
        request_id=request_id,
        department_id=department_id,
        user_id=user_id,
        flavour_id=flavour_id,
        site_code=site_code,
        node_name=node_name,
        gpu_label=gpu_label,
        gpu_uid=gpu_uid,
        charge_milli=charge_milli,
        started_at=started_at,
        accrued_to=started_at,
    )
    with transaction.atomic():
        UsageSpan.objects.bulk_create([span], ignore_conflicts=True)
        return UsageSpan.objects.get(key=key)


def usage_span_close(*, key: uuid.UUID, ended_at: datetime) -> UsageSpan:
    """The card was seen free at `ended_at`: book what is missing. A second close changes nothing.

    NotFound for a key that was never opened. An end before the start counts as the start.
    """
    with transaction.atomic():
        span = (
            UsageSpan.objects.select_for_update(of=("self",))
            .select_related(*_RELATED)
            .filter(key=key)
            .first()
        )
        if span is None:
            raise NotFound(code="usage_span_unknown", detail="usage span")
        if span.ended_at is not None:
            return span
        span.ended_at = max(ended_at, span.started_at)
        books = books_for_booking()
        if span.ended_at < span.accrued_to:
            _take_back(span, books)
        else:
            _book([span], until={span.pk: span.ended_at}, books=books)
        span.accrued_to = span.ended_at
        UsageSpan.objects.filter(pk=span.pk).update(
            ended_at=span.ended_at, accrued_to=span.ended_at, updated_at=now(), version=F("version") + 1
        )
        return span


def ledger_accrue() -> int:
    """Book the whole local days of open spans, and what a closed span still lacks; returns lines added.

    Safe to run at any time and from any number of workers: spans are locked, and a booked part is never
    booked again.
    """
    until = day_start(local_day(now() - SETTLE, billing_zone()), billing_zone())
    due = Q(ended_at=None, accrued_to__lt=until) | Q(ended_at__gt=F("accrued_to"))
    added, after = 0, 0
    while True:
        with transaction.atomic():
            spans = list(
                UsageSpan.objects.select_for_update(of=("self",), skip_locked=True)
                .select_related(*_RELATED)
                .filter(due, pk__gt=after)
                .order_by("pk")[:BATCH]
            )
            if not spans:
                return added
            ends = {span.pk: span.ended_at or max(until, span.started_at) for span in spans}
            added += _book(spans, until=ends, books=books_for_booking())
            for span in spans:
                span.accrued_to = ends[span.pk]
                span.updated_at = now()
            UsageSpan.objects.bulk_update(spans, ["accrued_to", "updated_at"])
            after = spans[-1].pk


def _book(spans: Sequence[UsageSpan], *, until: dict[int, datetime], books: Books) -> int:
    """Insert the lines of locked spans up to a moment each; returns their number."""
    cutter = Cutter.load(spans)
    lines: list[LedgerEntry] = []
    for span in spans:
        cuts = cutter.cuts(span, until=until[span.pk])
        lines += [line_of(span, cut, cutter.names, booked_month=books.month_for(cut.day)) for cut in cuts]
    LedgerEntry.objects.bulk_create(lines, batch_size=1000)
    _tell_missing_prices(lines)
    return len(lines)


_MERGE = """
WITH many AS (
    SELECT booked_month, local_day, kind, department_id_ref, user_id_ref, flavour_id, site_code, cost_code
    FROM quotas_ledgersum GROUP BY 1, 2, 3, 4, 5, 6, 7, 8 HAVING count(*) > 1
), taken AS (
    DELETE FROM quotas_ledgersum s USING many m
    WHERE s.booked_month = m.booked_month AND s.local_day = m.local_day AND s.kind = m.kind
      AND s.department_id_ref = m.department_id_ref AND s.user_id_ref IS NOT DISTINCT FROM m.user_id_ref
      AND s.flavour_id = m.flavour_id AND s.site_code = m.site_code AND s.cost_code = m.cost_code
    RETURNING s.*
)
INSERT INTO quotas_ledgersum (booked_month, local_day, kind, department_id_ref, user_id_ref, flavour_id, site_code,
                              cost_code, gpu_ms, amount_micro, power_micro, lines)
SELECT booked_month, local_day, kind, department_id_ref, user_id_ref, flavour_id, site_code, cost_code,
       sum(gpu_ms)::bigint, sum(amount_micro)::bigint, sum(power_micro)::bigint, sum(lines)::bigint
FROM taken GROUP BY 1, 2, 3, 4, 5, 6, 7, 8
"""


def ledger_sums_merge() -> int:
    """Put sums of one key into one row; returns the rows written. What they add up to stays the same at any
    moment: it is one statement, and a second run at once only finds rows that the first left.
    """
    with connection.cursor() as cursor:
        cursor.execute(_MERGE)
        return int(cursor.rowcount)


def correction_of(
    entry: LedgerEntry, *, gpu_ms: int, amount_micro: int, reason: str, booked_month: date
) -> LedgerEntry:
    """The (unsaved) correction of a line by signed figures; all else is the line's own."""
    copied = {
        field.attname: getattr(entry, field.attname)
        for field in LedgerEntry._meta.concrete_fields
        if field.attname not in {"id", "uid", "kind", "corrects_id", "reason", "booked_at", "booked_month"}
    }
    copied |= {"surcharge_ms": 0, "gpu_ms": gpu_ms, "amount_micro": amount_micro}
    return LedgerEntry(
        uid=uuid7(),
        kind=LedgerEntry.Kind.CORRECTION,
        corrects=entry,
        reason=reason,
        booked_at=now(),
        booked_month=booked_month,
        **copied,
    )


def _take_back(span: UsageSpan, books: Books) -> None:
    """Correct the lines of a locked span that reach beyond its end, to what they would have been: their hours, and
    their money at the line's price or at the one that it was given late. What a person corrected before stays, but
    nothing is taken back twice: a line and its corrections never fall below 0.
    """
    end = span.ended_at
    assert end is not None
    surplus: list[LedgerEntry] = []
    lines = span.entries.filter(kind=LedgerEntry.Kind.USAGE, ends_at__gt=end).order_by("starts_at")
    for entry in lines.prefetch_related("corrections"):
        start = max(entry.starts_at, span.started_at)
        kept = gpu_ms_between(span.started_at, start, max(start, end), span.charge_milli)
        earlier = list(entry.corrections.all())
        late = next((c for c in earlier if c.rate_uid is not None and entry.rate_uid is None), None)
        price = entry.micro_per_gpu_hour if late is None else late.micro_per_gpu_hour
        charged = entry.amount_micro + (0 if late is None else late.amount_micro)
        hours, money = kept - entry.gpu_ms, cost_micro(kept, price) - charged
        month = books.month_for(entry.local_day)
        surplus.append(
            correction_of(entry, gpu_ms=hours, amount_micro=money, reason=ENDED_EARLIER, booked_month=month)
        )
        left_h = entry.gpu_ms + sum(c.gpu_ms for c in earlier) + hours
        left_m = entry.amount_micro + sum(c.amount_micro for c in earlier) + money
        if left_h < 0 or left_m < 0:
            surplus.append(
                correction_of(
                    entry,
                    gpu_ms=max(0, -left_h),
                    amount_micro=max(0, -left_m),
                    reason=TAKEN_TWICE,
                    booked_month=month,
                )
            )
    LedgerEntry.objects.bulk_create(surplus)


def _tell_missing_prices(lines: Iterable[LedgerEntry]) -> None:
    """One incident per flavour and site that was used without a price."""
    seen: dict[tuple[int, str], LedgerEntry] = {}
    for line in lines:
        if line.rate_uid is None:
            seen.setdefault((line.flavour_id, line.site_code), line)
    for (_, site), line in sorted(seen.items()):
        incident_open(
            kind="price_missing",
            dedupe_key=f"price_missing:{line.flavour.code}:{site}",
            subject=line.flavour,
            facts={"flavour": line.flavour.name, "site": site, "since": line.starts_at.isoformat()},
        )
