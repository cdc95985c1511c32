"""Who sees which ledger lines, and the lines themselves: booked ones, and the running part not booked yet.

Everything that shows money starts from `Lines`, so that pages, files and the API share one rule and one sum.
"""

from __future__ import annotations

import re
import uuid
from collections import namedtuple
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, datetime
from functools import cached_property, lru_cache
from typing import Any

from django.db import connection
from django.db.models import Q, QuerySet, TextField, Value
from django.db.models.functions import Cast
from django.utils.translation import gettext_lazy as _

from portal.accounts.models import User
from portal.accounts.policy import Policy, Scope
from portal.kernel.clock import now
from portal.kernel.errors import Invalid, NotFound
from quotas.models import GpuFlavour, LedgerEntry, LedgerSum, UsageSpan
from quotas.selectors.billing_time import first_of_month, month_of, previous_month
from quotas.selectors.cutting import Names, line_of
from quotas.selectors.running import Running, RunningCut, running_now

PARAMS = frozenset({"month", "department", "flavour", "user", "site", "q", "kind", "day"})
"""Query parameters that choose ledger lines; the same on pages, in files and in the API."""


@dataclass(frozen=True)
class LineFilter:
    """What is asked for. Ids are resolved; `None` and "" mean all. `month` is the month of the books, `day` a local
    day of use."""

    month: date | None = None
    department_id: int | None = None
    flavour: GpuFlavour | None = None
    user: User | None = None
    site: str = ""
    q: str = ""
    kind: str = ""
    day: date | None = None

    def without(self, *names: str) -> LineFilter:
        """The same with some parts taken off."""
        cleared: dict[str, Any] = {n: "" if n in {"site", "q", "kind"} else None for n in names}
        return replace(self, **cleared)


def line_filter(params: Mapping[str, str], policy: Policy, *, month: date | None = None) -> LineFilter:
    """Read a filter from a query string. Invalid for a month that is none; NotFound for a department, flavour
    or person that does not exist or is not for this reader. `month` is the default.
    """
    text = params.get("month", "")
    department_id = None
    if code := params.get("department", ""):
        department_id = next(
            (pk for pk, d in policy.tree.rows.items() if str(d.uid) == code or d.code == code), None
        )
        if department_id is None or not _sees_department(policy, department_id):
            raise _unknown()
    flavour = None
    if code := params.get("flavour", ""):
        flavour = GpuFlavour.objects.filter(code=code).first()
        if flavour is None:
            raise _unknown()
    user = None
    if code := params.get("user", ""):
        user = User.objects.filter(uid=code).first() if _is_uuid(code) else None
        if user is None or not _sees_user(policy, user):
            raise _unknown()
    kind = params.get("kind", "")
    if kind and kind not in LedgerEntry.Kind.values:
        raise Invalid.field("kind", _("Known kinds: usage, idle, correction."))
    day = params.get("day", "")
    return LineFilter(
        month=month_from(text) if text else month,
        department_id=department_id,
        flavour=flavour,
        user=user,
        site=params.get("site", "")[:48],
        q=params.get("q", "").strip()[:80],
        kind=kind,
        day=day_from("day", day) if day else None,
    )


FIRST_YEAR, LAST_YEAR = 1900, 2199  # beyond them there are neither books nor zones


def month_from(text: str) -> date:
    """`2026-05` → the first of May. Invalid for anything else."""
    if re.fullmatch(r"\d{4}-\d{2}", text):
        try:
            found = date(int(text[:4]), int(text[5:]), 1)
        except ValueError:
            found = date.min
        if FIRST_YEAR <= found.year <= LAST_YEAR:
            return found
    raise Invalid.field("month", _("A month is written like 2026-05."))


def day_from(name: str, text: str) -> date:
    """`2026-05-31` of a parameter. Invalid for anything else."""
    try:
        found = date.fromisoformat(text)
    except ValueError:
        found = date.min
    if FIRST_YEAR <= found.year <= LAST_YEAR:
        return found
    raise Invalid.field(name, _("A day is written like 2026-05-31."))


def _is_uuid(text: str) -> bool:
    try:
        uuid.UUID(text)
    except ValueError:
        return False
    return True


def _unknown() -> NotFound:
    return NotFound(code="not_found", detail=_("There is no such thing here."))


