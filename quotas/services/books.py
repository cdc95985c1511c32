"""The books: which month takes a booking, and the lock that keeps a month from closing under one."""

from __future__ import annotations

from datetime import date

from django.db import connection, transaction

from portal.kernel.clock import now
from quotas.models import LedgerMonth
from quotas.selectors.billing_time import first_of_month, month_of, next_month

_BOOKS = (0x6770, 0x626F)


def _take(function: str) -> None:
    if not transaction.get_connection().in_atomic_block:
        raise RuntimeError("the books are locked inside a transaction")
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {function}(%s, %s)", list(_BOOKS))


def books_for_booking() -> Books:
    """Hold the books open until the transaction ends (shared: bookings do not wait for one another)."""
    _take("pg_advisory_xact_lock_shared")
    return Books()


def books_for_closing() -> None:
    """Wait for running bookings, and keep new ones out until the transaction ends."""
    _take("pg_advisory_xact_lock")


class Books:
    """Closed months, read once under the lock."""

    def __init__(self) -> None:
        self._closed = set(LedgerMonth.objects.exclude(closed_at=None).values_list("month", flat=True))
        self._present = month_of(now())

    def month_for(self, day: date) -> date:
        """In whose books a slice of this local day stands: its own month, or once that is closed the
        present one (or the first open one after it, when the present one is closed too).
        """
        month = first_of_month(day)
        if month not in self._closed:
            return month
        month = max(month, self._present)
        while month in self._closed:
            month = next_month(month)
        return month
