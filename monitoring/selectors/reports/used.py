"""Utilization and waste: where the pool's hours went, and how much of what was held did work."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from datetime import date
from functools import reduce
from typing import Any

from django.db.models import Sum
from django.utils.translation import gettext as _
from django.utils.translation import pgettext

from monitoring.models import CardDay, UseDay
from monitoring.selectors.reports.base import Answer, Ask, Part, Stat, built_until, day_axis, part_sum
from portal.kernel.tables import HOURS, MONEY, PERCENT, Column, Table, share
from portal.kernel.units import MS_PER_HOUR, cost_micro
from quotas.models import GpuFlavour
from quotas.selectors.month_report import Group, Groups, grouping, name_users
from quotas.selectors.prices import PriceBook

USE_COLUMNS = {
    "department": "department_id_ref",
    "flavour": "flavour_id",
    "user": "user_id_ref",
    "site": "site_code",
    "path": "department_path",
    "cost_code": "cost_code",
    "node": "node_name",
    "lease": "span_id",
}
SUMS = ("allocated_ms", "idle_ms", "unknown_ms", "amount_micro", "idle_micro")
TOP = 500
"""Rows of a report at most; the rest is one row, so that the total stays the total."""


@dataclass
class Use:
    """Sums of some uses."""

    allocated_ms: int = 0
    idle_ms: int = 0
    unknown_ms: int = 0
    amount_micro: int = 0
    idle_micro: int = 0
    days: int = 0

    def add(self, row: tuple[Any, ...]) -> None:
        """Take the sums of a query's row in, in the order of SUMS."""
        for name, value in zip(SUMS, row, strict=True):
            setattr(self, name, getattr(self, name) + (value or 0))

    @property
    def effective_ms(self) -> int:
        """Held and not seen idle."""
        return self.allocated_ms - self.idle_ms


@dataclass(frozen=True)
class Pool:
    """Sums of the cards."""

    installed_ms: int = 0
    down_ms: int = 0
    maintenance_ms: int = 0
    allocated_ms: int = 0
    stranded_ms: int = 0

    @property
    def unallocated_ms(self) -> int:
        """Neither held nor hindered."""
        return self.installed_ms - self.down_ms - self.maintenance_ms - self.allocated_ms


POOL_SUMS = ("installed_ms", "down_ms", "maintenance_ms", "allocated_ms", "stranded_ms")


def plus(one: Pool, other: Pool) -> Pool:
    """The sums of both."""
    return Pool(*(getattr(one, name) + getattr(other, name) for name in POOL_SUMS))


@dataclass
class Cards:
    """The sums of the cards by day, flavour and site, read once."""

    rows: list[tuple[date, int | None, str, Pool]]

    @classmethod
    def read(cls, ask: Ask) -> Cards:
        """One query."""
        found = (
            CardDay.objects.filter(ask.cards())
            .order_by()
            .values_list("local_day", "flavour_id", "site_code")
            .annotate(*(Sum(name) for name in POOL_SUMS))
        )
        return cls([(day, flavour, site, Pool(*sums)) for day, flavour, site, *sums in found])

    @property
    def total(self) -> Pool:
        """All of them."""
        return reduce(plus, (pool for _day, _flavour, _site, pool in self.rows), Pool())

    def by(self, *places: int) -> dict[Any, Pool]:
        """Sums by one or more of 0 day, 1 flavour, 2 site."""
        found: dict[Any, Pool] = defaultdict(Pool)
        for row in self.rows:
            key = row[places[0]] if len(places) == 1 else tuple(row[place] for place in places)
            found[key] = plus(found[key], row[3])
        return dict(found)


def total_of(found: dict[Hashable, Use]) -> Use:
    """The sum of all groups: the total of a report is that of its rows."""
    total = Use()
    for use in found.values():
        total.add(tuple(getattr(use, name) for name in SUMS))
    return total


def grouped(ask: Ask) -> tuple[dict[Hashable, Use], Groups]:
    """Sums by group, and the groups (people and leases get their names when they are ranked)."""
    groups, fold = groups_of(ask)
    found: dict[Hashable, Use] = defaultdict(Use)
    rows = (
        UseDay.objects.filter(ask.uses())
        .values_list(USE_COLUMNS[ask.by])
        .annotate(**{f"sum_{name}": part_sum(name, ask.period) for name in SUMS})
    )
    for row in rows:
        found[fold(row[0])].add(row[1:])
    return found, groups


