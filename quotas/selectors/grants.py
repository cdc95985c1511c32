"""Numbers of grants, and whether their sums add up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from django.utils.translation import gettext as _

from portal.accounts.models import Department
from quotas.models import FlavourCapacity, QuotaGrant, QuotaUsage
from quotas.selectors.trees import department_parents, grants_now


@dataclass(frozen=True, slots=True)
class GrantNumbers:
    """The five numbers of a grant; milli-GPU, None = unlimited, 0 = none."""

    guaranteed: int = 0
    borrow_limit: int | None = None
    lend_limit: int | None = None
    hard_cap: int | None = None
    weight: int = 1

    @classmethod
    def of(cls, row: QuotaGrant | QuotaUsage) -> GrantNumbers:
        """Of a grant, or as copied to a usage row."""
        return cls(row.guaranteed, row.borrow_limit, row.lend_limit, row.hard_cap, row.weight)

    def as_fields(self) -> dict[str, Any]:
        """By model field."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class SumCheck:
    """Guarantees below a level against its own: ``below`` ≤ ``own``. ``installation``: own is what is
    installed.
    """

    level: str
    own: int
    below: int
    installation: bool = False

    @property
    def holds(self) -> bool:
        return self.below <= self.own


def grant_numbers(department_id: int, flavour_id: int, moment: datetime) -> GrantNumbers | None:
    """The numbers in force at a moment; None without a grant."""
    row = QuotaGrant.objects.filter(
        department_id=department_id, flavour_id=flavour_id, during__contains=moment
    ).first()
    return GrantNumbers.of(row) if row is not None else None


def sum_checks(
    changes: Mapping[int, GrantNumbers | None], flavour_id: int, moment: datetime
) -> list[SumCheck]:
    """The sums that a set of changes touches, at the moment when they come into force: the parent of each
    changed department, the department itself, and the installation. None takes a grant away.
    """
    parents = department_parents()
    numbers: dict[int, GrantNumbers] = {
        pk: GrantNumbers.of(grant) for pk, grant in grants_now(flavour_id, moment).items()
    }
    for pk, value in changes.items():
        if value is None:
            numbers.pop(pk, None)
        else:
            numbers[pk] = value
    children: dict[int | None, list[int]] = {}
    for pk, parent in parents.items():
        children.setdefault(parent, []).append(pk)

    def effective(pk: int) -> int:
        """A department's guarantee; without a grant the sum of its children's."""
        if pk in numbers:
            return numbers[pk].guaranteed
        return sum(effective(child) for child in children.get(pk, []))

    touched: list[int] = []
    for pk in changes:
        above: int | None = parents[pk]
        while above is not None and above not in numbers:
            above = parents[above]
        touched += [p for p in (pk, above) if p is not None and p in numbers and p not in touched]
    names = dict(Department.objects.filter(pk__in=touched).order_by("pk").values_list("pk", "name"))
    checks = [
        SumCheck(names[pk], numbers[pk].guaranteed, sum(effective(child) for child in children.get(pk, [])))
        for pk in touched
        if children.get(pk)
    ]
    installed = (
        FlavourCapacity.objects.filter(flavour_id=flavour_id)
        .values_list("installed_milli", flat=True)
        .first()
    )
    if installed is not None:
        total = sum(effective(root) for root in children.get(None, []))
        checks.append(SumCheck(_("The installation"), installed, total, installation=True))
    return checks
