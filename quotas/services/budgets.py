"""Set budgets, take them back, and warn once at each threshold."""

from __future__ import annotations

from datetime import date

from django.db import transaction
from django.db.models import F
from django.urls import reverse
from django.utils.translation import gettext_lazy as _

from portal.accounts.models import Department, Role
from portal.accounts.policy import DepartmentTree, policy_of
from portal.kernel.clock import now
from portal.kernel.errors import Invalid, NotFound
from portal.notify.services import notify
from portal.ops.actor import Actor
from portal.ops.outbox import outbox_add
from portal.ops.services import audit_record
from quotas.engine.billing import local_day
from quotas.models import Budget, BudgetWarning
from quotas.selectors.approvers import Deciders
from quotas.selectors.billing_time import billing_zone
from quotas.selectors.budgets import BudgetState, Measure, budget_states, budgets_in_force

MONTHS = {Budget.Period.MONTH: 1, Budget.Period.QUARTER: 3, Budget.Period.YEAR: 12}
HIGHEST = 10**17


def period_end(period: str, starts_on: date) -> date:
    """The first day after a period that starts on the first of a month."""
    total = 12 * starts_on.year + starts_on.month - 1 + MONTHS[Budget.Period(period)]
    return date(total // 12, total % 12 + 1, 1)


def budget_set(
    *,
    acting_user: Actor,
    department: Department,
    period: str,
    starts_on: date,
    amount_micro: int | None,
    gpu_ms: int | None,
    stops: bool = False,
    note: str = "",
) -> Budget:
    """Put a budget in force; the one of the same department and period that was there ends, its warnings stay with it.

    Invalid for a period that does not start with a month, for nothing at all, for 0 or less.
    """
    _may(acting_user)
    if period not in Budget.Period.values:
        raise Invalid.field("period", _("Known periods: month, quarter, year."))
    if starts_on.day != 1:
        raise Invalid.field("starts_on", _("A budget starts on the first day of a month."))
    if amount_micro is None and gpu_ms is None:
        raise Invalid.field("amount", _("Give money, GPU-hours, or both."))
    for name, value in (("amount", amount_micro), ("hours", gpu_ms)):
        if value is not None and not 0 < value <= HIGHEST:
            raise Invalid.field(name, _("A budget is more than 0. To forbid all use, lower the quota."))
    with transaction.atomic():
        Department.objects.without_tree_fields().select_for_update(no_key=True).get(pk=department.pk)
        old = Budget.objects.filter(
            department=department, period=period, starts_on=starts_on, ended_at=None
        ).first()
        if old is not None:
            Budget.objects.filter(pk=old.pk).update(
                ended_at=now(), updated_at=now(), version=F("version") + 1
            )
        budget = Budget.objects.create(
            department=department,
            period=period,
            starts_on=starts_on,
            ends_on=period_end(period, starts_on),
            amount_micro=amount_micro,
            gpu_ms=gpu_ms,
            stops=stops,
            note=note.strip()[:300],
            set_by_name=acting_user.name,
        )
        audit_record(
            acting_user=acting_user,
            action="budget.set",
            subject=budget,
            before={"amount_micro": old.amount_micro, "gpu_ms": old.gpu_ms, "stops": old.stops}
            if old
            else {},
            after={
                "period": period,
                "starts_on": starts_on.isoformat(),
                "amount_micro": amount_micro,
                "gpu_ms": gpu_ms,
                "stops": stops,
            },
            reason=budget.note,
        )
        outbox_add("quotas.budget_changed", {"budget": str(budget.uid)}, key=f"budget:{budget.uid}:set")
        return budget


def budget_end(*, acting_user: Actor, budget: Budget, reason: str = "") -> None:
    """Take a budget back. A second time changes nothing."""
    _may(acting_user)
    with transaction.atomic():
        changed = Budget.objects.filter(pk=budget.pk, ended_at=None).update(
            ended_at=now(), updated_at=now(), version=F("version") + 1
        )
        if changed:
            audit_record(acting_user=acting_user, action="budget.ended", subject=budget, reason=reason)
            outbox_add("quotas.budget_changed", {"budget": str(budget.uid)}, key=f"budget:{budget.uid}:ended")


def _may(acting_user: Actor) -> None:
    if not acting_user.is_system:
        policy = policy_of(acting_user.user)
        policy.require(policy.keeps_books)


def budgets_watch() -> int:
    """Note thresholds that budgets in force have reached, and tell the leads and finance once each; returns notices.

    Who passes several at once is told of the highest. Also after a missed run; a second run at once does nothing.
    """
    today = local_day(now(), billing_zone())
    budgets = list(budgets_in_force(today).select_related("department"))
    tree = DepartmentTree.load()
    told = 0
    for state in budget_states(budgets, tree):
        for measure in state.measures:
            if measure.reached:
                told += _warn(state, measure, tree)
    return told


def _warn(state: BudgetState, measure: Measure, tree: DepartmentTree) -> int:
    budget = state.budget
    with transaction.atomic():
        known = set(budget.warnings.filter(measure=measure.name).values_list("percent", flat=True))
        fresh = [percent for percent in measure.reached if percent not in known]
        if not fresh:
            return 0
        made = BudgetWarning.objects.bulk_create(
            [BudgetWarning(budget=budget, measure=measure.name, percent=p, used=measure.used) for p in fresh],
            ignore_conflicts=True,
        )
        deciders = Deciders.load(tree)
        people = {
            *deciders.holders(Role.LEAD, budget.department_id, set()),
            *deciders.holders(Role.FINANCE, budget.department_id, set()),
        }
        if 100 in fresh and budget.stops:
            outbox_add(
                "quotas.budget_changed", {"budget": str(budget.uid)}, key=f"budget:{budget.uid}:used_up"
            )
        return len(
            notify(
                user_ids=people,
                kind="quotas.budget_used",
                subject=budget,
                threshold=f"{measure.name}:{max(fresh)}",
                params={
                    "department": state.path,
                    "percent": measure.percent,
                    "measure": measure.name,
                    "until": budget.ends_on.isoformat(),
                    "stops": budget.stops and measure.used >= measure.limit,
                },
                url=f"{reverse('quotas:budgets')}#b-{budget.pk}",
            )
        ) * bool(made)


def budget_for(uid: object) -> Budget:
    """The budget in force of this uid. NotFound otherwise."""
    budget = Budget.objects.select_related("department").filter(uid=uid, ended_at=None).first()
    if budget is None:
        raise NotFound(code="not_found", detail=_("There is no such budget."))
    return budget
