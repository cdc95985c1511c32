"""Figures of a month: groups, days, comparison with the month before. All are sums of ledger lines."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import date, datetime, timedelta
from typing import Any

from django.db import connection
from django.db.models import Case, DateField, F, Q, QuerySet, Sum, Value, When

from portal.accounts.models import User
from portal.accounts.policy import Policy
from quotas.engine.billing import day_bounds, month_bounds
from quotas.models import GpuFlavour, LedgerEntry, LedgerSum
from quotas.selectors.billing_time import billing_zone, previous_month
from quotas.selectors.money import LineFilter, Lines

MS = timedelta(milliseconds=1)
GROUPINGS = ("department", "flavour", "user", "site")
SERIES = 7
"""Groups with days of their own in a chart; the rest is one."""

OTHERS = "others"
"""The key of that rest among the days of people, who may be thousands."""


@dataclass
class Total:
    """GPU-milliseconds, micro-currency and the number of lines."""

    gpu_ms: int = 0
    amount_micro: int = 0
    lines: int = 0

    def add(self, gpu_ms: int, amount_micro: int, lines: int = 1) -> None:
        """Count lines in."""
        self.gpu_ms += gpu_ms
        self.amount_micro += amount_micro
        self.lines += lines


@dataclass
class Group:
    """One row of the table. `params` are what the drill-down adds to the filter; `own` marks the part of a
    department that its children do not have."""

    key: Hashable
    label: str
    params: dict[str, str]
    total: Total = field(default_factory=Total)
    before_micro: int | None = None
    own: bool = False
    children: bool = False

    @property
    def change_percent(self) -> float | None:
        """Against the month before; None where that was nothing."""
        if not self.before_micro:
            return None
        return 100 * (self.total.amount_micro - self.before_micro) / self.before_micro


@dataclass
class MonthReport:
    """A month under one filter and grouping. `total` is the sum of `groups`, and of the lines behind them."""

    filter: LineFilter
    by: str
    start: datetime
    end: datetime
    until: datetime
    groups: list[Group]
    total: Total
    running: Total
    before: Total
    before_whole: Total
    before_by_day: dict[date, int]
    days: list[date]
    by_day: dict[Hashable, dict[date, Total]]  # of people only the first SERIES, and OTHERS
    outside: Total
    corrections: Total

    @property
    def so_far(self) -> bool:
        """Whether the month still goes on."""
        return self.until < self.end

    def money_of(self, day: date) -> int:
        """What a day costs, over all groups."""
        return sum(by_day[day].amount_micro for by_day in self.by_day.values() if day in by_day)

    @property
    def change_percent(self) -> float | None:
        """Against the same span of the month before."""
        if not self.before.amount_micro:
            return None
        return 100 * (self.total.amount_micro - self.before.amount_micro) / self.before.amount_micro


KEYS = {
    "department": "department_id_ref",
    "flavour": "flavour_id",
    "user": "user_id_ref",
    "site": "site_code",
}


def month_report(policy: Policy, chosen: LineFilter, by: str, *, named: bool = True) -> MonthReport:
    """The month of `chosen` (which names one) grouped by one of GROUPINGS. Without ``named`` people's groups have no
    names yet: a page that shows a few of thousands asks `name_users` for those."""
    assert chosen.month is not None
    lines = Lines(policy, chosen)
    month = chosen.month
    zone = billing_zone()
    start, end = month_bounds(month.year, month.month, zone)
    until = min(lines.moment, end)
    groups, fold = grouping(policy, chosen, by)
    column = KEYS[by]
    earlier: list[_Row] = []
    both = (  # the month and the one before in one look
        Lines(policy, replace(chosen, month=None))
        .sums()
        .filter(booked_month__in=(month, previous_month(month)))
        .order_by()
    )
    days = _days(month, until)
    wanted = set(days)
    report = MonthReport(
        filter=chosen,
        by=by,
        start=start,
        end=end,
        until=until,
        groups=[],
        total=Total(),
        running=Total(),
        before=Total(),
        before_whole=Total(),
        before_by_day=defaultdict(int),
        days=days,
        by_day=defaultdict(lambda: defaultdict(Total)),
        outside=Total(),
        corrections=Total(),
    )

    def count(key: Hashable, day: date, ms: int, micro: int, n: int) -> None:
        groups[key].total.add(ms, micro, n)
        (report.by_day[key][day] if day in wanted else report.outside).add(ms, micro, n)

    many = by == "user"
    by_part = _parts(report, _cut_day(report)) if many else F("local_day")
    for books, key, day, kind, ms, micro, n in _folded(both, column, by_part, groups.owner):
        if books != month:
            earlier.append((key, day, ms, micro, n))
            continue
        count(key, day, ms, micro, n)
        if kind == LedgerEntry.Kind.CORRECTION:
            report.corrections.add(ms, micro, n)
    of_row = operator.attrgetter(column)
    for row in lines.running_cuts():
        count(fold(of_row(row)), row.cut.day, row.cut.gpu_ms, row.cut.amount_micro, 1)
        report.running.add(row.cut.gpu_ms, row.cut.amount_micro)
    for group in groups.values():
        report.total.add(group.total.gpu_ms, group.total.amount_micro, group.total.lines)
    _compare(report, groups, earlier)
    report.groups = sorted(
        (g for g in groups.values() if g.total.lines or g.before_micro),
        key=lambda g: (-g.total.amount_micro, -g.total.gpu_ms, g.label),
    )
    if many:
        _by_day(report, both, column, lines)
    if named and by == "user":
        name_users(report.groups)
    return report


def _parts(report: MonthReport, cut_day: date) -> Case:
    """In place of a line's day, where thousands of groups have days of their own: one day for all that counts alike.
    Of this month its own days, and others; of the month before the days before that of the comparison, that day, and
    the days after.
    """
    assert report.filter.month is not None
    before = previous_month(report.filter.month)
    last = report.filter.month - timedelta(days=1)
    this = Q(booked_month=report.filter.month)
    return Case(
        When(this & Q(local_day__range=(report.days[0], report.days[-1])), then=Value(report.days[0])),
        When(this, then=Value(date(1, 1, 1))),
        When(local_day__lt=cut_day, then=Value(before)),
        When(local_day=cut_day, then=Value(cut_day)),
        default=Value(last),
        output_field=DateField(),
    )


def _by_day(
    report: MonthReport, both: QuerySet[LedgerSum] | QuerySet[LedgerEntry], column: str, lines: Lines
) -> None:
    """The days of the largest groups, each its own, and of all others together."""
    shown = {group.key: group.key for group in report.groups[:SERIES] if group.key is not None}
    report.by_day.clear()
    report.before_by_day.clear()
    wanted = set(report.days)
    of_row = operator.attrgetter(column)
    key = (
        Case(When(**{f"{column}__in": list(shown)}, then=F(column)), default=Value(0)) if shown else Value(0)
    )
    rows = both.values_list("booked_month", key, "local_day").annotate(
        ms=Sum("gpu_ms"), micro=Sum("amount_micro"), n=Sum("lines")
    )
    for books, found, day, ms, micro, n in rows:
        if books != report.filter.month:
            report.before_by_day[day] += micro
        elif day in wanted:
            report.by_day[shown.get(found, OTHERS)][day].add(ms, micro, n)
    for row in lines.running_cuts():
        if row.cut.day in wanted:
            report.by_day[shown.get(of_row(row), OTHERS)][row.cut.day].add(
                row.cut.gpu_ms, row.cut.amount_micro
            )


def _folded(
    sums: QuerySet[LedgerSum] | QuerySet[LedgerEntry], column: str, day: Any, owner: Mapping[int, int]
) -> Iterator[tuple[date, Hashable, date, str, int, int, int]]:
    """Sums by month of the books, group, day and kind. The database puts the departments below a head together: of
    hundreds of them over two months some thousand rows come here instead of tens of thousands.
    """
    keys = ("booked_month", column, day, "kind")
    if not owner:
        yield from sums.values_list(*keys).annotate(
            ms=Sum("gpu_ms"), micro=Sum("amount_micro"), n=Sum("lines")
        )
        return
    sql, params = sums.values_list(*keys, "gpu_ms", "amount_micro", "lines").query.sql_with_params()
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT r.books, coalesce(o.head, r.key), r.day, r.kind, "
            "sum(r.ms)::bigint, sum(r.micro)::bigint, sum(r.n)::bigint "
            f"FROM ({sql}) AS r (books, key, day, kind, ms, micro, n) "
            "LEFT JOIN unnest(%s::bigint[], %s::bigint[]) AS o (key, head) ON o.key = r.key GROUP BY 1, 2, 3, 4",
            [*params, list(owner), list(owner.values())],
        )
        yield from cursor


def _days(month: date, until: datetime) -> list[date]:
    last = (until - timedelta(microseconds=1)).astimezone(billing_zone()).date()
    return (
        [month + timedelta(days=n) for n in range(max(0, (last - month).days) + 1)]
        if last >= month
        else [month]
    )


def _compare(report: MonthReport, groups: Groups, rows: Iterable[_Row]) -> None:
    """Money of the month before, for a running month only up to the same day and time of it: whole days, and
    of the last day the share of it that has passed.
    """
    local = report.until.astimezone(billing_zone())
    cut_day = _cut_day(report)
    first, last = day_bounds(local.date(), billing_zone())
    passed, length = (report.until - first) // MS, (last - first) // MS
    that_day: dict[Hashable, Total] = defaultdict(Total)
    for key, day, ms, micro, n in rows:
        report.before_whole.add(ms, micro, n)
        report.before_by_day[day] += micro
        if day < cut_day:
            _add_before(report, groups[key], ms, micro)
        elif day == cut_day:
            that_day[key].add(ms, micro, n)
    for key, total in that_day.items():
        ms, micro = total.gpu_ms * passed // length, total.amount_micro * passed // length
        if ms or micro:
            _add_before(report, groups[key], ms, micro)


def _cut_day(report: MonthReport) -> date:
    """The day of the month before up to which it is compared; `date.max`: all of it."""
    assert report.filter.month is not None
    if not report.so_far:
        return date.max
    before = previous_month(report.filter.month)
    last_day = (report.filter.month - timedelta(days=1)).day
    return before.replace(day=min(report.until.astimezone(billing_zone()).day, last_day))


def _add_before(report: MonthReport, group: Group, ms: int, micro: int) -> None:
    group.before_micro = (group.before_micro or 0) + micro
    report.before.add(ms, micro)


class Groups(dict[Hashable, Group]):
    """Groups made when first met. `owner`: the head that a department below it counts for."""

    def __init__(self, make: Callable[[Hashable], Group], owner: Mapping[int, int] | None = None) -> None:
        super().__init__()
        self._make = make
        self.owner = owner or {}

    def __missing__(self, key: Hashable) -> Group:
        self[key] = self._make(key)
        return self[key]


Fold = Callable[[Hashable], Hashable]
_Row = tuple[Hashable, date, int, int, int]
"""Key, day, GPU-milliseconds, micro, lines."""


def grouping(policy: Policy, chosen: LineFilter, by: str) -> tuple[Groups, Fold]:
    """Groups, and the key of the group that a line's column belongs to."""
    if by == "department":
        return _departments(policy, chosen)
    if by == "flavour":
        flavours = GpuFlavour.objects.in_bulk()
        groups = Groups(lambda k: Group(k, flavours[k].name, {"flavour": flavours[k].code}))
    elif by == "site":
        groups = Groups(lambda k: Group(k, str(k), {"site": str(k)}))
    else:
        groups = Groups(lambda k: Group(k, str(k), {}))
    return groups, lambda k: k


