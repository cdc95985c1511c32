"""Who sees which ledger lines, and the lines themselves: booked ones, and the running part not booked yet.

Everything that shows money starts from `Lines`, so that pages, files and the API share one rule and one sum.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import date, datetime
from typing import Any

from django.db import connection
from django.db.models import Q, QuerySet
from django.utils.translation import gettext_lazy as _

from portal.accounts.models import User
from portal.accounts.policy import Policy
from portal.kernel.clock import now
from portal.kernel.errors import Invalid, NotFound
from quotas.engine.billing import Cut
from quotas.models import GpuFlavour, LedgerEntry, UsageSpan
from quotas.selectors.billing_time import first_of_month, month_of, previous_month
from quotas.selectors.cutting import Cutter, line_of

PARAMS = frozenset({"month", "department", "flavour", "user", "site", "q", "kind"})
"""Query parameters that choose ledger lines; the same on pages, in files and in the API."""


@dataclass(frozen=True)
class LineFilter:
    """What is asked for. Ids are resolved; `None` and "" mean all. `month` is the month of the books."""

    month: date | None = None
    department_id: int | None = None
    flavour: GpuFlavour | None = None
    user: User | None = None
    site: str = ""
    q: str = ""
    kind: str = ""

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
        raise Invalid.field("kind", _("Known kinds: usage, correction."))
    return LineFilter(
        month=month_from(text) if text else month,
        department_id=department_id,
        flavour=flavour,
        user=user,
        site=params.get("site", "")[:48],
        q=params.get("q", "").strip()[:80],
        kind=kind,
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
    "charge_milli", "started_at", "ended_at", "accrued_to", "request__uid", "request__cost_code",
    "department__cost_center", "user__display_name", "user__username", "flavour__name", "flavour__code",
)  # fmt: skip
"""What a running line shows; requests have many more columns."""


@dataclass
class Lines:
    """The ledger lines that one reader may see under one filter."""

    policy: Policy
    filter: LineFilter
    _cuts: list[tuple[UsageSpan, Cut]] | None = field(default=None, repr=False)
    _cutter: Cutter | None = field(default=None, repr=False)

    def _scope(self, user_column: str, department_column: str) -> Q:
        scope = self.policy.reads_money
        query = (
            Q() if scope.everything else scope.q(department_column) | Q(**{user_column: self.policy.user.pk})
        )
        chosen = self.filter
        if chosen.department_id is not None:
            query &= Q(**{f"{department_column}__in": self.policy.tree.subtree(chosen.department_id)})
        if chosen.user is not None:
            query &= Q(**{user_column: chosen.user.pk})
        if chosen.flavour is not None:
            query &= Q(flavour_id=chosen.flavour.pk)
        if chosen.site:
            query &= Q(site_code=chosen.site)
        return query

    def booked(self) -> QuerySet[LedgerEntry]:
        """What stands in the ledger, newest first."""
        chosen = self.filter
        query = self._scope("user_id_ref", "department_id_ref")
        if chosen.month is not None:
            query &= Q(booked_month=chosen.month)
        if chosen.kind:
            query &= Q(kind=chosen.kind)
        if chosen.q:
            query &= _search(chosen.q)
        return LedgerEntry.objects.filter(query).order_by("-id")

    def running(self, limit: int | None = None) -> list[LedgerEntry]:
        """Unsaved lines: what open leases have used up to now and is not booked yet, newest lease first."""
        found = self.running_cuts()[:limit]
        cutter = self._cutter
        if cutter is None:
            return []
        return [line_of(span, cut, cutter, booked_month=first_of_month(cut.day)) for span, cut in found]

    def running_cuts(self) -> list[tuple[UsageSpan, Cut]]:
        """The same as spans and cuts, for sums. Same arithmetic, same prices as at booking; none under a search
        or a kind, which look at the ledger alone.
        """
        if self._cuts is None:
            self._cuts = self._cut_running()
        return self._cuts

    def _cut_running(self) -> list[tuple[UsageSpan, Cut]]:
        chosen, moment = self.filter, now()
        present = month_of(moment)
        # The month before has a running part until its last day is booked.
        if chosen.q or chosen.kind or chosen.month not in {None, present, previous_month(present)}:
            return []
        spans = list(
            UsageSpan.objects.filter(
                self._scope("user_id", "department_id"), ended_at=None, started_at__lt=moment
            )
            .select_related("request", "department", "user", "flavour")
            .only(*SPAN_COLUMNS)
            .order_by("-started_at", "-id")
        )
        if not spans:
            return []
        self._cutter = Cutter.load(spans, tree=self.policy.tree)
        return [
            (span, cut)
            for span in spans
            for cut in reversed(self._cutter.cuts(span, until=moment))
            if chosen.month in {None, first_of_month(cut.day)}
        ]

    def all(self) -> Iterator[LedgerEntry]:
        """Running lines, then booked ones; for files."""
        yield from self.running()
        yield from self.booked().select_related("span__request").iterator(chunk_size=2000)


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
