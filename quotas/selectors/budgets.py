"""Budgets: what is used of them up to now, and what they will come to if things go on as in the last days."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from datetime import date, datetime, timedelta

from django.db.models import Case, DateField, F, QuerySet, Sum, When

from portal.accounts.policy import DepartmentTree, Policy
from portal.kernel.clock import now
from quotas.engine.billing import day_bounds, day_start, local_day
from quotas.models import Budget, LedgerSum
from quotas.selectors.billing_time import billing_zone, first_of_month
from quotas.selectors.running import Running, running_now

BASIS_DAYS, BASIS_LEAST = 7, 3
THRESHOLDS = (50, 80, 100)
"""Percent of a budget at which people are warned, once each."""


@dataclass(frozen=True)
class Forecast:
    """What the period comes to at the pace of the last whole days: used so far, and for the rest `daily` a day."""

    total: int
    daily: int
    days: int


@dataclass(frozen=True)
class Measure:
    """One side of a budget: micro currency or GPU-milliseconds."""

    name: str
    limit: int
    used: int
    forecast: Forecast | None

    @property
    def percent(self) -> int:
        """Used of the limit, rounded down: 100 means it is used up."""
        return 100 * self.used // self.limit

    @property
    def reached(self) -> list[int]:
        """Thresholds that are reached."""
        return [t for t in THRESHOLDS if self.percent >= t]

    @property
    def forecast_percent(self) -> int | None:
        """The forecast of the limit."""
        return None if self.forecast is None else 100 * self.forecast.total // self.limit


@dataclass(frozen=True)
class BudgetState:
    """A budget with what is used of it; ordered money first."""

    budget: Budget
    path: str
    measures: list[Measure]
    until: datetime

    @property
    def worst(self) -> Measure:
        """The side that is used most."""
        return max(self.measures, key=lambda m: (m.percent, m.name))

    @property
    def used_up(self) -> bool:
        """Whether one side is used up."""
        return any(m.used >= m.limit for m in self.measures)


def budgets_in_force(day: date) -> QuerySet[Budget]:
    """Budgets whose period holds a day."""
    return Budget.objects.filter(ended_at=None, starts_on__lte=day, ends_on__gt=day)


def budget_states(
    budgets: list[Budget], tree: DepartmentTree, *, running: Running | None = None
) -> list[BudgetState]:
    """What is used of some budgets: booked lines of their months and subtrees, and what runs and is not booked yet.

    One query whatever their number, besides the running part: sums by month, and by day for the days that the
    forecast looks at.
    """
    if not budgets:
        return []
    look = running or running_now()
    today = local_day(look.at, billing_zone())
    recent = today - timedelta(days=BASIS_DAYS)
    day_of = Case(When(local_day__gte=recent, then=F("local_day")), default=None, output_field=DateField())
    booked = (
        LedgerSum.objects.filter(
            booked_month__gte=min(b.starts_on for b in budgets),
            booked_month__lt=max(b.ends_on for b in budgets),
        )
        .order_by()
        .annotate(day=day_of)
        .values_list("department_id_ref", "booked_month", "day")
        .annotate(ms=Sum("gpu_ms"), micro=Sum("amount_micro"))
    )
    by_department: dict[int, list[tuple[date, date | None, int, int]]] = defaultdict(list)
    for department, month, day, ms, micro in booked:
        by_department[department].append((month, day, ms, micro))
    for row in look.cuts:
        cut = row.cut
        by_department[row.department_id].append(
            (first_of_month(cut.day), cut.day, cut.gpu_ms, cut.amount_micro)
        )
    return [_state(budget, tree, by_department, today, look.at) for budget in budgets]


def _state(
    budget: Budget,
    tree: DepartmentTree,
    by_department: dict[int, list[tuple[date, date | None, int, int]]],
    today: date,
    until: datetime,
) -> BudgetState:
    used_ms = used_micro = 0
    daily: dict[date, list[int]] = defaultdict(lambda: [0, 0])
    for department in tree.subtree(budget.department_id):
        for month, day, ms, micro in by_department.get(department, ()):
            if budget.starts_on <= month < budget.ends_on:
                used_ms += ms
                used_micro += micro
                if day is not None:
                    daily[day][0] += ms
                    daily[day][1] += micro
    measures = []
    if budget.amount_micro is not None:
        forecast = _forecast(budget, used_micro, {d: v[1] for d, v in daily.items()}, today, until)
        measures.append(Measure("money", budget.amount_micro, used_micro, forecast))
    if budget.gpu_ms is not None:
        forecast = _forecast(budget, used_ms, {d: v[0] for d, v in daily.items()}, today, until)
        measures.append(Measure("hours", budget.gpu_ms, used_ms, forecast))
    path = tree.path(budget.department_id) if budget.department_id in tree.rows else str(budget.department)
    return BudgetState(budget, path, measures, until)


def _forecast(
    budget: Budget, used: int, daily: dict[date, int], today: date, until: datetime
) -> Forecast | None:
    """None before there are three whole days in the period, and once it is over."""
    zone = billing_zone()
    end = day_start(budget.ends_on, zone)
    whole = min((today - budget.starts_on).days, BASIS_DAYS)
    if until >= end or whole < BASIS_LEAST:
        return None
    days = [today - timedelta(days=n) for n in range(1, whole + 1)]
    pace = sum(daily.get(day, 0) for day in days) // whole
    start, stop = day_bounds(today, zone)
    left_today = (stop - until) / (stop - start)
    left = (budget.ends_on - today).days - 1 + left_today
    return Forecast(used + round(pace * left), pace, whole)


def seen_budgets(policy: Policy, day: date) -> QuerySet[Budget]:
    """Budgets in force of departments whose money the reader sees."""
    found = budgets_in_force(day).select_related("department").order_by("ends_on", "department__name", "id")
    scope = policy.reads_money
    return found if scope.everything else found.filter(scope.q("department_id"))


def stopped_roots(tree: DepartmentTree | None = None) -> frozenset[int]:
    """Departments with a budget that stops and is used up: they and all below them start nothing new above the
    guarantee. One query where no budget stops.
    """
    budgets = list(budgets_in_force(local_day(now(), billing_zone())).filter(stops=True))
    if not budgets:
        return frozenset()
    states = budget_states(budgets, tree or DepartmentTree.load())
    return frozenset(state.budget.department_id for state in states if state.used_up)


def stopping_budget(department_id: int, tree: DepartmentTree) -> Budget | None:
    """The used-up budget that keeps a department from starting anything new above its guarantee: its own or the
    nearest one above it; None where none does. One query where no budget stops.
    """
    above = tree.ancestors(department_id)
    budgets = [
        budget
        for budget in budgets_in_force(local_day(now(), billing_zone())).filter(stops=True)
        if budget.department_id in above
    ]
    if not budgets:
        return None
    found = [state.budget for state in budget_states(budgets, tree) if state.used_up]
    return max(found, key=lambda budget: (above.index(budget.department_id), -budget.pk), default=None)
