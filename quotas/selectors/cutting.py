"""From usage spans to ledger lines: reads prices and names for a batch of spans once, then cuts in memory.

Used for booking, and by pages for the part of open spans that is not booked yet: one arithmetic for both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from portal.accounts.models import DepartmentName
from portal.accounts.policy import DepartmentTree
from quotas.engine.billing import Cut, OwnerSpan, Use, cut_use
from quotas.models import UsageSpan
from quotas.selectors.prices import PriceBook, billing_zone


@dataclass(frozen=True, slots=True)
class Names:
    """What departments were called, as the cuts need it."""

    owners: dict[int, list[OwnerSpan]]
    paths: dict[int, str]
    present: dict[int, str]

    @classmethod
    def load(cls, department_ids: Iterable[int]) -> Names:
        """Name rows of some departments; their present paths stand in where no row covers a time."""
        wanted = set(department_ids)
        owners: dict[int, list[OwnerSpan]] = defaultdict(list)
        paths: dict[int, str] = {}
        for row in DepartmentName.objects.filter(department_id__in=wanted).order_by("during"):
            paths[row.pk] = row.path
            owners[row.department_id].append(
                OwnerSpan(row.department_id, row.pk, row.during.lower, row.during.upper)
            )
        tree = DepartmentTree.load()
        return cls(dict(owners), paths, {pk: tree.path(pk) for pk in wanted if pk in tree.rows})

    def path(self, department_id: int, name_id: int | str | None) -> str:
        """The path at the time of a cut."""
        if isinstance(name_id, int) and name_id in self.paths:
            return self.paths[name_id]
        return self.present.get(department_id, "")


@dataclass(frozen=True, slots=True)
class Cutter:
    """Cuts the usage spans of one batch. Load it after the spans were locked."""

    book: PriceBook
    names: Names

    @classmethod
    def load(cls, spans: Sequence[UsageSpan], *, since: datetime | None = None) -> Cutter:
        """Read what cutting these spans needs: three queries, whatever their number."""
        first = since or min((span.accrued_to for span in spans), default=None)
        return cls(
            book=PriceBook.load({span.flavour_id for span in spans}, since=first),
            names=Names.load(span.department_id for span in spans),
        )

    def cuts(self, span: UsageSpan, *, until: datetime, since: datetime | None = None) -> list[Cut]:
        """Lines of a span from `since` (default: what is booked) to `until`, in time order."""
        start = span.accrued_to if since is None else since
        if until <= max(start, span.started_at):
            return []
        return cut_use(
            Use(span.started_at, until, span.charge_milli),
            prices=self.book.spans(span.flavour_id, span.site_code),
            owners=self.names.owners.get(span.department_id, ()),
            zone=billing_zone(),
            since=start,
        )
