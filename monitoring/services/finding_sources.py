"""What could be a finding now: one candidate per subject, the strongest kind first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from django.utils.dateparse import parse_datetime

from monitoring.engine import waste
from monitoring.engine.waste import Found, Rules, Tally
from monitoring.selectors import waste_evidence as evidence
from monitoring.selectors.waste_offers import Shop
from monitoring.services.watching import tallies
from pool.models import Allocation, Gpu, IdleWatch, Lease
from pool.services.reclaim_rules import rules_active
from quotas.selectors.prices import PriceBook

WATCH_WINDOW = timedelta(hours=6)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A finding as it would be written. `counted` false: known and shown, but its hours are excused."""

    key: str
    found: Found
    since: datetime
    label: str
    allocation_id: int | None = None
    gpu_id: int | None = None
    holder_id: int | None = None
    department_id: int | None = None
    flavour_id: int | None = None
    site_code: str = ""
    counted: bool = True


def candidates(at: datetime, rules: Rules, book: PriceBook) -> Iterator[Candidate]:
    """All of them. Of an allocation the first of: idle, waiting for data, over-asked, and its throttled cards."""
    running = {
        row.pk: row
        for row in Allocation.objects.filter(state=Allocation.State.RUNNING)
        .exclude(started_at=None)
        .select_related("flavour", "idle_watch", "request")
    }
    shop = Shop(at, book)
    cards: dict[int, list[tuple[int, int, int, str, str]]] = {}
    for gpu_id, instance, charge, allocation_id, node, index, site in (
        Lease.objects.filter(ended_at=None, allocation__in=running)
        .order_by("allocation_id", "id")
        .values_list(
            "gpu_id", "mig_slice__gpu_instance", "charge", "allocation_id", "gpu__node__name", "gpu__index",
            "gpu__node__cluster__site__code",
        )
    ):  # fmt: skip
        slot = 0 if instance is None else instance + 1
        cards.setdefault(allocation_id, []).append((gpu_id, slot, charge, f"{node}/{index}", site))
    seen = tallies(since=at - WATCH_WINDOW)
    end = at.replace(minute=0, second=0, microsecond=0)
    uses = evidence.card_uses(
        start=end - timedelta(seconds=rules.window_s),
        end=end,
        latest=at - timedelta(seconds=rules.asked_least_s),
        rules=rules,
    )
    for pk, row in running.items():
        mine = cards.get(pk, [])
        if not mine:
            continue
        base = Candidate(
            key=f"a:{pk}", found=_NONE, since=at, label=_label(row, mine), allocation_id=pk, holder_id=row.holder_id,
            department_id=row.department_id, flavour_id=row.flavour_id, site_code=mine[0][4],
        )  # fmt: skip
        idle = _idle(row, base, at)
        if idle is not None:
            yield idle
            continue
        other = _data(row, base, mine, seen, at, rules) or _asked(
            row, base, uses.get(pk, []), end, rules, shop
        )
        if other is not None:
            yield other
            continue
        for gpu_id, slot, charge, label, _site in mine:
            hot = waste.throttled(charge, seen.get((pk, gpu_id, slot), Tally()), rules)
            if hot is not None:
                since = _watched_since(row, at)
                yield replace(base, key=f"g:{gpu_id}", found=hot, since=since, label=label, gpu_id=gpu_id)
    yield from _foreign()
    yield from _stranded(at, rules)


_NONE = Found("", "", 0, waste.LOW)


def _label(row: Allocation, mine: list[tuple[int, int, int, str, str]]) -> str:
    count = len(mine)
    return f"{row.ref}: {count} × {row.flavour}" if row.flavour is not None else row.ref


def _idle(row: Allocation, base: Candidate, at: datetime) -> Candidate | None:
    """Idle by both signals for the whole window of the rules of taking back. “Still needed” excuses its hours."""
    watch = getattr(row, "idle_watch", None)
    if (
        watch is None
        or watch.state != IdleWatch.State.IDLE
        or watch.idle_since is None
        or row.started_at is None
    ):
        return None
    since = max(watch.idle_since, row.started_at)
    if at - since < timedelta(seconds=rules_active()[1].idle_window_s):
        return None
    excused = watch.excused_until is not None and watch.excused_until > at
    figures: dict[str, Any] = {
        **watch.evidence,
        "idle_s": int((at - since).total_seconds()),
        "excused_until": watch.excused_until.isoformat() if excused and watch.excused_until else None,
        "excuses": watch.excuses,
    }
    found = Found(waste.IDLE, "two_signals", row.charge_milli, waste.HIGH, figures)
    return replace(base, found=found, since=since, counted=not excused)


