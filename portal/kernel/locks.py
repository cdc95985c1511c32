"""Locks shared by all rooms. Order everywhere: usage rows root to leaf, request, allocation, GPU by id."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager

from django.db import connection, transaction


def _key(name: str) -> int:
    return zlib.crc32(name.encode()) - 2**31


@contextmanager
def try_advisory_lock(name: str) -> Iterator[bool]:
    """Session-level PostgreSQL advisory lock; yields whether it was got. A dead holder's lock frees itself."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_lock(%s, %s)", [0x6770, _key(name)])
        got = bool(cursor.fetchone()[0])
    try:
        yield got
    finally:
        if got:
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_advisory_unlock(%s, %s)", [0x6770, _key(name)])


def lock_in_transaction(name: str) -> None:
    """Wait for a transaction-level advisory lock; must run inside `transaction.atomic`."""
    if not transaction.get_connection().in_atomic_block:
        raise RuntimeError("lock_in_transaction needs a transaction")
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s, %s)", [0x6770, _key(name)])
