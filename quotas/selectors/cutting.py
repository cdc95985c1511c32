"""From usage spans to ledger lines: reads prices and names for a batch of spans once, then cuts in memory.

Used for booking, and by pages for the part of open spans that is not booked yet: one arithmetic for both.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date, datetime

from django.conf import settings

from portal.accounts.models import DepartmentName
from portal.accounts.policy import DepartmentTree
from portal.kernel.clock import now
from portal.kernel.ids import uuid7
from quotas.engine.billing import Cut, OwnerSpan, Use, cut_use
from quotas.models import LedgerEntry, UsageSpan
from quotas.selectors.billing_time import billing_zone
from quotas.selectors.prices import PriceBook


@dataclass(frozen=True, slots=True)
class Names:
    """What departments were called, as the cuts need it."""

    owners: dict[int, list[OwnerSpan]]
    paths: dict[int, str]
    present: dict[int, str]

    @classmethod
    def load(cls, department_ids: Iterable[int] | None, tree: DepartmentTree | None = None) -> Names:
        """Name rows of some departments (None: of all); their present paths stand in where no row covers a time."""
        query = DepartmentName.objects.order_by("during")
        wanted = None if department_ids is None else set(department_ids)
        owners: dict[int, list[OwnerSpan]] = defaultdict(list)
        paths: dict[int, str] = {}
        for row in query if wanted is None else query.filter(department_id__in=wanted):
            paths[row.pk] = row.path
            owners[row.department_id].append(
                OwnerSpan(row.department_id, row.pk, row.during.lower, row.during.upper)
            )
        if wanted is None or (tree is None and wanted <= set(owners)):
            return cls(dict(owners), paths, {})
        tree = tree or DepartmentTree.load()
        return cls(dict(owners), paths, {pk: tree.path(pk) for pk in wanted if pk in tree.rows})

    def path(self, department_id: int, name_id: int | str | None) -> str:
        """The path at the time of a cut."""
        if isinstance(name_id, int) and name_id in self.paths:
            return self.paths[name_id]
        if department_id not in self.present:  # a time before the first name: rare, so read only then
            self.present[department_id] = DepartmentTree.load().path(department_id)
        return self.present[department_id]


@dataclass(frozen=True, slots=True)
class Cutter:
    """Cuts the usage spans of one batch. Load it after the spans were locked."""

    book: PriceBook
    names: Names

    @classmethod
    def load(
        cls, spans: Sequence[UsageSpan], *, since: datetime | None = None, tree: DepartmentTree | None = None
    ) -> Cutter:
        """Read what cutting these spans needs: two or three queries, whatever their number."""
        first = since or min((span.accrued_to for span in spans), default=None)
        return cls(
            book=PriceBook.load({span.flavour_id for span in spans}, since=first),
            names=Names.load((span.department_id for span in spans), tree),
        )

    def cuts(self, span: UsageSpan, *, until: datetime, since: datetime | None = None) -> list[Cut]:
        """Lines of a span from `since` (default: what is booked) to `until`, in time order."""
        start = span.accrued_to if since is None else since
        if until <= max(start, span.started_at):
            return []
        return cut_use(
            Use(span.started_at, until, span.charge_milli),
            prices=self.book.spans(span.flavour_id, span.site_code, span.department_id),
            owners=self.names.owners.get(span.department_id, ()),
            zone=billing_zone(),
            since=start,
        )


def line_of(span: UsageSpan, cut: Cut, names: Names, *, booked_month: date) -> LedgerEntry:
    """The (unsaved) ledger line of one cut; `span` comes with its related rows."""
    return LedgerEntry(
        uid=uuid7(),
        kind=LedgerEntry.Kind.USAGE,
        span=span,
        request_id_ref=span.request_id,
        department_id_ref=span.department_id,
        department_path=names.path(span.department_id, cut.department),
        user_id_ref=span.user_id,
        user_name=span.user.get_full_name(),
        cost_code=span.request.cost_code or span.department.cost_center,
        flavour_id=span.flavour_id,
        flavour_name=span.flavour.name,
        site_code=span.site_code,
        node_name=span.node_name,
        gpu_label=span.gpu_label,
        charge_milli=span.charge_milli,
        starts_at=cut.start,
        ends_at=cut.end,
        local_day=cut.day,
        gpu_ms=cut.gpu_ms,
        micro_per_gpu_hour=cut.price.micro_per_gpu_hour if cut.price else 0,
        rate_uid=uuid.UUID(str(cut.price.version)) if cut.price else None,
        amount_micro=cut.amount_micro,
        currency=settings.GPUPOOL_CURRENCY,
        booked_at=now(),
        booked_month=booked_month,
    )