def groups_of(ask: Ask) -> tuple[Groups, Callable[[Hashable], Hashable]]:
    """As on the month page, and the groupings that reports have beyond it."""
    if ask.by in {"department", "flavour", "user", "site"}:
        return grouping(ask.policy, ask.chosen, ask.by)
    return Groups(lambda key: Group(key, str(key) or "–", {})), lambda key: key


def _name_leases(groups: Groups) -> None:
    rows = (
        UseDay.objects.filter(span_id__in=list(groups))
        .order_by("span_id", "-local_day")
        .distinct("span_id")
        .values_list("span_id", "request_id_ref", "gpu_label", "user_name")
    )
    for span, request, label, user in rows:
        groups[span].label = f"R-{request} · {label} · {user}"


def _ranked(
    ask: Ask, found: dict[Hashable, Use], groups: Groups, value: Callable[[Use], int]
) -> list[tuple[Group, Use]]:
    """Largest first; what comes after TOP is one row."""
    keys = sorted(found, key=lambda key: (-value(found[key]), str(key)))
    shown = [groups[key] for key in keys[:TOP]]
    if ask.by == "user":
        name_users(shown)
    if ask.by == "lease":
        _name_leases(groups)
    rows = [(group, found[group.key]) for group in shown]
    if len(keys) > TOP:
        rest = total_of({key: found[key] for key in keys[TOP:]})
        rows.append((Group(None, _("%(n)s more") % {"n": len(keys) - TOP}, {}), rest))
    return rows


def label_of(group: Group) -> str:
    """A group's label; the part of a department without its children says so."""
    return _("%(name)s itself") % {"name": group.label} if group.own else group.label


def utilization(ask: Ask) -> Answer:
    """Installed, held, effective, idle hours and their cost."""
    until = built_until(ask.period)
    earlier = ask.period.before(until)
    before_ask = replace(ask, period=earlier)
    found, groups = grouped(ask)
    before, _before_groups = grouped(before_ask)
    total, total_before = total_of(found), total_of(before)
    cards = Cards.read(ask) if ask.whole_pool else None
    columns = [
        Column("group", group_word(ask.by)),
        Column("allocated", _("Allocated"), HOURS),
        Column("effective", _("Effective"), HOURS),
        Column("idle", pgettext("hours", "Idle"), HOURS),
        Column("idle_share", _("Idle of allocated, %"), PERCENT),
        Column("unknown", _("Without telemetry"), HOURS),
        Column("cost", _("Cost"), MONEY),
        Column("idle_cost", _("Cost of idle"), MONEY),
        Column("before", _("Allocated before"), HOURS),
    ]
    table = Table(_("Utilization"), columns)
    for group, use in _ranked(ask, found, groups, lambda u: u.allocated_ms):
        table.rows.append(
            [
                label_of(group), use.allocated_ms, use.effective_ms, use.idle_ms,
                share(use.idle_ms, use.allocated_ms), use.unknown_ms, use.amount_micro, use.idle_micro,
                before[group.key].allocated_ms if group.key in before else 0,
            ]
        )  # fmt: skip
        table.params.append(drill(ask, group))
    gone = [key for key in before if key not in found]
    if gone:
        # what was held before and is not now still counts in the total before
        table.rows.append(
            [_("held only before"), 0, 0, 0, None, 0, 0, 0, sum(before[key].allocated_ms for key in gone)]
        )
        table.params.append({})
    answer = Answer(
        tables=[table],
        stats=_stats(ask, total, total_before),
        chart=by_day(ask, cards),
        definitions=[*held_definitions()],
        covered=(total.allocated_ms - total.unknown_ms, total.allocated_ms),
        until=until,
        before=earlier,
    )
    if cards is not None:
        answer.parts = pool_parts(cards, total)
        answer.tables.append(pool_table(cards))
    return answer


def group_word(by: str) -> str:
    """The head of the first column."""
    from monitoring.selectors.reports.base import GROUP_WORDS

    return str(GROUP_WORDS[by])


def drill(ask: Ask, group: Group) -> dict[str, str]:
    """What a row adds to the query string: its own part of the filter, and the next finer grouping."""
    if not group.params:
        return {}
    finer = {
        "department": "department" if group.children else "user",
        "flavour": "department",
        "site": "department",
    }
    return {**group.params, "by": finer.get(ask.by, "lease")}


