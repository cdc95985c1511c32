"""What all kinds of reports share: the question, the answer, and who sees which rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import date, datetime
from typing import Any

from django.db.models import BigIntegerField, Case, F, Q, Sum, Value, When
from django.utils.functional import Promise
from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy

from monitoring.models import BuiltDay
from monitoring.selectors.reports.period import Period, period_from
from portal.accounts.policy import Policy
from portal.kernel.errors import Invalid
from portal.kernel.tables import Table
from quotas.selectors.money import LineFilter, line_filter

Text = str | Promise

PARAMS = ("period", "from", "to", "by", "department", "flavour", "user", "site")
"""Query parameters of every report, on pages, in files, in the API and in saved views."""

GROUP_WORDS: dict[str, Text] = {
    "department": _("Department"),
    "path": _("Department, as it was called"),
    "flavour": _("Flavour"),
    "user": _("Person"),
    "site": _("Site"),
    "cost_code": _("Cost centre"),
    "node": _("Node"),
    "month": pgettext_lazy("finance", "Month"),
    "lease": _("Lease"),
}


@dataclass(frozen=True)
class Ask:
    """A report that is asked for: who asks, what period, under which filter, grouped how."""

    policy: Policy
    period: Period
    chosen: LineFilter
    by: str

    @property
    def whole_pool(self) -> bool:
        """Whether the answer covers all departments and people, so that the pool's own hours belong in it."""
        chosen = self.chosen
        return self.policy.reads_money.everything and chosen.department_id is None and chosen.user is None

    def uses(self) -> Q:
        """Which day sums of uses the reader may see, under the filter."""
        scope, chosen = self.policy.reads_money, self.chosen
        query = Q(local_day__range=(self.period.first, self.period.last))
        if not scope.everything:
            query &= scope.q("department_id_ref") | Q(user_id_ref=self.policy.user.pk)
        if chosen.department_id is not None:
            query &= Q(department_id_ref__in=self.policy.tree.subtree(chosen.department_id))
        if chosen.user is not None:
            query &= Q(user_id_ref=chosen.user.pk)
        return query & self._place()

    def cards(self) -> Q:
        """Which day sums of cards, under the filter of flavour and site."""
        return Q(local_day__range=(self.period.first, self.period.last)) & self._place()

    def _place(self) -> Q:
        query = Q()
        if self.chosen.flavour is not None:
            query &= Q(flavour_id=self.chosen.flavour.pk)
        if self.chosen.site:
            query &= Q(site_code=self.chosen.site)
        return query

    def departments(self) -> list[int] | None:
        """Ids of the departments in it; None: all."""
        scope = self.policy.reads_money
        if self.chosen.department_id is not None:
            below = self.policy.tree.subtree(self.chosen.department_id)
            return below if scope.everything else [pk for pk in below if pk in scope]
        return None if scope.everything else sorted(scope.ids)


@dataclass(frozen=True)
class Stat:
    """A headline figure: raw value of a column kind, what it is of, and the same before."""

    label: Text
    value: int | None
    kind: str
    basis: Text = ""
    before: int | None = None

    @property
    def change(self) -> float | None:
        """In percent of the figure before; None where that was nothing."""
        if not self.before or self.value is None:
            return None
        return 100 * (self.value - self.before) / abs(self.before)


@dataclass(frozen=True)
class Part:
    """A part of a whole that adds up: GPU-milliseconds and the colour of its state."""

    label: Text
    value: int
    tone: str


@dataclass
class Answer:
    """What a report says. `tables[0]` is the main one; `parts` add up to `whole`. `before`: what its figures are
    compared with, where that is not the period before."""

    tables: list[Table]
    stats: list[Stat] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    chart: dict[str, Any] | None = None
    definitions: list[Text] = field(default_factory=list)
    covered: tuple[int, int] | None = None
    until: datetime | None = None
    before: Period | None = None

    @property
    def whole(self) -> int:
        """The sum of the parts."""
        return sum(part.value for part in self.parts)


@dataclass(frozen=True)
class Kind:
    """A kind of report: its words, what it can be grouped by (the first is the default), who reads it, its maker."""

    code: str
    title: Text
    answers: Text
    groupings: tuple[str, ...]
    make: Callable[[Ask], Answer]
    pool_only: bool = False


def ask_from(kind: Kind, params: Mapping[str, str], policy: Policy) -> Ask:
    """Read a question from a query string. Invalid or NotFound for what is unknown or not the reader's."""
    period = period_from(params)
    by = params.get("by", "") or kind.groupings[0]
    if by not in kind.groupings:
        raise Invalid.field("by", _("This report cannot be grouped that way."))
    chosen = line_filter(
        {k: v for k, v in params.items() if k in {"department", "flavour", "user", "site"}}, policy
    )
    return Ask(policy, period, chosen, by)


def part_sum(name: str, period: Period, **more: Any) -> Sum:
    """The sum of a column of whole numbers by local day; of the last day of a period that ends within it the part
    that counts, rounded down row by row, so that it is the same however the rows are grouped.
    """
    if period.part is None:
        return Sum(name, **more)
    passed, length = (Value(minutes, output_field=BigIntegerField()) for minutes in period.part)
    counted = Case(
        When(local_day=period.last, then=F(name) * passed / length),
        default=F(name),
        output_field=BigIntegerField(),
    )
    return Sum(counted, **more)


def head_case(policy: Policy, children: list[int], column: str) -> Any:
    """The child that a row's department lies under, for the database; its own id elsewhere."""
    branches = [When(**{f"{column}__in": policy.tree.subtree(head)}, then=Value(head)) for head in children]
    return Case(*branches, default=F(column), output_field=BigIntegerField()) if branches else F(column)


def built_until(period: Period) -> datetime | None:
    """When the newest day of a period was summed."""
    return (
        BuiltDay.objects.filter(local_day__range=(period.first, period.last))
        .order_by("-local_day")
        .values_list("built_at", flat=True)
        .first()
    )


def day_axis(days: list[date]) -> list[str]:
    """Days as a chart names them, each by a name of its own."""
    long = bool(days) and days[0].year != days[-1].year
    return [f"{day:%Y-%m-%d}" if long else f"{day:%m-%d}" for day in days]
