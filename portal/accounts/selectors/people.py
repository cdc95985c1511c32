"""People, as others may see them."""

from __future__ import annotations

from datetime import datetime

from django.db.models import Prefetch, Q, QuerySet

from portal.accounts.models import Role, RoleBinding, User
from portal.accounts.policy import DepartmentTree, Policy, Scope
from portal.kernel.clock import now


def valid_bindings(moment: datetime | None = None) -> QuerySet[RoleBinding]:
    """Bindings that hold at `moment` (now)."""
    at = moment or now()
    return RoleBinding.objects.filter(valid_from__lte=at).filter(Q(valid_to=None) | Q(valid_to__gt=at))


def holders(role: str, department_id: int | None, tree: DepartmentTree | None = None) -> list[int]:
    """Ids of active people who hold `role` over this department: bound to it, to one above it, or to the
    installation (None: to the installation alone)."""
    where = Q(department=None)
    if department_id is not None:
        where |= Q(department_id__in=(tree or DepartmentTree.load()).ancestors(department_id))
    rows = valid_bindings().filter(where, role=role, user__is_active=True)
    return sorted(set(rows.values_list("user_id", flat=True)))


def sees_people(policy: Policy) -> Scope:
    """Departments whose people one may look up: leads their subtree, administrators and auditors theirs."""
    return policy.scope(Role.LEAD, Role.POOL_ADMIN, Role.AUDITOR)


def people_visible(policy: Policy) -> QuerySet[User]:
    """People in the departments that `policy` sees (by home or by a role there), and oneself."""
    scope = sees_people(policy)
    rows = User.objects.select_related("home_department")
    if scope.everything:
        return rows
    own = Q(pk=policy.user.pk)
    if not scope.ids:
        return rows.filter(own)
    bound = RoleBinding.objects.filter(department_id__in=scope.ids).values("user_id")
    return rows.filter(own | Q(home_department_id__in=scope.ids) | Q(pk__in=bound))


def people_list(
    policy: Policy,
    *,
    search: str = "",
    department_id: int | None = None,
    role: str = "",
    state: str = "",
    sort: str = "name",
) -> QuerySet[User]:
    """The list of people with their present bindings (`present_bindings`), filtered and sorted.

    `state`: active, suspended. `sort`: name, username, last_login, with a minus for the reverse.
    """
    rows = people_visible(policy)
    if search:
        rows = rows.filter(
            Q(display_name__icontains=search)
            | Q(username__icontains=search)
            | Q(email__icontains=search)
            | Q(system_account__icontains=search)
        )
    if department_id is not None:
        below = policy.tree.subtree(department_id)
        bound = valid_bindings().filter(department_id__in=below).values("user_id")
        rows = rows.filter(Q(home_department_id__in=below) | Q(pk__in=bound))
    if role:
        rows = rows.filter(pk__in=valid_bindings().filter(role=role).values("user_id"))
    if state:
        rows = rows.filter(is_active=state == "active")
    order = {"name": "display_name", "username": "username", "last_login": "last_login"}[sort.lstrip("-")]
    return rows.order_by(("-" if sort.startswith("-") else "") + order, "id").prefetch_related(
        Prefetch(
            "role_bindings",
            queryset=RoleBinding.objects.filter(Q(valid_to=None) | Q(valid_to__gt=now()))
            .select_related("department")
            .order_by("role", "id"),
            to_attr="present_bindings",
        )
    )
