"""What open leases have used up to now and is not booked yet: one reading for all readers, kept for seconds.

Pages, files and the API show it beside the ledger. Cutting all open spans costs the same whoever asks, so a process
keeps the cuts of one moment for up to `KEPT`, as long as nothing they rest on has changed: the open spans and how
far they are booked, the prices, the names of departments. That is looked at on every use (`_mark`), so that a span
never counts as running once its lines stand in the ledger.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db import connection, transaction

from portal.kernel.clock import now
from quotas.engine.billing import Cut, Use, cut_use
from quotas.models import UsageSpan
from quotas.selectors.billing_time import billing_zone
from quotas.selectors.cutting import Names
from quotas.selectors.prices import PriceBook

KEPT = timedelta(seconds=5)
_MARK = """
SELECT s.n, s.ids, s.booked, r.n, r.last, r.versions, d.n, d.last, d.open
FROM (SELECT count(*) n, sum(id) ids, sum(extract(epoch FROM accrued_to) * (id % 1009 + 1)) booked
      FROM quotas_usagespan WHERE ended_at IS NULL) s,
     (SELECT count(*) n, max(id) last, sum(version) versions FROM quotas_pricerate) r,
     (SELECT count(*) n, max(id) last, count(*) FILTER (WHERE upper_inf(during)) open
      FROM accounts_departmentname) d
"""


@dataclass(frozen=True, slots=True)
class Mark:
    """What the running part rests on, as figures that change with it: open spans, prices, names; and where."""

    spans: tuple[Any, ...]
    prices: tuple[Any, ...]
    names: tuple[Any, ...]

    @classmethod
    def read(cls) -> Mark:
        """One query."""
        where = (connection.settings_dict["NAME"], billing_zone().key)
        with connection.cursor() as cursor:
            cursor.execute(_MARK)
            row = cursor.fetchone()
        return cls((*where, *row[:3]), (*where, *row[3:6]), (*where, *row[6:]))


@dataclass(frozen=True, slots=True)
class RunningCut:
    """A cut of an open span, with what filters and groups look at."""

    span_id: int
    department_id: int
    user_id: int
    flavour_id: int
    site_code: str
    cost_code: str
    cut: Cut

    @property
    def department_id_ref(self) -> int:
        """As the ledger calls it."""
        return self.department_id

    @property
    def user_id_ref(self) -> int:
        """As the ledger calls it."""
        return self.user_id


@dataclass(frozen=True, slots=True)
class Running:
    """All running cuts at one moment, newest lease first; within a lease the last cut first."""

    at: datetime
    cuts: tuple[RunningCut, ...]


@dataclass(frozen=True, slots=True)
class _Kept:
    mark: Mark
    running: Running
    book: PriceBook
    names: Names

    def good_for(self, mark: Mark) -> bool:
        return self.mark == mark and timedelta(0) <= now() - self.running.at < KEPT


_lock = threading.Lock()
_kept: _Kept | None = None


def running_now() -> Running:
    """The running part of everything, at most `KEPT` old, and never older than the last booking."""
    global _kept
    mark = Mark.read()
    kept = _kept
    if kept is not None and kept.good_for(mark):
        return kept.running
    with _lock:
        if _kept is None or not _kept.good_for(mark):
            _kept = _cut(now(), mark, _kept)
        return _kept.running


def _cut(moment: datetime, mark: Mark, kept: _Kept | None) -> _Kept:
    """Cut all open spans; prices and names are read again only when they changed."""
    book = kept.book if kept and kept.mark.prices == mark.prices else PriceBook.load()
    names = kept.names if kept and kept.mark.names == mark.names else Names.load(None)
    spans = list(
        UsageSpan.objects.filter(ended_at=None, started_at__lt=moment)
        .order_by("-started_at", "-id")
        .values_list(
            "id", "department_id", "user_id", "flavour_id", "site_code", "request__cost_code",
            "department__cost_center", "charge_milli", "started_at", "accrued_to",
        )
    )  # fmt: skip
    prices = {key: book.spans(*key) for key in {(row[3], row[4], row[1]) for row in spans}}
    zone = billing_zone()
    cuts: list[RunningCut] = []
    for pk, department, user, flavour, site, cost_code, cost_center, charge, started, accrued in spans:
        if moment <= max(accrued, started):
            continue
        found = cut_use(
            Use(started, moment, charge),
            prices=prices[flavour, site, department],
            owners=names.owners.get(department, ()),
            zone=zone,
            since=accrued,
        )
        cuts += [
            RunningCut(pk, department, user, flavour, site, cost_code or cost_center, cut)
            for cut in reversed(found)
        ]
    return _Kept(mark, Running(moment, tuple(cuts)), book, names)


@contextmanager
def one_look() -> Iterator[None]:
    """Read ledger and running part as of one moment: no booking in between counts twice or not at all.

    Inside an open transaction (a test, a service) its own view of the database holds.
    """
    if transaction.get_connection().in_atomic_block:
        yield
        return
    with transaction.atomic():
        with connection.cursor() as cursor:
            # A large month's sums are grouped in memory: half the time of doing it by parts on disk.
            cursor.execute(
                "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY; SET LOCAL work_mem = '32MB'"
            )
        yield
