"""The department tree as pages show it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from uuid import UUID

from django.db.models import Count, QuerySet

from portal.accounts.models import Department, DepartmentName, RoleBinding, User
from portal.accounts.policy import DepartmentTree, Policy
from portal.accounts.selectors.people import sees_people, valid_bindings


@dataclass(frozen=True)
class TreeRow:
    """One line of the tree: `people` have it as home, `below` counts those of the whole subtree."""

    depth: int
    department: Department
    people: int
    below: int
    leads: tuple[str, ...]
    has_children: bool


def tree_rows(policy: Policy, *, closed: bool = False) -> list[TreeRow]:
    """The part of the tree that `policy` sees, depth first; closed ones only when asked for. Two queries."""
    scope = sees_people(policy)
    tree = policy.tree
    counted = User.objects.filter(is_active=True).values("home_department_id").annotate(n=Count("id"))
    people = Counter({row["home_department_id"]: row["n"] for row in counted})
    leads: dict[int, list[str]] = {}
    for where, name in (
        valid_bindings()
        .filter(role="lead", department__isnull=False, user__is_active=True)
        .order_by("user__display_name")
        .values_list("department_id", "user__display_name")
    ):
        if where is not None:
            leads.setdefault(where, []).append(name)
    rows = []
    for depth, department in tree.ordered():
        if department.pk not in scope or (not closed and not department.is_open):
            continue
        rows.append(
            TreeRow(
                depth=depth,
                department=department,
                people=people[department.pk],
                below=sum(people[pk] for pk in tree.subtree(department.pk)),
                leads=tuple(leads.get(department.pk, ())),
                has_children=any(
                    tree.rows[c].pk in scope and (closed or tree.rows[c].is_open)
                    for c in tree.children.get(department.pk, [])
                ),
            )
        )
    return rows


def department_visible(policy: Policy, uid: UUID) -> Department | None:
    """A department by uid, if its people may be looked up by this person."""
    found = next((row for row in policy.tree.rows.values() if row.uid == uid), None)
    return found if found is not None and found.pk in sees_people(policy) else None


def department_by_code(tree: DepartmentTree, code: str) -> Department | None:
    """A department by its code."""
    return next((row for row in tree.rows.values() if row.code == code), None)


def names_over_time(department: Department) -> QuerySet[DepartmentName]:
    """What it was called, newest first."""
    return DepartmentName.objects.filter(department=department).order_by("-during")


def bindings_at(department: Department) -> QuerySet[RoleBinding]:
    """Roles bound right to this department now."""
    return (
        valid_bindings()
        .filter(department=department, user__is_active=True)
        .select_related("user")
        .order_by("role", "user__display_name", "id")
    )
