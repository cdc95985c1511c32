"""The only code that touches the use counters: debit, release, and what follows from a change of limits or
tree.

All three lock the flavour (the root of its tree) and then the usage rows of the department's path from root
to leaf, read the rest of the tree under those locks, let ``quotas.engine`` decide, and write. Invariants,
held by tests: direct use = the sum of open debits; total = direct use of the subtree; nothing is ever
negative; charged follows the engine's identities.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from django.db import transaction
from django.db.models import Case, IntegerField, When
from django.utils.translation import gettext_lazy as _

from portal.accounts.models import Department
from portal.kernel.clock import now
from portal.kernel.errors import Blocked, Conflict, Invalid, NotFound
from portal.kernel.units import gpus_from_milli
from quotas.engine.available import Admission, admit
from quotas.engine.tree import QuotaTree
from quotas.models import FlavourCapacity, QuotaUsage
from quotas.selectors.grants import GrantNumbers
from quotas.selectors.trees import INSTALLATION, build_tree, department_parents, path_of
from quotas.services.locks import flavour_lock

BLOCKED_TEXT = {
    "hard_cap": _("{level}: {used} used + {requested} asked > hard cap {limit}."),
    "guarantee": _("{level}: {used} used uninterruptible + {requested} asked > guarantee {limit}."),
    "borrow_limit": _("{level}: {used} used + {requested} asked > {limit}, its quota and borrow limit."),
    "subtree_quota": _("{level}: {used} used + {requested} asked > {limit} there."),
}


@dataclass(slots=True)
class LockedTree:
    """A flavour's tree under locks: the locked rows of the path, root to leaf, and every row by
    department.
    """

    path: list[int]
    locked: list[QuotaUsage]
    rows: dict[int, QuotaUsage]
    tree: QuotaTree


def usage_lock(*, department_id: int, flavour_id: int) -> list[QuotaUsage]:
    """Lock the department's usage rows from root to leaf (made when missing); must run inside a
    transaction.
    """
    return _lock_tree(department_id, flavour_id).locked


def quota_debit(*, department_id: int, flavour_id: int, charge_milli: int, interruptible: bool) -> None:
    """Book ``charge_milli`` ≥ 0 for a department, or raise Blocked with the level that says no.

    Blocked carries ``blocking{level, limit, used, requested}`` and ``extra{rule, department}``; nothing is
    written then.
    """
    _check_amount(charge_milli)
    if charge_milli == 0:
        return
    with transaction.atomic():
        held = _lock_tree(department_id, flavour_id)
        answer = admit(held.tree, department_id, charge_milli, interruptible=interruptible)
        if not answer.fits:
            raise blocked_error(answer)
        leaf = held.rows[department_id]
        leaf.direct += charge_milli
        if not interruptible:
            leaf.direct_noninterruptible += charge_milli
        held.tree.add(department_id, charge_milli, interruptible=interruptible)
        _write(held.tree, held.rows.values())


def quota_release(*, department_id: int, flavour_id: int, charge_milli: int, interruptible: bool) -> None:
    """Take a debit back: same arguments as its ``quota_debit``. Conflict where less than that is booked."""
    _check_amount(charge_milli)
    if charge_milli == 0:
        return
    with transaction.atomic():
        held = _lock_tree(department_id, flavour_id)
        leaf = held.rows[department_id]
        hard = charge_milli if not interruptible else 0
        soft_left = leaf.direct - leaf.direct_noninterruptible
        if leaf.direct_noninterruptible < hard or (interruptible and soft_left < charge_milli):
            raise Conflict(
                code="quota_release_without_use",
                detail=_("Less than that is booked for this department: it was released before."),
                extra={"booked": leaf.direct, "released": charge_milli},
            )
        leaf.direct -= charge_milli
        leaf.direct_noninterruptible -= hard
        held.tree.remove(department_id, charge_milli, interruptible=interruptible)
        _write(held.tree, held.rows.values())


def usage_recompute(*, flavour_id: int) -> int:
    """Bring every row of a flavour in line with its direct use, limits and the department tree; returns how
    many rows changed. Runs after departments moved, and harmless at any other time.
    """
    with transaction.atomic():
        flavour_lock(flavour_id)
        rows = list(QuotaUsage.objects.select_for_update().filter(flavour_id=flavour_id).order_by("pk"))
        parents = department_parents()
        missing = {d for row in rows for d in path_of(parents, row.department_id)} - {
            r.department_id for r in rows
        }
        rows += _make(missing, flavour_id)
        tree = build_tree(parents, rows, _installed(flavour_id))
        return _write(tree, rows)


def blocked_error(answer: Admission) -> Blocked:
    """The error of an ask that was not admitted; the level is named as people know it."""
    check = answer.blocking
    assert check is not None
    department = None if check.level == INSTALLATION else Department.objects.filter(pk=check.level).first()
    level = department.name if department is not None else str(_("The installation"))
    numbers = {key: gpus_from_milli(getattr(check, key)) for key in ("limit", "used", "requested")}
    return Blocked(
        code="quota_blocked",
        detail=str(BLOCKED_TEXT[check.rule]).format(level=level, **numbers),
        blocking={"level": level, "limit": check.limit, "used": check.used, "requested": check.requested},
        extra={"rule": check.rule, "department": str(department.uid) if department is not None else None},
    )


def _check_amount(charge_milli: int) -> None:
    if charge_milli < 0:
        raise Invalid(code="charge_negative", detail=_("An amount of quota is never negative."))


def _installed(flavour_id: int) -> int | None:
    return (
        FlavourCapacity.objects.filter(flavour_id=flavour_id)
        .values_list("installed_milli", flat=True)
        .first()
    )


def _make(department_ids: Iterable[int], flavour_id: int) -> list[QuotaUsage]:
    """Empty rows for departments that have none; the flavour lock keeps two makers apart."""
    rows = [
        QuotaUsage(department_id=d, flavour_id=flavour_id, updated_at=now()) for d in sorted(department_ids)
    ]
    return QuotaUsage.objects.bulk_create(rows) if rows else []


def _lock_tree(department_id: int, flavour_id: int) -> LockedTree:
    """Lock flavour and path, then read all: a statement after the lock sees every debit committed before."""
    flavour_lock(flavour_id)
    parents = department_parents()
    if department_id not in parents:
        raise NotFound(code="department_unknown", detail=_("There is no such department."))
    path = path_of(parents, department_id)
    depth = Case(*(When(department_id=d, then=i) for i, d in enumerate(path)), output_field=IntegerField())
    locked = list(
        QuotaUsage.objects.select_for_update()
        .filter(flavour_id=flavour_id, department_id__in=path)
        .order_by(depth)
    )
    known = {row.department_id for row in locked}
    locked += _make((d for d in path if d not in known), flavour_id)
    locked.sort(key=lambda row: path.index(row.department_id))
    rows = {
        row.department_id: row
        for row in QuotaUsage.objects.filter(flavour_id=flavour_id).exclude(department_id__in=path)
    }
    rows.update({row.department_id: row for row in locked})
    return LockedTree(path, locked, rows, build_tree(parents, rows.values(), _installed(flavour_id)))


def _write(tree: QuotaTree, rows: Iterable[QuotaUsage]) -> int:
    """Store the tree's counters; rows that did not change are left alone (direct use moves with its row's
    total).
    """
    changed: list[QuotaUsage] = []
    moment = now()
    for row in rows:
        counters = tree.counters[row.department_id]
        values = (counters.charged, counters.total, counters.total_noninterruptible)
        if values != (row.charged, row.total, row.total_noninterruptible):
            row.charged, row.total, row.total_noninterruptible = values
            row.updated_at = moment
            changed.append(row)
    fields = ["direct", "direct_noninterruptible", "charged", "total", "total_noninterruptible", "updated_at"]
    QuotaUsage.objects.bulk_update(changed, fields)
    return len(changed)


def limits_copy(*, flavour_id: int, limits: Mapping[int, GrantNumbers]) -> int:
    """Copy the numbers of the grants in force to the usage rows and recompute what follows; returns how many
    rows changed. Departments without a grant keep their use and lose their limits.
    """
    with transaction.atomic():
        flavour_lock(flavour_id)
        rows = list(QuotaUsage.objects.select_for_update().filter(flavour_id=flavour_id).order_by("pk"))
        rows += _make(set(limits) - {row.department_id for row in rows}, flavour_id)
        moment, changed = now(), []
        for row in rows:
            wanted = limits.get(row.department_id)
            values = (wanted or GrantNumbers()).as_fields()
            if row.granted == (wanted is not None) and GrantNumbers.of(row).as_fields() == values:
                continue
            for name, value in values.items():
                setattr(row, name, value)
            row.granted, row.updated_at = wanted is not None, moment
            changed.append(row)
        QuotaUsage.objects.bulk_update(changed, [*GrantNumbers().as_fields(), "granted", "updated_at"])
        if changed:
            usage_recompute(flavour_id=flavour_id)
        return len(changed)
