"""The one permission policy. Lists, details, exports, API and sockets all ask here.

A `Policy` is made once per request (`policy_of(user)`): it loads the person's valid role bindings and the
department tree in two queries and answers from memory. Rooms turn its answers into querysets of their own
models (`<room>/selectors/*`), always through `scope(...)`.

| role | sees | may |
|---|---|---|
| researcher | own things; the department's names | ask, extend, release, withdraw own |
| lead | subtree | approve within the subtree, ask for quota |
| pool_admin | everything (when bound to a department: its subtree) | inventory, quotas, policy, cordon, people |
| finance | money of everything or of the subtree | prices, month close, finance steps |
| auditor | everything, reads only | nothing |
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from django.db.models import Q

from portal.accounts.models import Department, Role, RoleBinding
from portal.kernel.clock import now
from portal.kernel.errors import Refused


@dataclass(frozen=True)
class Scope:
    """A set of departments: everything, or exactly `ids` (subtrees already unfolded)."""

    everything: bool = False
    ids: frozenset[int] = frozenset()

    def __bool__(self) -> bool:
        return self.everything or bool(self.ids)

    def __contains__(self, department_id: int | None) -> bool:
        return self.everything or department_id in self.ids

    def __or__(self, other: Scope) -> Scope:
        return Scope(self.everything or other.everything, self.ids | other.ids)

    def q(self, field_name: str = "department_id") -> Q:
        """A filter on a model's department column; an empty scope matches nothing."""
        if self.everything:
            # Always true, and still true in `scope.q() | Q(…)`: an empty Q() would drop out of the OR.
            return ~Q(pk__in=[])
        return Q(**{f"{field_name}__in": sorted(self.ids)})


@dataclass
class DepartmentTree:
    """All departments, in memory: id → parent, children, in one query of the whole tree."""

    rows: dict[int, Department] = field(default_factory=dict)
    children: dict[int | None, list[int]] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def load(cls) -> DepartmentTree:
        """Read the tree (order: position, name)."""
        tree = cls()
        for row in Department.objects.without_tree_fields().order_by("position", "name", "id"):
            tree.rows[row.pk] = row
            tree.children[row.parent_id].append(row.pk)
        return tree

    def subtree(self, root: int) -> list[int]:
        """`root` and all below it, depth first."""
        found, stack = [], [root]
        while stack:
            current = stack.pop()
            found.append(current)
            stack.extend(reversed(self.children.get(current, [])))
        return found

    def ancestors(self, department_id: int) -> list[int]:
        """From the root down to and including `department_id`."""
        path: list[int] = []
        current: int | None = department_id
        while current is not None:
            path.append(current)
            current = self.rows[current].parent_id
        return path[::-1]

    def path(self, department_id: int) -> str:
        """Names from the root, e.g. `Vision / Video Generation`."""
        return " / ".join(self.rows[i].name for i in self.ancestors(department_id))

    def ordered(self) -> list[tuple[int, Department]]:
        """(depth, department) depth first from the roots."""
        out: list[tuple[int, Department]] = []

        def walk(parent: int | None, depth: int) -> None:
            for pk in self.children.get(parent, []):
                out.append((depth, self.rows[pk]))
                walk(pk, depth + 1)

        walk(None, 0)
        return out


class Policy:
    """Answers what one person may see and do, at one moment."""

    def __init__(self, user: Any, bindings: Iterable[tuple[str, int | None]], tree: DepartmentTree) -> None:
        self.user = user
        self.tree = tree
        self._direct: dict[str, set[int | None]] = defaultdict(set)
        for role, department_id in bindings:
            self._direct[role].add(department_id)
        self._scopes: dict[str, Scope] = {}

    @property
    def roles(self) -> frozenset[str]:
        """Roles held anywhere."""
        return frozenset(role for role, where in self._direct.items() if where)

    def has(self, *roles: str) -> bool:
        """Whether the person holds one of the roles anywhere."""
        return any(self._direct.get(role) for role in roles)

    def scope(self, *roles: str) -> Scope:
        """Departments over which the person holds one of the roles."""
        out = Scope()
        for role in roles:
            if role not in self._scopes:
                where = self._direct.get(role, set())
                if None in where:
                    self._scopes[role] = Scope(everything=True)
                else:
                    ids = {i for root in where if root is not None for i in self.tree.subtree(root)}
                    self._scopes[role] = Scope(ids=frozenset(ids))
            out = out | self._scopes[role]
        return out

    def holds(self, role: str, department_id: int | None) -> bool:
        """Whether the person holds `role` over this department (None: the whole installation)."""
        scope = self.scope(role)
        return scope.everything if department_id is None else department_id in scope

    # What is seen ---------------------------------------------------------------------------------------

    @property
    def reads(self) -> Scope:
        """Departments whose requests, leases and use the person sees beyond the own ones."""
        return self.scope(Role.LEAD, Role.POOL_ADMIN, Role.AUDITOR, Role.FINANCE)

    def reads_output(self, *, holder_id: int | None, department_id: int | None) -> bool:
        """Whether the person sees what somebody's work wrote: their own, or as one who answers for it. Finance reads
        what work cost, not what it says."""
        if holder_id is not None and holder_id == self.user.pk:
            return True
        return department_id in self.scope(Role.LEAD, Role.POOL_ADMIN, Role.AUDITOR)

    @property
    def reads_money(self) -> Scope:
        """Departments whose ledger the person sees."""
        return self.scope(Role.LEAD, Role.FINANCE, Role.AUDITOR, Role.POOL_ADMIN)

    @property
    def asks_for(self) -> Scope:
        """Departments on whose behalf the person may ask: where researcher or lead, and the home department."""
        home = {self.user.home_department_id} if getattr(self.user, "home_department_id", None) else set()
        return self.scope(Role.RESEARCHER, Role.LEAD) | Scope(ids=frozenset(home))

    # What is done ---------------------------------------------------------------------------------------

    @property
    def administers_pool(self) -> bool:
        """Inventory, cordon, policy: for pool administrators of the whole installation."""
        return self.scope(Role.POOL_ADMIN).everything

    @property
    def administers_people(self) -> bool:
        """Users, departments, roles: the same people as above."""
        return self.administers_pool

    @property
    def keeps_books(self) -> bool:
        """Prices and month close."""
        return self.scope(Role.FINANCE).everything

    @property
    def audits(self) -> bool:
        """The audit trail of the whole installation."""
        return self.scope(Role.AUDITOR, Role.POOL_ADMIN).everything

    def require(self, allowed: object, code: str = "forbidden") -> None:
        """Raise `Refused` unless `allowed` is true."""
        if not allowed:
            from django.utils.translation import gettext_lazy as _

            raise Refused(code=code, detail=_("Your roles do not allow this."))


def policy_of(user: Any, tree: DepartmentTree | None = None) -> Policy:
    """The policy of `user` now. An inactive or anonymous person holds nothing."""
    tree = tree or DepartmentTree.load()
    if user is None or not getattr(user, "is_active", False):
        return Policy(user, [], tree)
    moment = now()
    bindings = (
        RoleBinding.objects.filter(user=user, valid_from__lte=moment)
        .filter(Q(valid_to=None) | Q(valid_to__gt=moment))
        .values_list("role", "department_id")
    )
    return Policy(user, bindings, tree)
