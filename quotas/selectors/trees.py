"""Quota trees of the database as the pure engine wants them, one a flavour.

The root of every tree is the installation itself (id ``INSTALLATION``): its guarantee is what is installed,
so that departments borrow from what is not promised to anybody and from one another. Where the pool has not
told any capacity yet, the root holds the sum of the guarantees below it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from portal.accounts.models import Department
from portal.accounts.policy import DepartmentTree
from quotas.engine.ids import NodeId
from quotas.engine.tree import QuotaNode, QuotaTree
from quotas.models import FlavourCapacity, QuotaGrant, QuotaUsage

INSTALLATION = 0


class UsageNumbers(NamedTuple):
    """Limits in force and direct use of one department and flavour: what a tree is built of, without a model's
    weight (a page reads more than a thousand of them). A locked `QuotaUsage` row serves as well.
    """

    department_id: int
    flavour_id: int
    granted: bool
    guaranteed: int
    borrow_limit: int | None
    lend_limit: int | None
    hard_cap: int | None
    weight: int
    direct: int
    direct_noninterruptible: int


def department_parents() -> dict[int, int | None]:
    """id → parent id of all departments: one query of two columns."""
    return dict(Department.objects.without_tree_fields().order_by("pk").values_list("pk", "parent_id"))


def parents_in(tree: DepartmentTree) -> dict[int, int | None]:
    """The same from a department tree in memory."""
    return {pk: row.parent_id for pk, row in tree.rows.items()}


def path_of(parents: Mapping[int, int | None], department_id: int) -> list[int]:
    """From the root department down to ``department_id``."""
    path: list[int] = []
    step: int | None = department_id
    while step is not None:
        path.append(step)
        step = parents[step]
    return path[::-1]


def build_tree(
    parents: Mapping[int, int | None],
    rows: Iterable[UsageNumbers | QuotaUsage],
    installed_milli: int | None,
) -> QuotaTree:
    """The tree of one flavour; counters are computed from the rows' direct use, never trusted as stored.

    ``installed_milli`` None: unknown. All departments are nodes, those without a row with no limits and no
    use.
    """
    by_department = {row.department_id: row for row in rows}
    root = (
        QuotaNode(INSTALLATION, None, installed_milli)
        if installed_milli is not None
        else QuotaNode(INSTALLATION, None, own=0)
    )
    nodes = [root]
    for department_id, parent in parents.items():
        row = by_department.get(department_id)
        above: NodeId = INSTALLATION if parent is None else parent
        if row is None or not row.granted:
            nodes.append(QuotaNode(department_id, above, own=0))
            continue
        nodes.append(
            QuotaNode(
                id=department_id,
                parent=above,
                guarantee=row.guaranteed,
                borrow_limit=row.borrow_limit,
                lend_limit=row.lend_limit,
                hard_cap=row.hard_cap,
                weight=row.weight,
            )
        )
    tree = QuotaTree(nodes)
    for node_id in tree.post_order:
        row = by_department.get(node_id) if isinstance(node_id, int) else None
        counters = tree.counters[node_id]
        if row is not None:
            counters.total, counters.total_noninterruptible = row.direct, row.direct_noninterruptible
        for child in tree.children[node_id]:
            below = tree.counters[child]
            counters.total += below.total
            counters.total_noninterruptible += below.total_noninterruptible
    tree.recharge()
    return tree


def quota_trees(
    flavour_ids: Iterable[int] | None = None, parents: Mapping[int, int | None] | None = None
) -> dict[int, QuotaTree]:
    """Trees by flavour id, in three queries; all flavours that have limits, use or capacity when None.
    ``parents``: the department tree where the caller has read it already.
    """
    usage = QuotaUsage.objects.all()
    capacity = FlavourCapacity.objects.all()
    wanted = None if flavour_ids is None else set(flavour_ids)
    if wanted is not None:
        usage, capacity = usage.filter(flavour_id__in=wanted), capacity.filter(flavour_id__in=wanted)
    parents = parents if parents is not None else department_parents()
    rows: dict[int, list[UsageNumbers]] = {}
    for row in map(UsageNumbers._make, usage.values_list(*UsageNumbers._fields)):
        rows.setdefault(row.flavour_id, []).append(row)
    installed = dict(capacity.values_list("flavour_id", "installed_milli"))
    ids = wanted if wanted is not None else set(rows) | set(installed)
    return {pk: build_tree(parents, rows.get(pk, []), installed.get(pk)) for pk in sorted(ids)}


def grants_now(flavour_id: int, moment: object) -> dict[int, QuotaGrant]:
    """Grants in force at a moment, by department id."""
    rows = QuotaGrant.objects.filter(flavour_id=flavour_id, during__contains=moment)
    return {grant.department_id: grant for grant in rows}