def _stats(ask: Ask, total: Use, before: Use) -> list[Stat]:
    share_idle = share(total.idle_ms, total.allocated_ms)
    basis = _("%(p).1f %% of allocated") % {"p": (share_idle or 0) / 100} if share_idle is not None else ""
    return [
        Stat(
            _("Allocated"),
            total.allocated_ms,
            HOURS,
            _("held, times the share of the card"),
            before.allocated_ms,
        ),
        Stat(
            _("Effective"), total.effective_ms, HOURS, _("allocated and not seen idle"), before.effective_ms
        ),
        Stat(pgettext("hours", "Idle"), total.idle_ms, HOURS, basis, before.idle_ms),
        Stat(_("Cost"), total.amount_micro, MONEY, _("of the days in the period"), before.amount_micro),
        Stat(
            _("Cost of idle"),
            total.idle_micro,
            MONEY,
            _("each lease's cost times its idle share"),
            before.idle_micro,
        ),
    ]


def pool_parts(cards: Cards, total: Use) -> list[Part]:
    """The parts of what is installed, as they add up to it."""
    pool = cards.total
    return [
        Part(_("Effective"), total.effective_ms, "ok"),
        Part(_("Idle, held"), total.idle_ms, "warn"),
        Part(_("Unallocated, usable"), pool.unallocated_ms - pool.stranded_ms, "mute"),
        Part(_("Unallocated, stranded"), pool.stranded_ms, "act"),
        Part(_("Maintenance"), pool.maintenance_ms, "hold"),
        Part(_("Down"), pool.down_ms, "bad"),
    ]


def pool_table(cards: Cards) -> Table:
    """Where the installed hours of each flavour and site went."""
    columns = [
        Column("flavour", _("Flavour")),
        Column("site", _("Site")),
        Column("installed", _("Installed"), HOURS),
        Column("allocated", _("Allocated"), HOURS),
        Column("unallocated", _("Unallocated"), HOURS),
        Column("stranded", _("of it stranded"), HOURS),
        Column("maintenance", _("Maintenance"), HOURS),
        Column("down", _("Down"), HOURS),
        Column("use", _("Allocated of installed, %"), PERCENT),
    ]
    table = Table(_("Where the installed hours went"), columns)
    names = dict(GpuFlavour.objects.values_list("pk", "name"))
    sums = cards.by(1, 2)
    for flavour, site in sorted(sums, key=lambda k: (-sums[k].installed_ms, names.get(k[0], ""), k[1])):
        pool = sums[flavour, site]
        table.rows.append(
            [
                names.get(flavour, "–"), site, pool.installed_ms, pool.allocated_ms, pool.unallocated_ms,
                pool.stranded_ms, pool.maintenance_ms, pool.down_ms,
                share(pool.allocated_ms, pool.installed_ms),
            ]
        )  # fmt: skip
        table.params.append({})
    return table


def by_day(ask: Ask, cards: Cards | None) -> dict[str, Any]:
    """Effective and idle hours by day, and for the whole pool the rest of what was installed."""
    days = ask.period.days
    uses: dict[date, tuple[int, int]] = {
        day: (allocated - idle, idle)
        for day, allocated, idle in UseDay.objects.filter(ask.uses())
        .values_list("local_day")
        .annotate(Sum("allocated_ms"), Sum("idle_ms"))
    }
    series: list[tuple[str, str, list[int]]] = [
        (_("Effective"), "--ok-solid", [uses.get(day, (0, 0))[0] for day in days]),
        (pgettext("hours", "Idle"), "--warn-solid", [uses.get(day, (0, 0))[1] for day in days]),
    ]
    if cards is not None:
        pools = cards.by(0)
        empty = Pool()
        rest = [pools.get(day, empty) for day in days]
        series += [
            (_("Unallocated"), "--mute-solid", [p.unallocated_ms for p in rest]),
            (_("Maintenance"), "--hold-solid", [p.maintenance_ms for p in rest]),
            (_("Down"), "--bad-solid", [p.down_ms for p in rest]),
        ]
    return stacked(days, series, _("GPU·h"))


def stacked(days: list[date], series: list[tuple[str, str, list[int]]], unit: str) -> dict[str, Any]:
    """A stacked chart of GPU-milliseconds by day with the same figures as a table."""
    axis = day_axis(days)
    shown = [(label, color, [round(v / MS_PER_HOUR, 1) for v in values]) for label, color, values in series]
    some = any(any(values) for _label, _color, values in shown)
    return {
        "data": [
            {"type": "bar", "name": label, "x": axis, "y": values, "marker": {"color": color}}
            for label, color, values in shown
        ]
        if some
        else [],
        "layout": {
            "barmode": "stack",
            "bargap": 0.15,
            "xaxis": {
                "type": "category",
                "nticks": 6,
                "tickangle": 0,
                "range": [-0.6, max(len(days), 7) - 0.4],
            },
            "showlegend": True,
        },
        "table": {
            "head": [_("Day"), *(f"{label}, {unit}" for label, _c, _v in shown)],
            "rows": [
                [f"{day:%Y-%m-%d}", *(f"{values[i]:,.1f}" for _l, _c, values in shown)]
                for i, day in enumerate(days)
            ],
        },
    }