def _sees_department(policy: Policy, department_id: int) -> bool:
    """Whether any department of the subtree is in the reader's money, or it is where the reader works."""
    if policy.reads_money.everything:
        return True
    inside = set(policy.tree.subtree(department_id))
    return bool(inside & policy.reads_money.ids) or department_id in policy.asks_for


def _sees_user(policy: Policy, user: User) -> bool:
    """Themselves, and whoever belongs to or has lines in the departments whose money the reader sees."""
    scope = policy.reads_money
    if scope.everything or user.pk == policy.user.pk:
        return True
    if not scope:
        return False
    if user.home_department_id in scope:
        return True
    return LedgerEntry.objects.filter(scope.q("department_id_ref"), user_id_ref=user.pk).exists()


SPAN_COLUMNS = (
    "id", "department_id", "user_id", "flavour_id", "request_id", "site_code", "node_name", "gpu_label",
    "charge_milli", "request__uid", "request__cost_code", "department__cost_center", "user__display_name",
    "user__username", "flavour__name", "flavour__code",
)  # fmt: skip
"""What a running line shows; requests have many more columns."""

FILE_COLUMNS = (
    "id", "uid", "kind", "booked_month", "local_day", "starts_at", "ends_at", "request_id_ref", "department_path",
    "user_name", "cost_code", "flavour_name", "site_code", "node_name", "gpu_label", "charge_milli", "gpu_ms",
    "surcharge_ms", "micro_per_gpu_hour", "rate_uid", "amount_micro", "currency", "corrects_id", "reason", "booked_at",
)  # fmt: skip
"""What a line shows in a file."""

LINE_TIMES = frozenset({"starts_at", "ends_at", "booked_at"})


@dataclass
class Lines:
    """The ledger lines that one reader may see under one filter."""

    policy: Policy
    filter: LineFilter
    _running: Running | None = field(default=None, repr=False)

    def _booked_query(self) -> Q:
        scope, chosen = self.policy.reads_money, self.filter
        query = Q() if scope.everything else scope.q("department_id_ref") | Q(user_id_ref=self.policy.user.pk)
        if self._departments is not None:
            query &= Q(department_id_ref__in=self._departments)
        if chosen.user is not None:
            query &= Q(user_id_ref=chosen.user.pk)
        if chosen.flavour is not None:
            query &= Q(flavour_id=chosen.flavour.pk)
        if chosen.site:
            query &= Q(site_code=chosen.site)
        if chosen.month is not None:
            query &= Q(booked_month=chosen.month)
        if chosen.kind:
            query &= Q(kind=chosen.kind)
        if chosen.day is not None:
            query &= Q(local_day=chosen.day)
        return query

    def booked(self) -> QuerySet[LedgerEntry]:
        """What stands in the ledger, newest first."""
        query = self._booked_query()
        if self.filter.q:
            query &= _search(self.filter.q)
        return LedgerEntry.objects.filter(query).order_by("-id")

    def sums(self) -> QuerySet[LedgerSum] | QuerySet[LedgerEntry]:
        """The same as rows to add up: `gpu_ms`, `amount_micro` and `lines` of each. They come from the sums that
        the database keeps, or for a search from the lines themselves.
        """
        if self.filter.q:
            return self.booked().order_by().annotate(lines=Value(1))
        return LedgerSum.objects.filter(self._booked_query())

    @property
    def moment(self) -> datetime:
        """Up to when the running part counts."""
        return self._look().at

    def _look(self) -> Running:
        if self._running is None:
            self._running = running_now()
        return self._running

    def running(self, limit: int | None = None) -> list[LedgerEntry]:
        """Unsaved lines: what open leases have used up to now and is not booked yet, newest lease first."""
        found = self.running_cuts()[:limit]
        if not found:
            return []
        spans = (
            UsageSpan.objects.select_related("request", "department", "user", "flavour")
            .only(*SPAN_COLUMNS)
            .in_bulk({row.span_id for row in found})
        )
        names = Names.load({row.department_id for row in found})
        lines = []
        for row in found:
            span = spans[row.span_id]
            line = line_of(span, row.cut, names, booked_month=first_of_month(row.cut.day))
            line.request_uid = span.request.uid  # type: ignore[attr-defined]
            lines.append(line)
        return lines

    def running_cuts(self) -> list[RunningCut]:
        """The same as cuts, for sums. Same arithmetic, same prices as at booking; none under a search or a kind,
        which look at the ledger alone.
        """
        chosen = self.filter
        if chosen.q or chosen.kind:
            return []
        look = self._look()
        present = month_of(look.at)
        # The month before has a running part until its last day is booked.
        if chosen.month not in {None, present, previous_month(present)}:
            return []
        scope, reader = self.policy.reads_money, self.policy.user.pk
        if scope.everything and chosen == LineFilter(month=chosen.month):
            return [row for row in look.cuts if chosen.month in {None, first_of_month(row.cut.day)}]
        return [row for row in look.cuts if self._shows(row, scope, reader)]

    def _shows(self, row: RunningCut, scope: Scope, reader: int) -> bool:
        chosen = self.filter
        return (
            (row.department_id in scope or row.user_id == reader)
            and (self._departments is None or row.department_id in self._departments)
            and (chosen.user is None or row.user_id == chosen.user.pk)
            and (chosen.flavour is None or row.flavour_id == chosen.flavour.pk)
            and (not chosen.site or row.site_code == chosen.site)
            and chosen.month in {None, first_of_month(row.cut.day)}
            and chosen.day in {None, row.cut.day}
        )

    @cached_property
    def _departments(self) -> frozenset[int] | None:
        chosen = self.filter.department_id
        return None if chosen is None else frozenset(self.policy.tree.subtree(chosen))

    def all(self) -> Iterator[Any]:
        """Running lines (their `id` is None), then booked ones with `FILE_COLUMNS` as attributes; for files."""
        yield from self.running()
        yield from plain_lines(self.booked(), FILE_COLUMNS)


