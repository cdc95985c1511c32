"""Inventory, and quota against use."""

from __future__ import annotations

from collections import defaultdict
from datetime import timedelta

from django.db.models import Count, Q, Sum
from django.utils.translation import gettext as _

from monitoring.models import CardDay, UseDay
from monitoring.selectors.reports.base import Answer, Ask, Stat, built_until
from monitoring.selectors.reports.used import (
    Cards,
    Pool,
    grouped,
    held_definitions,
    pool_parts,
    pool_table,
    total_of,
)
from portal.kernel.tables import COUNT, GPUS, HOURS, PERCENT, Column, Table, share
from portal.kernel.units import MILLI_PER_GPU
from quotas.models import GpuFlavour, QuotaGrant

MS = timedelta(milliseconds=1)


def inventory(ask: Ask) -> Answer:
    """Cards by flavour and site on the last day, and how available they were."""
    last = (
        CardDay.objects.filter(ask.cards(), gpu__isnull=False).order_by("-local_day").values("local_day")[:1]
    )
    counts = {
        (flavour, site): n
        for flavour, site, n in CardDay.objects.filter(ask.cards(), local_day__in=last, gpu__isnull=False)
        .values_list("flavour_id", "site_code")
        .annotate(n=Count("gpu_id", distinct=True))
    }
    cards = Cards.read(ask)
    sums = cards.by(1, 2)
    names = dict(GpuFlavour.objects.values_list("pk", "name"))
    table = Table(
        _("Inventory"),
        [
            Column("flavour", _("Flavour")),
            Column("site", _("Site")),
            Column("cards", _("GPUs on the last day"), COUNT),
            Column("installed", _("Installed"), HOURS),
            Column("down", _("Down"), HOURS),
            Column("maintenance", _("Maintenance"), HOURS),
            Column("available", _("Available, %"), PERCENT),
        ],
    )
    for key in sorted({*counts, *sums}, key=lambda k: (-counts.get(k, 0), names.get(k[0], ""), k[1])):
        pool = sums.get(key, Pool())
        installed, down, maintenance = pool.installed_ms, pool.down_ms, pool.maintenance_ms
        table.rows.append(
            [
                names.get(key[0], "–"), key[1], counts.get(key, 0), installed, down, maintenance,
                share(installed - down - maintenance, installed),
            ]
        )  # fmt: skip
        table.params.append({})
    whole = cards.total
    return Answer(
        tables=[table, pool_table(cards)],
        stats=[
            Stat(_("GPUs on the last day"), sum(counts.values()), COUNT),
            Stat(_("Installed"), whole.installed_ms, HOURS, _("GPUs × time in the pool")),
            Stat(_("Down"), whole.down_ms, HOURS, _("fault or lost, and held by nobody")),
            Stat(_("Maintenance"), whole.maintenance_ms, HOURS, _("planned, and held by nobody")),
        ],
        parts=pool_parts(cards, total_of(grouped(ask)[0])) if ask.whole_pool else [],
        definitions=[
            *held_definitions()[:1],
            _(
                "Installed: from a card's first sight until it left the pool. "
                "What was held while a card was down counts as allocated."
            ),
            _("Available: installed without down and maintenance, of installed."),
        ],
        until=built_until(ask.period),
    )


def quota(ask: Ask) -> Answer:
    """Guarantees at the period's end against what each department and all below it held on average and at most."""
    length = max(1, (ask.period.until - ask.period.start) // MS)
    flavours = dict(GpuFlavour.objects.values_list("pk", "name"))
    held: dict[tuple[int, int], int] = defaultdict(int)
    peak: dict[tuple[int, int], int] = defaultdict(int)
    by_day = (
        UseDay.objects.filter(ask.uses())
        .values_list("department_id_ref", "flavour_id", "local_day")
        .annotate(h=Sum("allocated_ms"))
    )
    days: dict[tuple[int, int, object], int] = defaultdict(int)
    tree = ask.policy.tree
    for department, flavour, day, ms in by_day:
        for above in tree.ancestors(department) if department in tree.rows else [department]:
            held[above, flavour] += ms
            days[above, flavour, day] += ms
    day_ms = 24 * 3_600_000
    for (department, flavour, _day), ms in days.items():
        peak[department, flavour] = max(peak[department, flavour], MILLI_PER_GPU * ms // day_ms)
    table = Table(
        _("Quota against use"),
        [
            Column("department", _("Department")),
            Column("flavour", _("Flavour")),
            Column("guaranteed", _("Guaranteed, GPUs"), GPUS),
            Column("held", _("Held on average, GPUs"), GPUS),
            Column("peak", _("Largest day, GPUs"), GPUS),
            Column("use", _("Held of guaranteed, %"), PERCENT),
            Column("hours", _("Allocated"), HOURS, added=False),
        ],
    )
    inside = ask.departments()
    grants = _guarantees(ask, inside)
    wanted = {key for key in {*grants, *held} if inside is None or key[0] in set(inside)}
    order = {pk: place for place, (_depth, row) in enumerate(tree.ordered()) for pk in [row.pk]}
    for department, flavour in sorted(wanted, key=lambda k: (order.get(k[0], 10**9), flavours.get(k[1], ""))):
        if ask.chosen.flavour is not None and flavour != ask.chosen.flavour.pk:
            continue
        guaranteed = grants.get((department, flavour), 0)
        ms = held.get((department, flavour), 0)
        average = MILLI_PER_GPU * ms // length
        if not guaranteed and not ms:
            continue
        path = tree.path(department) if department in tree.rows else str(department)
        table.rows.append(
            [
                path, flavours.get(flavour, "–"), guaranteed, average,
                peak.get((department, flavour), 0), share(average, guaranteed), ms,
            ]
        )  # fmt: skip
        table.params.append({"department": str(tree.rows[department].uid)} if department in tree.rows else {})
    return Answer(
        tables=[table],
        definitions=[
            _("Guaranteed: the quota in force at the end of the period, of the department and all below it."),
            _(
                "Held on average: allocated hours of the department and all below it, divided by the period so far."
            ),
            _("Rows contain one another (a department contains its children), so they have no total."),
        ],
        until=built_until(ask.period),
    )


def _guarantees(ask: Ask, inside: list[int] | None) -> dict[tuple[int, int], int]:
    moment = ask.period.until - timedelta(microseconds=1)
    query = Q(during__contains=moment)
    if inside is not None:
        query &= Q(department_id__in=inside)
    return {
        (department, flavour): guaranteed or 0
        for department, flavour, guaranteed in QuotaGrant.objects.filter(query).values_list(
            "department_id", "flavour_id", "guaranteed"
        )
    }
