"""Who may decide a step, who is asked first, and why somebody may not. One loading answers for any number of
steps.

Rules, held for every route: never the requester, never the last editor, never an active deputy of either
(their delegate), whatever role these hold; a deputy decides where the principal may. The database forbids the
first too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from django.db.models import Q

from portal.accounts.models import Role, RoleBinding
from portal.accounts.policy import DepartmentTree, Policy
from portal.kernel.clock import now
from quotas.models import ApprovalStep, CapacityRequest, Delegation, QuotaChange

DECIDING = (Role.LEAD, Role.POOL_ADMIN, Role.FINANCE)


@dataclass(frozen=True, slots=True)
class May:
    """Whether somebody may decide; ``behalf`` names the principal of a deputy, ``why`` is a code where not:
    self_approval, not_yours."""

    ok: bool
    behalf: int | None = None
    why: str = ""


class StepKey(NamedTuple):
    """What decides who may decide a step; the row of a step serves as well."""

    role: str
    department_id: int | None


class SubjectKey(NamedTuple):
    """The same of a request or quota change."""

    requester_id: int
    last_editor_id: int | None
    department_id: int


AnyStep = ApprovalStep | StepKey
AnySubject = CapacityRequest | QuotaChange | SubjectKey


@dataclass(slots=True)
class Deciders:
    """Valid role bindings and delegations of active people, now."""

    tree: DepartmentTree
    bindings: dict[str, dict[int | None, list[int]]] = field(default_factory=dict)
    deputies: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    names: dict[int, str] = field(default_factory=dict)

    @classmethod
    def load(cls, tree: DepartmentTree | None = None) -> Deciders:
        """Read them: two queries, and the department tree where it is not given."""
        made = cls(tree or DepartmentTree.load())
        moment = now()
        rows = (
            RoleBinding.objects.filter(role__in=DECIDING, user__is_active=True, valid_from__lte=moment)
            .filter(Q(valid_to=None) | Q(valid_to__gt=moment))
            .order_by("user__display_name", "user_id")
            .values_list("role", "department_id", "user_id", "user__display_name", "user__username")
        )
        for role, department_id, user_id, name, username in rows:
            held = made.bindings.setdefault(role, {}).setdefault(department_id, [])
            if user_id not in held:
                held.append(user_id)
            made.names[user_id] = name or username
        active = Delegation.objects.filter(
            starts_at__lte=moment, ends_at__gt=moment, revoked_at=None, deputy__is_active=True
        ).values_list("principal_id", "deputy_id", "deputy__display_name", "deputy__username")
        for principal_id, deputy_id, name, username in active:
            made.deputies[principal_id].add(deputy_id)
            made.names.setdefault(deputy_id, name or username)
        return made

    @classmethod
    def of_page(cls, policy: Policy) -> Deciders:
        """For pages: loaded once per policy, that is once per page. Services load anew under their locks."""
        kept: Deciders | None = getattr(policy, "kept_deciders", None)
        if kept is None:
            kept = cls.load(policy.tree)
            policy.kept_deciders = kept  # type: ignore[attr-defined]
        return kept

    def holds(self, user_id: int, role: str, department_id: int | None) -> bool:
        """Whether the person has the role over the department (None: the whole installation)."""
        places: Iterable[int | None] = [None]
        if department_id is not None:
            places = [None, *self.tree.ancestors(department_id)]
        held = self.bindings.get(role, {})
        return any(user_id in held.get(place, ()) for place in places)

    def barred(self, subject: AnySubject) -> set[int]:
        """Who may never decide it: requester, last editor, and their active deputies."""
        people = {subject.requester_id, subject.last_editor_id} - {None}
        out: set[int] = set()
        for person in people:
            if person is not None:
                out |= {person, *self.deputies.get(person, set())}
        return out

    def lead_place(
        self, department_id: int, barred: set[int], *, above: bool = False
    ) -> tuple[int | None, list[int]] | None:
        """The nearest department at or above (``above``: strictly above) with a lead who may decide, and
        these leads; (None, …) for leads of the whole installation; None when there is nobody.
        """
        places: list[int | None] = list(reversed(self.tree.ancestors(department_id)))
        if above:
            places = places[1:]
        for place in [*places, None]:
            found = [u for u in self.bindings.get(Role.LEAD, {}).get(place, []) if u not in barred]
            if found:
                return place, found
        return None

    def holders(self, role: str, department_id: int | None, barred: set[int]) -> list[int]:
        """All who hold a role over a department and are not barred."""
        places: list[int | None] = [None]
        if department_id is not None:
            places += self.tree.ancestors(department_id)
        found: list[int] = []
        for place in places:
            found += [
                u for u in self.bindings.get(role, {}).get(place, []) if u not in barred and u not in found
            ]
        return found

    def primary(self, step: AnyStep, subject: AnySubject) -> list[int]:
        """Those who are asked first: the leads of the step's own department, or all holders of its role."""
        barred = self.barred(subject)
        if step.role == Role.LEAD:
            return [
                u for u in self.bindings.get(Role.LEAD, {}).get(step.department_id, []) if u not in barred
            ]
        return self.holders(step.role, subject.department_id, barred)

    def may(self, user_id: int, step: AnyStep, subject: AnySubject) -> May:
        """Whether the person may decide the step now, in their own right or as somebody's deputy."""
        if user_id in self.barred(subject):
            return May(False, why="self_approval")
        if self._in_own_right(user_id, step, subject):
            return May(True)
        barred = self.barred(subject)
        for principal, deputies in sorted(self.deputies.items()):
            if (
                user_id in deputies
                and principal not in barred
                and self._in_own_right(principal, step, subject)
            ):
                return May(True, behalf=principal)
        return May(False, why="not_yours")

    def _in_own_right(self, user_id: int, step: AnyStep, subject: AnySubject) -> bool:
        where = step.department_id if step.role == Role.LEAD else subject.department_id
        return self.holds(user_id, step.role, where)

    def is_mine(self, user_id: int, step: AnyStep, subject: AnySubject) -> bool:
        """Whether the person, or somebody whose deputy the person is, is asked first."""
        first = self.primary(step, subject)
        return user_id not in self.barred(subject) and (
            user_id in first or any(user_id in self.deputies.get(principal, ()) for principal in first)
        )

    def names_of(self, user_ids: Iterable[int]) -> list[str]:
        """Display names."""
        return [self.names.get(user_id, "?") for user_id in user_ids]


def next_above(tree: DepartmentTree, department_id: int | None) -> int | None:
    """The parent of a department; None at the top."""
    return None if department_id is None else tree.rows[department_id].parent_id
