"""Find waste, keep it while it holds, close it with what became of it. Safe to run again at any time.

Amounts grow by what passed since a finding was last seen, cut at days and prices, so that a sweep that runs late or
twice counts nothing twice. A GPU-hour counts in one finding only: at most one is open per subject, and a new one
never begins before the last one of its subject was seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db import connection, transaction
from django.db.models import Max

from monitoring.engine.waste import Found, Rules, share_between, wasted_ms
from monitoring.models import Finding, FindingDay, FindingEntry
from monitoring.services.finding_acts import incident_key
from monitoring.services.finding_news import news_of
from monitoring.services.finding_sources import Candidate, candidates
from pool.models import Allocation, IdleWatch, ReclaimCase
from portal.kernel.clock import now
from portal.kernel.units import cost_micro, from_ms, to_ms
from portal.ops.actor import system
from portal.ops.services.incidents import incident_resolve
from quotas.engine.billing import PriceSpan, day_start, local_day
from quotas.selectors.billing_time import billing_zone
from quotas.selectors.prices import PriceBook

WATCH = system("waste watch")
_LOCK = 7_301_012
_TAKEN = frozenset({"idle", "reclaimed", "preempted", "over_quota", "revoked", "suspended", "maintenance"})


@dataclass(frozen=True, slots=True)
class Piece:
    """Waste of one finding on one local day."""

    day: Any
    gpu_ms: int
    micro: int


def findings_sweep(*, rules: Rules | None = None) -> dict[str, int]:
    """Bring the findings in line with what is seen now; returns how many were opened, kept, closed."""
    rules = rules or Rules()
    done = {"opened": 0, "kept": 0, "closed": 0}
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_try_advisory_xact_lock(%s)", [_LOCK])
            if not cursor.fetchone()[0]:
                return done
        at = now()
        book = PriceBook.load()
        wanted = {c.key: c for c in candidates(at, rules, book)}
        rows = {row.subject_key: row for row in Finding.objects.exclude(state="closed").select_for_update()}
        ended: list[tuple[Finding, str]] = []
        for key, row in rows.items():
            candidate = wanted.get(key)
            if candidate is None:
                ended.append((row, ""))
            elif candidate.found.kind != row.kind:
                ended.append((row, Finding.Outcome.CHANGED))
            else:
                _keep(row, candidate, at, book)
                done["kept"] += 1
        done["closed"] = _close(ended, at)
        kept = {key for key, row in rows.items() if row.state != Finding.State.CLOSED}
        fresh = [c for key, c in wanted.items() if key not in kept]
        done["opened"] = _open(fresh, at, book)
        _news([row for row in rows.values() if row.allocation_id], at)
    return done


def _open(fresh: list[Candidate], at: datetime, book: PriceBook) -> int:
    """New findings, each from the begin of its evidence but never from before the last one of its subject."""
    last = dict(
        Finding.objects.filter(subject_key__in=[c.key for c in fresh])
        .values_list("subject_key")
        .annotate(Max("seen_at"))
    )
    made = 0
    for c in fresh:
        since = min(at, max(c.since, last.get(c.key, c.since)))
        row = Finding(
            kind=c.found.kind,
            subject_key=c.key,
            allocation_id=c.allocation_id,
            gpu_id=c.gpu_id,
            holder_id=c.holder_id,
            department_id=c.department_id,
            flavour_id=c.flavour_id,
            site_code=c.site_code,
            subject_label=c.label[:200],
            since=since,
            seen_at=since,
        )
        _describe(row, c.found)
        row.save(force_insert=True)
        _grow(row, row.waste_milli if c.counted else 0, at, book)
        row.save()
        _entry(row, "found", at, facts={"rule": row.rule})
        made += 1
    return made


def _keep(row: Finding, c: Candidate, at: datetime, book: PriceBook) -> None:
    """Count what passed since it was last seen, and take over what is known now."""
    _describe(row, c.found)
    _grow(row, row.waste_milli if c.counted else 0, at, book)
    row.updated_at = at
    row.save()


def _describe(row: Finding, found: Found) -> None:
    row.rule, row.confidence = found.rule, found.confidence
    row.waste_milli, row.evidence = found.waste_milli, dict(found.evidence)


def _grow(row: Finding, milli: int, at: datetime, book: PriceBook) -> None:
    if at <= row.seen_at:
        return
    spans = book.spans(row.flavour_id, row.site_code, row.department_id) if row.flavour_id is not None else []
    for piece in pieces(spans, milli, row.seen_at, at):
        row.gpu_ms += piece.gpu_ms
        row.micro += piece.micro
        day, created = FindingDay.objects.get_or_create(
            finding=row, local_day=piece.day, defaults={"gpu_ms": piece.gpu_ms, "micro": piece.micro}
        )
        if not created:
            day.gpu_ms += piece.gpu_ms
            day.micro += piece.micro
            day.save(update_fields=["gpu_ms", "micro"])
    row.seen_at = at


def pieces(spans: list[PriceSpan], milli: int, start: datetime, end: datetime) -> list[Piece]:
    """Waste of `milli` over [start, end) by local day, each day at the prices in force; sums to the whole exactly."""
    zone = billing_zone()
    a, b = to_ms(start), to_ms(end)
    total = wasted_ms(milli, a, b)
    if total <= 0:
        return []
    cuts: set[int] = set()
    day = local_day(start, zone) + timedelta(days=1)
    while (midnight := to_ms(day_start(day, zone))) < b:
        cuts.add(midnight)
        day += timedelta(days=1)
    for span in spans:
        cuts.update(to_ms(edge) for edge in (span.start, span.end) if edge is not None and start < edge < end)
    inner = sorted(cut for cut in cuts if a < cut < b)
    out: dict[Any, list[int]] = {}
    for begin, part in zip([a, *inner], share_between(total, a, b, inner), strict=True):
        moment = from_ms(begin)
        price = next(
            (s.micro_per_gpu_hour for s in spans if s.start <= moment and (s.end is None or moment < s.end)),
            0,
        )
        sums = out.setdefault(local_day(moment, zone), [0, 0])
        sums[0] += part
        sums[1] += cost_micro(part, price)
    return [Piece(day, *sums) for day, sums in sorted(out.items())]


def _close(rows: Iterable[tuple[Finding, str]], at: datetime) -> int:
    """Close with what became of it."""
    rows = list(rows)
    ids = [row.allocation_id for row, _why in rows if row.allocation_id]
    states = {
        pk: (state, reason)
        for pk, state, reason in Allocation.objects.filter(pk__in=ids).values_list(
            "pk", "state", "end_reason"
        )
    }
    watches = dict(IdleWatch.objects.filter(pk__in=ids).values_list("pk", "state"))
    taken = set(
        ReclaimCase.objects.filter(allocation__in=ids, cause__in=_TAKEN)
        .exclude(step=ReclaimCase.Step.WITHDRAWN)
        .values_list("allocation_id", flat=True)
    )
    for row, why in rows:
        row.outcome = why or _outcome(row, states, watches, taken)
        row.state, row.closed_at, row.updated_at = Finding.State.CLOSED, at, at
        row.save()
        _entry(row, "closed", at, facts={"outcome": row.outcome})
        if row.kind == Finding.Kind.STRANDED and row.gpu is not None:
            incident_resolve(dedupe_key=incident_key(row.kind, row.gpu), note="no longer seen")
    return len(rows)


def _outcome(
    row: Finding, states: Mapping[int, tuple[str, str]], watches: Mapping[int, str], taken: Set[int]
) -> str:
    state, reason = states.get(row.allocation_id or 0, ("", ""))
    if state in (Allocation.State.ENDED, Allocation.State.STOPPING):
        forced = reason in _TAKEN or row.allocation_id in taken
        return Finding.Outcome.RECLAIMED if forced else Finding.Outcome.ENDED
    if row.kind == Finding.Kind.IDLE:
        seen = watches.get(row.allocation_id or 0)
        if seen == IdleWatch.State.BUSY:
            return Finding.Outcome.USED
        if seen == IdleWatch.State.UNKNOWN:
            return Finding.Outcome.UNKNOWN
    return Finding.Outcome.GONE


def _entry(row: Finding, kind: str, at: datetime, *, facts: Mapping[str, Any] | None = None) -> None:
    FindingEntry.objects.create(finding=row, at=at, kind=kind, actor_name=WATCH.name, facts=dict(facts or {}))


def _news(rows: list[Finding], at: datetime) -> None:
    """What the pool did about the same leases meanwhile: warned, still needed, advised, taken back."""
    entries = [
        FindingEntry(finding=row, at=moment, kind=kind, actor_name=name, facts=facts)
        for row, moment, kind, name, facts in news_of(rows)
    ]
    FindingEntry.objects.bulk_create(entries, ignore_conflicts=True)