def held_definitions() -> list[str]:
    """What the figures mean, in the reader's language."""
    return [
        _("Installed = down + maintenance + unallocated + allocated. Stranded is a part of unallocated."),
        _("Allocated: time a card or a share of it was held, times the share; from start until seen free."),
        _(
            "Allocated = effective + idle. Idle: held time with telemetry in which no kernel ran, by the hour."
        ),
        _("Time without telemetry is unknown: it counts as effective, never as idle, and is told apart."),
        _("Stranded: what the cut of a card (MIG) leaves for nobody."),
        _(
            "Cost: the ledger's lines of these days, corrections included; idle cost is rounded once per lease and day."
        ),
    ]


def waste(ask: Ask) -> Answer:
    """What was paid for and not used, by who held it; and for the pool what nobody could or did hold."""
    until = built_until(ask.period)
    earlier = ask.period.before(until)
    before_ask = replace(ask, period=earlier)
    found, groups = grouped(ask)
    total, before = total_of(found), total_of(grouped(before_ask)[0])
    cards = Cards.read(ask) if ask.whole_pool else None
    table = Table(
        pgettext("report", "Held but idle"),
        [
            Column("group", group_word(ask.by)),
            Column("idle", pgettext("hours", "Idle"), HOURS),
            Column("idle_cost", _("Cost of idle"), MONEY),
            Column("idle_share", _("Idle of allocated, %"), PERCENT),
            Column("allocated", _("Allocated"), HOURS),
            Column("unknown", _("Without telemetry"), HOURS),
        ],
    )
    for group, use in _ranked(ask, found, groups, lambda u: u.idle_micro or u.idle_ms):
        if use.idle_ms or use.unknown_ms:
            table.rows.append(
                [
                    label_of(group), use.idle_ms, use.idle_micro, share(use.idle_ms, use.allocated_ms),
                    use.allocated_ms, use.unknown_ms,
                ]
            )  # fmt: skip
            table.params.append(drill(ask, group))
    answer = Answer(
        tables=[table],
        stats=[
            Stat(_("Cost of idle"), total.idle_micro, MONEY, _("held but idle"), before.idle_micro),
            Stat(pgettext("hours", "Idle"), total.idle_ms, HOURS, _("held but idle"), before.idle_ms),
        ],
        chart=by_day(ask, cards),
        definitions=[*held_definitions()],
        covered=(total.allocated_ms - total.unknown_ms, total.allocated_ms),
        until=until,
        before=earlier,
    )
    if cards is not None:
        free = _unused(ask, cards)
        answer.tables.append(free)
        place = free.column("value")
        worth = sum(row[place] or 0 for row in free.rows)
        answer.stats.append(
            Stat(_("Nobody held"), worth, MONEY, _("unallocated hours at the price in force"))
        )
    return answer


def _unused(ask: Ask, cards: Cards) -> Table:
    columns = [
        Column("flavour", _("Flavour")),
        Column("unallocated", _("Unallocated"), HOURS),
        Column("stranded", _("of it stranded"), HOURS),
        Column("maintenance", _("Maintenance"), HOURS),
        Column("down", _("Down"), HOURS),
        Column("value", _("Unallocated at the price in force"), MONEY),
    ]
    table = Table(_("Held by nobody"), columns)
    names = dict(GpuFlavour.objects.values_list("pk", "name"))
    book = PriceBook.load()
    sums: dict[int | None, list[int]] = defaultdict(lambda: [0, 0, 0, 0, 0])
    for (flavour, site), pool in cards.by(1, 2).items():
        parts = (pool.unallocated_ms, pool.stranded_ms, pool.maintenance_ms, pool.down_ms)
        price = next(
            (
                span.micro_per_gpu_hour
                for span in reversed(book.spans(flavour, site) if flavour else [])
                if span.start < ask.period.until
            ),
            0,
        )
        for i, part in enumerate(parts):
            sums[flavour][i] += part
        sums[flavour][4] += cost_micro(pool.unallocated_ms, price)
    for flavour, values in sorted(sums.items(), key=lambda item: (-item[1][4], -item[1][0], item[0] or 0)):
        table.rows.append([names.get(flavour or 0, "–"), *values])
        table.params.append({})
    return table


__all__ = ["Cards", "Pool", "Use", "grouped", "pool_parts", "pool_table", "total_of", "utilization", "waste"]