@lru_cache(maxsize=8192)
def _moment(text: str) -> datetime:
    return datetime.fromisoformat(text)


def plain_lines(lines: QuerySet[LedgerEntry], fields: Sequence[str]) -> Iterator[Any]:
    """Many lines with `fields` as attributes, streamed in a third of the time of models. Times come as text, which
    the database writes with their offset: made one by one from the wire they would take most of it, and those of
    books repeat.
    """
    row = namedtuple("row", fields)  # type: ignore[misc]
    times = [place for place, name in enumerate(fields) if name in LINE_TIMES]
    asked = [Cast(name, TextField()) if name in LINE_TIMES else name for name in fields]
    for values in lines.values_list(*asked).iterator(chunk_size=5000):
        line = list(values)
        for place in times:
            line[place] = _moment(line[place])
        yield row._make(line)


def _search(text: str) -> Q:
    """By reference (R-17), person, cost code, node or card."""
    if found := re.fullmatch(r"[Rr]-?(\d{1,18})", text):
        return Q(request_id_ref=int(found.group(1)))
    if text.isdecimal() and len(text) < 19:
        return Q(pk=int(text))
    return (
        Q(user_name__icontains=text)
        | Q(cost_code__icontains=text)
        | Q(node_name__icontains=text)
        | Q(gpu_label__icontains=text)
    )


@dataclass(frozen=True)
class BookMonth:
    """A month as lists offer it."""

    month: date
    closed: bool
    present: bool


@dataclass(frozen=True)
class BookState:
    """The months there are, and up to which entry (booked when) the ledger reaches."""

    months: list[BookMonth]
    mark: int
    marked_at: datetime | None


def book_months() -> list[BookMonth]:
    """Months from the first booked one to the present one, newest first."""
    return book_state().months


def book_state() -> BookState:
    """Months and mark in one query."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT (SELECT min(booked_month) FROM quotas_ledgerentry), "
            "ARRAY(SELECT month FROM quotas_ledgermonth WHERE closed_at IS NOT NULL), l.id, l.booked_at "
            "FROM (SELECT 1) one LEFT JOIN "
            "(SELECT id, booked_at FROM quotas_ledgerentry ORDER BY id DESC LIMIT 1) l ON true"
        )
        first, closed, mark, marked_at = cursor.fetchone()
    return BookState(_months(first, set(closed)), mark or 0, marked_at)


def _months(first: date | None, closed: set[date]) -> list[BookMonth]:
    present = month_of(now())
    first = first or present
    months: list[BookMonth] = []
    year, number = present.year, present.month
    while (current := date(year, number, 1)) >= min(first, present) and len(months) < 120:
        months.append(BookMonth(current, current in closed, current == present))
        year, number = (year, number - 1) if number > 1 else (year - 1, 12)
    return months