def _seen(policy: Policy, departments: list[int]) -> list[int]:
    """Those with something in them that the reader may see."""
    if policy.reads_money.everything:
        return departments
    seen = policy.reads_money.ids | policy.asks_for.ids
    return [pk for pk in departments if seen & set(policy.tree.subtree(pk))]


def heads(policy: Policy, chosen: LineFilter) -> tuple[int | None, list[int]]:
    """The chosen department (or the topmost with more than one below it), and its children."""
    tree = policy.tree
    parent = chosen.department_id
    if parent is None:
        roots = _seen(policy, tree.children.get(None, []))
        while len(roots) == 1 and tree.children.get(roots[0]):
            parent = roots[0]
            roots = _seen(policy, tree.children.get(parent, []))
    return parent, tree.children.get(parent, [])


def _departments(policy: Policy, chosen: LineFilter) -> tuple[Groups, Fold]:
    """The heads, each with its subtree; what stands on the parent itself is a row of its own."""
    tree = policy.tree
    parent, below = heads(policy, chosen)
    owner: dict[int, int] = {pk: head for head in below for pk in tree.subtree(head)}

    def make(key: Hashable) -> Group:
        assert isinstance(key, int)
        row = tree.rows.get(key)
        if row is None:
            return Group(key, str(key), {})
        own = key == parent
        return Group(
            key,
            row.name,
            {"department": str(row.uid)},
            own=own,
            children=not own and bool(tree.children.get(key)),
        )

    return Groups(make, owner), lambda k: owner.get(k, k) if isinstance(k, int) else k


def name_users(groups: Iterable[Group]) -> None:
    """Give groups of people their names and drill-down."""
    rows = list(groups)
    users = User.objects.filter(pk__in={g.key for g in rows if g.key is not None})
    found = {pk: (name, uid) for pk, *name, uid in users.values_list("pk", "display_name", "username", "uid")}
    for group in rows:
        if group.key in found:
            (name, username), uid = found[group.key]
            group.label, group.params = name or username, {"user": str(uid)}


def ledger_mark() -> tuple[int, datetime | None]:
    """Highest entry number and when it was booked: what a figure rests on."""
    last = LedgerEntry.objects.order_by("-id").values_list("id", "booked_at").first()
    return last or (0, None)


__all__ = [
    "GROUPINGS",
    "OTHERS",
    "SERIES",
    "Group",
    "Groups",
    "MonthReport",
    "Total",
    "grouping",
    "heads",
    "ledger_mark",
    "month_report",
    "name_users",
]
