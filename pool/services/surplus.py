"""Departments over their quota (it was lowered, or removed): let it run out, or take back with notice.

Nothing is killed by a lowered quota. New starts wait by themselves; this is the administrator's other choice.
"""

from __future__ import annotations

from dataclasses import dataclass

from django.db import transaction
from django.utils.translation import gettext_lazy as _

from pool.engine.ladder import Holder, surplus_victims
from pool.models import Allocation, ReclaimCase
from pool.services.ladder import case_begin, case_withdraw
from pool.services.nodes import require_pool_admin
from pool.services.reclaim_rules import rules_active
from pool.transitions import LIVE, WITHDRAWABLE
from portal.accounts.models import Department
from portal.accounts.policy import DepartmentTree
from portal.kernel.errors import Conflict, Invalid
from portal.kernel.units import to_ms
from portal.ops.actor import Actor, system
from portal.ops.services import audit_record
from quotas.engine.available import over_by
from quotas.models import GpuFlavour
from quotas.selectors.trees import INSTALLATION, quota_trees

RULE = "over_quota"
SYSTEM = system("rules")
LONGEST_NOTICE_S = 30 * 86400


@dataclass(frozen=True)
class Over:
    """A department above what its quota allows of a flavour; milli-GPU. ``ending``: on its way back already."""

    department: Department
    flavour: GpuFlavour
    used_milli: int
    over_milli: int
    ending_milli: int
    victims: tuple[Allocation, ...]


def departments_over(tree: DepartmentTree | None = None) -> list[Over]:
    """Who is over now, with what a reclaim would take; the deepest level that is over answers for itself."""
    departments = tree or DepartmentTree.load()
    flavours = {row.pk: row for row in GpuFlavour.objects.all()}
    found: list[Over] = []
    for flavour_id, quota in sorted(quota_trees().items()):
        if flavour_id not in flavours:
            continue
        for pk, department in departments.rows.items():
            if pk in quota.nodes and pk != INSTALLATION and over_by(quota, pk) > 0:
                used = quota.counters[pk].total
                found.append(_over(departments, department, flavours[flavour_id], used, over_by(quota, pk)))
    return found


def _over(tree: DepartmentTree, department: Department, flavour: GpuFlavour, used: int, over: int) -> Over:
    rows = {
        row.pk: row
        for row in Allocation.objects.filter(department_id__in=tree.subtree(department.pk), flavour=flavour)
        .exclude(state=Allocation.State.ENDED)
        .select_related("holder", "department", "request")
    }
    cases = set(
        ReclaimCase.objects.filter(allocation_id__in=rows, closed_at=None).values_list(
            "allocation_id", flat=True
        )
    )
    ending = sum(
        row.charge_milli for pk, row in rows.items() if pk in cases or row.state == Allocation.State.STOPPING
    )
    holders = [
        Holder(
            pk,
            row.charge_milli,
            to_ms(row.started_at or row.reserved_at),
            row.priority,
            row.interruptible,
        )
        for pk, row in rows.items()
        if row.state in LIVE and pk not in cases
    ]
    chosen = surplus_victims(holders, over - ending)
    return Over(department, flavour, used, over, ending, tuple(rows[pk] for pk in chosen))


def surplus_reclaim(
    *,
    acting_user: Actor,
    department: Department,
    flavour: GpuFlavour,
    reason: str,
    notice_s: int | None = None,
) -> list[ReclaimCase]:
    """Take back with notice what a department has above its quota: lowest priority, newest, smallest sufficient.

    What cannot be interrupted is left to run out. Conflict `not_over` where it is within its quota, or enough
    is on its way back already.
    """
    require_pool_admin(acting_user)
    if not reason.strip():
        raise Invalid.field("reason", _("Say why: the holders will read it."), code="reason_missing")
    grace = rules_active()[1].grace_over_quota_s if notice_s is None else notice_s
    if not 0 <= grace <= LONGEST_NOTICE_S:
        raise Invalid.field("notice_s", _("The notice lies between 0 and 30 days."))
    over = next(
        (
            one
            for one in departments_over()
            if one.department.pk == department.pk and one.flavour.pk == flavour.pk
        ),
        None,
    )
    if over is None or over.over_milli <= over.ending_milli:
        raise Conflict(code="not_over", detail=_("Nothing more is to be taken back here."))
    figures = {
        "used_milli": over.used_milli,
        "over_milli": over.over_milli,
        "department": department.name,
        "flavour": flavour.name,
    }
    cases: list[ReclaimCase] = []
    with transaction.atomic():
        audit_record(
            acting_user=acting_user,
            action="quota.surplus_reclaimed",
            subject=department,
            after={**figures, "allocations": [row.ref for row in over.victims], "notice_s": grace},
            reason=reason.strip(),
            department_id=department.pk,
        )
        for row in sorted(over.victims, key=lambda one: one.pk):
            cases.append(
                case_begin(
                    acting_user=acting_user,
                    allocation_id=row.pk,
                    cause=ReclaimCase.Cause.OVER_QUOTA,
                    rule=RULE,
                    grace_s=grace,
                    reason=reason.strip(),
                    figures=figures,
                )
            )
    return cases


def surplus_settle() -> int:
    """Withdraw what is not needed any more, because a quota was raised or other work ended. Returns how many.

    Newest notices first; a case that is still needed to come back within the quota stays.
    """
    open_cases = list(
        ReclaimCase.objects.filter(closed_at=None, cause=ReclaimCase.Cause.OVER_QUOTA, step__in=WITHDRAWABLE)
        .select_related("allocation")
        .order_by("-noticed_at", "-id")
    )
    if not open_cases:
        return 0
    tree, trees = DepartmentTree.load(), quota_trees()
    withdrawn = 0
    for case in open_cases:
        row = case.allocation
        quota = trees.get(row.flavour_id or 0)
        if quota is None:
            continue
        path = [pk for pk in tree.ancestors(row.department_id) if pk in quota.nodes]
        pending = _ending_below(tree, path, row.flavour_id or 0)
        needed = any(
            over_by(quota, pk) > pending[pk] - row.charge_milli for pk in path if over_by(quota, pk) > 0
        )
        if not needed:
            withdrawn += case_withdraw(acting_user=SYSTEM, case_id=case.pk, why="within_quota")
    return withdrawn


def _ending_below(tree: DepartmentTree, path: list[int], flavour_id: int) -> dict[int, int]:
    """Of each department on a path: milli-GPU in its subtree that are on their way back."""
    rows = (
        Allocation.objects.filter(flavour_id=flavour_id)
        .exclude(state=Allocation.State.ENDED)
        .filter(
            pk__in=ReclaimCase.objects.filter(closed_at=None).values("allocation_id"),
        )
        .values_list("department_id", "charge_milli")
    )
    pending = dict.fromkeys(path, 0)
    for department_id, charge in rows:
        for pk in tree.ancestors(department_id):
            if pk in pending:
                pending[pk] += charge
    return pending
