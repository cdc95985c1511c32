"""What a test committed goes again by deleting its few rows, not by cutting every table anew.

Django ends each test that commits with a TRUNCATE of all tables, a hundred new files with their indexes, and makes
all content types and permissions again: far longer than most of those tests themselves. A test writes some rows to
some tables. They are deleted in one transaction, under a lock that waits for whoever still writes (the page or the
worker that the test left running), so that nothing is left for the next test. Content types and permissions stay as
they are. After a test with many rows, where deleting would be the slower way, Django's own is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.db import OperationalError, connection, transaction
from django.test import TransactionTestCase

MANY = 500  # rows of one table: each deleted row is looked for in every table that may refer to it
STAY = {"auth_permission", "django_content_type"}
TRIES = 5  # a deadlock with who still writes ends one of the two

_tables: list[str] = []
_insert_only: set[str] = set()


def _look() -> None:
    """Learn the tables once; the audit trail and the ledger refuse DELETE, and nothing refers to them."""
    known = connection.introspection.django_table_names(only_existing=True, include_views=False)
    _tables[:] = sorted(set(known) - STAY)
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT t.tgrelid::regclass::text FROM pg_trigger t JOIN pg_proc p ON p.oid = t.tgfoid"
            " WHERE p.proname = 'gpupool_insert_only'"
        )
        _insert_only.update(name for (name,) in cursor.fetchall())


def emptied() -> bool:
    """Delete all rows of all tables; False, and nothing done, where there are many."""
    if not _tables:
        _look()
    counts = " UNION ALL ".join(
        f"SELECT '{name}' AS name, (SELECT count(*) FROM (SELECT FROM \"{name}\" LIMIT {MANY + 1}) AS few) AS n"
        for name in _tables
    )
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("LOCK TABLE " + ", ".join(f'"{name}"' for name in _tables) + " IN EXCLUSIVE MODE")
        cursor.execute(f"SELECT name, n FROM ({counts}) AS all_of_them WHERE n > 0")
        found = dict(cursor.fetchall())
        if any(n > MANY for name, n in found.items() if name not in _insert_only):
            return False
        for name in found:
            cursor.execute(f'TRUNCATE "{name}"' if name in _insert_only else f'DELETE FROM "{name}"')
        cursor.execute("INSERT INTO pool_planner_feed (kind, key) VALUES ('all', 0)")  # as TRUNCATE says it
    return True


def _end(djangos_own: Callable[[Any], None], case: TransactionTestCase) -> None:
    if case.available_apps is not None or case.serialized_rollback or len(case._databases_names()) != 1:
        return djangos_own(case)
    for attempt in range(TRIES):
        try:
            if emptied():
                return None
            break
        except OperationalError:
            if attempt == TRIES - 1:
                raise
    return djangos_own(case)


def install() -> None:
    """Have every test that commits end in this way."""
    djangos_own = TransactionTestCase._fixture_teardown
    TransactionTestCase._fixture_teardown = lambda case: _end(djangos_own, case)
