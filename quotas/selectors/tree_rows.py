"""The quota page: one flavour's tree as rows, its headline sums, and what a change would do before it is
saved.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from django.db.models import Count, Min, Q, Sum

from portal.accounts.models import Department
from portal.accounts.policy import DepartmentTree, Policy, Scope
from quotas.engine.available import available, over_by
from quotas.engine.tree import QuotaTree
from quotas.models import CapacityRequest, FlavourCapacity, GpuFlavour, QuotaUsage
from quotas.selectors.fit import limit_of
from quotas.selectors.grants import GrantNumbers, SumCheck, sum_checks
from quotas.selectors.requests import QuotaBar, lent_now, quota_bar
from quotas.selectors.trees import INSTALLATION, build_tree, parents_in, quota_trees

ALL_ROWS = 40


@dataclass(slots=True)
class TreeRow:
    """One department: its bar, numbers, and asks in the queue. ``to_limit`` None = unlimited; ``is_open``:
    its children are among the rows.
    """

    department: Department
    depth: int
    has_children: bool
    is_open: bool
    granted: bool
    bar: QuotaBar
    numbers: GrantNumbers
    to_limit: int | None
    asks: int
    asked_milli: int


@dataclass(slots=True)
class Headline:
    """Sums of a flavour; milli-GPU. ``kept`` is guaranteed to nobody; ``borrowed`` = from the site + from
    departments.
    """

    installed: int
    healthy: int
    guaranteed: int
    kept: int
    used: int
    borrowed: int
    borrowed_from_site: int
    available: int
    waiting: int
    waiting_milli: int
    oldest: datetime | None


def quota_scope(policy: Policy) -> Scope:
    """Whose quota a person sees: what the roles let read, and the departments for which the person may ask,
    with their ancestors (a bar makes no sense without the levels above it).
    """
    scope = policy.reads | policy.asks_for
    if scope.everything:
        return scope
    ids = {above for pk in scope.ids if pk in policy.tree.rows for above in policy.tree.ancestors(pk)}
    return Scope(ids=scope.ids | frozenset(ids))


def flavours_with_quota() -> list[GpuFlavour]:
    """Flavours that have a grant, use or capacity, in display order."""
    rows = GpuFlavour.objects.filter(
        Q(usage_rows__granted=True) | Q(usage_rows__total__gt=0) | Q(capacity__installed_milli__gt=0)
    )
    return list(rows.select_related("capacity").distinct().order_by("position", "name", "id"))


def tree_of(flavour: GpuFlavour, departments: DepartmentTree) -> QuotaTree:
    """The flavour's tree now."""
    return quota_trees([flavour.pk], parents_in(departments))[flavour.pk]


def shown_departments(departments: DepartmentTree, scope: Scope, chosen: int | None) -> set[int] | None:
    """Which rows of a large tree are shown: the top levels, and what lies around the chosen department. None:
    all of them, as in any tree of up to ``ALL_ROWS``.
    """
    seen = [pk for pk in departments.rows if pk in scope]
    if len(seen) <= ALL_ROWS:
        return None
    opened: set[int | None] = {None}
    level: list[int] = list(departments.children.get(None, []))
    while len(level) == 1:  # one organisation on top is always open
        opened.add(level[0])
        level = list(departments.children.get(level[0], []))
    if chosen is not None:
        opened |= set(departments.ancestors(chosen))
    return {pk for pk in seen if departments.rows[pk].parent_id in opened}


def tree_rows(
    flavour: GpuFlavour,
    tree: QuotaTree,
    departments: DepartmentTree,
    scope: Scope,
    shown: set[int] | None = None,
) -> list[TreeRow]:
    """Rows depth first; departments that are closed and use nothing are left out. ``shown`` None: all."""
    lent = lent_now(tree)
    asks: dict[int, tuple[int, int]] = defaultdict(lambda: (0, 0))
    waiting = (
        CapacityRequest.objects.filter(state=CapacityRequest.State.QUEUED, flavour=flavour)
        .order_by()
        .values_list("department_id")
        .annotate(n=Count("id"), milli=Sum("charge_milli"))
    )
    for department_id, n, milli in waiting:
        for above in departments.ancestors(department_id):
            asks[above] = (asks[above][0] + n, asks[above][1] + milli)
    out: list[TreeRow] = []
    for depth, department in departments.ordered():
        if department.pk not in scope or (shown is not None and department.pk not in shown):
            continue
        if not department.is_open and not tree.counters[department.pk].total:
            continue
        node = tree.nodes[department.pk]
        bar = quota_bar(tree, flavour, department.pk, lent.get(department.pk, 0))
        limit = limit_of(tree, department.pk)
        out.append(
            TreeRow(
                department,
                depth,
                any(child in scope for child in departments.children.get(department.pk, [])),
                shown is None or any(child in shown for child in departments.children.get(department.pk, [])),
                node.own is None,
                bar,
                GrantNumbers(bar.guaranteed, node.borrow_limit, node.lend_limit, node.hard_cap, node.weight),
                None if limit is None else max(0, limit - bar.used),
                *asks[department.pk],
            )
        )
    return out