def _watched_since(row: Allocation, at: datetime) -> datetime:
    start = at - WATCH_WINDOW
    return max(start, row.started_at) if row.started_at is not None else start


def _data(
    row: Allocation,
    base: Candidate,
    mine: list[tuple[int, int, int, str, str]],
    seen: dict[tuple[int, int, int], Tally],
    at: datetime,
    rules: Rules,
) -> Candidate | None:
    total = Tally()
    for gpu_id, slot, *_rest in mine:
        total.add(seen.get((row.pk, gpu_id, slot), Tally()))
    found = waste.waiting_for_data(row.charge_milli, total, rules)
    if found is None:
        return None
    figures = {**found.evidence, "cards": len(mine), "hours": WATCH_WINDOW.seconds // 3600}
    return replace(base, found=replace(found, evidence=figures), since=_watched_since(row, at))


def _asked(
    row: Allocation, base: Candidate, uses: list[waste.CardUse], end: datetime, rules: Rules, shop: Shop
) -> Candidate | None:
    if not uses:
        return None
    parts = evidence.parts_of(row.flavour, max(use.memory_mib for use in uses))
    price, offers = shop.instead_of(row, base.site_code)
    found = waste.over_asked(uses, parts, rules, price=price, offers=offers)
    if found is None:
        return None
    return replace(base, found=found, since=end - timedelta(seconds=min(use.held_s for use in uses)))


def _foreign() -> Iterator[Candidate]:
    """Processes on cards that nobody holds: each with its name, user and memory, never its arguments."""
    leased = set(Lease.objects.filter(ended_at=None).values_list("gpu_id", flat=True))
    for card in evidence.foreign_cards():
        if card.pk in leased or all(process.get("awaited") for process in card.foreign_use):
            continue  # held, or taken by the cluster for somebody who was not seen yet
        starts = [parse_datetime(str(p.get("since", ""))) for p in card.foreign_use]
        known = [moment for moment in starts if moment is not None and moment.tzinfo is not None]
        since = min(known, default=card.updated_at)
        figures = {
            "processes": [
                {name: p.get(name) for name in ("pid", "name", "user", "mem_mib")}
                for p in card.foreign_use[:10]
            ],
            "users": sorted({str(p.get("user")) for p in card.foreign_use if p.get("user")}),
            "memory_mib": sum(int(p.get("mem_mib") or 0) for p in card.foreign_use),
        }
        found = Found(waste.NO_LEASE, "process", 1000, waste.HIGH, figures)
        yield _of_card("g", card, found, since)


def _of_card(prefix: str, card: Gpu, found: Found, since: datetime) -> Candidate:
    return Candidate(
        key=f"{prefix}:{card.pk}",
        found=found,
        since=since,
        label=f"{card.node.name}/{card.index}",
        gpu_id=card.pk,
        flavour_id=card.flavour_id,
        site_code=card.node.cluster.site.code,
    )


def _stranded(at: datetime, rules: Rules) -> Iterator[Candidate]:
    """What a layout or the shares of a card leave for nobody."""
    for card, slices in evidence.split_cards():
        table = evidence.table_of(card)
        rest = evidence.mig_rest(table, slices) if table is not None else 0
        if rest:
            figures = {
                "layout": [one.profile for one in slices],
                "rest_milli": rest,
                "of_slices": table.compute_slices if table else 0,
                "rest_slices": rest * (table.compute_slices if table else 0) // 1000 or 1,
            }
            since = max(at - timedelta(days=7), max(one.created_at for one in slices))
            yield _of_card("s", card, Found(waste.STRANDED, "layout", rest, waste.HIGH, figures), since)
    shared = {gpu: (used, since) for gpu, used, since in evidence.shared_cards()}
    small = {gpu: rest for gpu, (used, _s) in shared.items() if (rest := waste.unusable_rest(used, rules))}
    for card in (
        Gpu.objects.filter(pk__in=small).select_related("node__cluster__site", "flavour").order_by("id")
    ):
        used, since = shared[card.pk]
        figures = {"used_milli": used, "rest_milli": small[card.pk]}
        yield _of_card("s", card, Found(waste.STRANDED, "rest", small[card.pk], waste.HIGH, figures), since)