def headline(flavour: GpuFlavour, tree: QuotaTree) -> Headline:
    """The sums of a flavour over the whole installation."""
    capacity = getattr(flavour, "capacity", None)
    roots = tree.children[INSTALLATION]
    guaranteed = sum(tree.guarantee(root) for root in roots)
    while len(roots) == 1 and tree.children[roots[0]]:  # one organisation on top: look at its departments
        roots = tree.children[roots[0]]
    installed = capacity.installed_milli if capacity is not None else 0
    borrowed = sum(max(0, tree.counters[root].total - tree.guarantee(root)) for root in roots)
    lent = sum(value for node, value in lent_now(tree).items() if node in roots)
    waiting = CapacityRequest.objects.filter(state=CapacityRequest.State.QUEUED, flavour=flavour).aggregate(
        n=Count("id"), milli=Sum("charge_milli"), oldest=Min("queued_at")
    )
    return Headline(
        installed=installed,
        healthy=capacity.healthy_milli if capacity is not None else 0,
        guaranteed=guaranteed,
        kept=max(0, installed - guaranteed),
        used=tree.counters[INSTALLATION].total,
        borrowed=borrowed,
        borrowed_from_site=max(0, borrowed - lent),
        available=available(tree, INSTALLATION),
        waiting=waiting["n"],
        waiting_milli=waiting["milli"] or 0,
        oldest=waiting["oldest"],
    )


@dataclass(slots=True)
class WhatIf:
    """Effects of changed numbers, judged on a copy of the tree; nothing is saved. ``over``: departments that
    would be over, with by how much; ``borrowed``: (before, after) of each changed department; ``hard``:
    uninterruptible use above the new guarantee.
    """

    sums: list[SumCheck]
    borrowed: list[tuple[Department, int, int]]
    over: list[tuple[Department, int]]
    hard: list[tuple[Department, int, int]]

    @property
    def fine(self) -> bool:
        return all(check.holds for check in self.sums)


def what_if(
    flavour: GpuFlavour, changes: Mapping[int, GrantNumbers], departments: DepartmentTree, moment: datetime
) -> WhatIf:
    """What these numbers would do to the use there is now."""
    rows = list(QuotaUsage.objects.filter(flavour=flavour))
    by_department = {row.department_id: row for row in rows}
    parents = parents_in(departments)
    installed = (
        FlavourCapacity.objects.filter(flavour=flavour).values_list("installed_milli", flat=True).first()
    )
    before = build_tree(parents, rows, installed)
    for pk, numbers in changes.items():
        row = by_department.get(pk)
        if row is None:
            row = QuotaUsage(department_id=pk, flavour=flavour)
            rows.append(row)
        for name, value in numbers.as_fields().items():
            setattr(row, name, value)
        row.granted = True
    after = build_tree(parents, rows, installed)

    def lies_above(tree: QuotaTree, pk: int) -> int:
        return max(0, tree.counters[pk].total - tree.guarantee(pk))

    changed = [departments.rows[pk] for pk in changes]
    return WhatIf(
        sums=sum_checks(changes, flavour.pk, moment),
        borrowed=[(d, lies_above(before, d.pk), lies_above(after, d.pk)) for d in changed],
        over=[
            (d, over_by(after, d.pk))
            for d in departments.rows.values()
            if over_by(after, d.pk) > over_by(before, d.pk)
            and (d.pk in changes or after.counters[d.pk].total > 0)
        ],
        hard=[
            (d, after.counters[d.pk].total_noninterruptible, after.guarantee(d.pk))
            for d in changed
            if after.counters[d.pk].total_noninterruptible > after.guarantee(d.pk)
        ],
    )
