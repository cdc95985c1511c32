"""The change feed: which things changed since a process looked at the database last.

Triggers write one row (kind, key) for each changed thing, with the id of the changing transaction (migration 0004).
A reader works in one REPEATABLE READ transaction, so that all it reads is the database as of one snapshot S, and
remembers S. At its next look, with snapshot S', it reads the rows whose transaction is not visible in S. Why that is
neither too little nor wrong:

- A change that S' sees and S did not see was committed by a transaction that is visible in S' and not in S. Its feed
  row was written by the same transaction, so S' sees the row, and the row's `xid` is not visible in S: it is read.
  The order in which transactions commit plays no part, and no clock either.
- Rows of transactions below `cleaned_below` may be gone. They are all visible in S when xmin(S) ≥ `cleaned_below`;
  else the memory is not current and everything is read anew.
- `xid` is the top-level transaction's: what a rolled-back savepoint did took its feed rows along.
- Several processes read the same rows independently; nothing is consumed. Whoever holds the planner's lock is
  current after its look, whatever others did meanwhile.
- Where the row of the marks is missing, nobody knows what was dropped: a new one says that rows of all transactions
  before its own may be gone, and everything is read anew.
- Another server, a restored or emptied feed table, or a rewritten one is told by `identity`; TRUNCATE of a source
  writes the kind `all`. Either way everything is read anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from django.db import connection, transaction

LOOK = """
SELECT pg_current_snapshot()::text, pg_snapshot_xmin(pg_current_snapshot())::text::bigint,
       m.cleaned_below::text::bigint, m.entries_by::text,
       concat_ws('/', pg_postmaster_start_time(), (SELECT oid FROM pg_database WHERE datname = current_database()),
                 pg_relation_filenode('pool_planner_feed'::regclass))
  FROM pool_planner_mark m WHERE m.id = 1
"""
MARK = """
INSERT INTO pool_planner_mark (id, cleaned_below) VALUES (1, pg_current_xact_id()) ON CONFLICT (id) DO NOTHING
"""
SINCE = """
SELECT DISTINCT kind, key FROM pool_planner_feed
 WHERE xid >= pg_snapshot_xmin(%s::pg_snapshot) AND NOT pg_visible_in_snapshot(xid, %s::pg_snapshot)
"""
CLEAN = """
WITH mark AS (
  UPDATE pool_planner_mark SET cleaned_below = CASE
    WHEN cleaned_below >= pg_snapshot_xmax(pg_current_snapshot()) THEN %s::text::xid8  -- of another server
    ELSE greatest(cleaned_below, %s::text::xid8) END
   WHERE id = 1)
DELETE FROM pool_planner_feed
 WHERE xid < %s::text::xid8 OR xid >= pg_snapshot_xmax(pg_current_snapshot())
"""


@dataclass(frozen=True, slots=True)
class Look:
    """One look at the database: the snapshot with its xmin, and the marks. ``entries_by``: which planner wrote
    the queue entries last.
    """

    snapshot: str
    xmin: int
    cleaned_below: int
    entries_by: str | None
    identity: str

    def continues(self, before: Look | None) -> bool:
        """Whether what was read at ``before`` and the feed since give what is there now."""
        return before is not None and before.identity == self.identity and before.xmin >= self.cleaned_below


@contextmanager
def one_snapshot() -> Iterator[Look]:
    """A read-only transaction that sees one state of the database; not inside another transaction. A missing row
    of the marks is made before.
    """
    if connection.in_atomic_block:
        raise RuntimeError("a memory of the database must not be made of uncommitted changes")
    while True:
        with transaction.atomic():
            with connection.cursor() as cursor:
                cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
                cursor.execute(LOOK)
                row = cursor.fetchone()
            if row is not None:
                yield Look(*row)
                return
        with connection.cursor() as cursor:
            cursor.execute(MARK)


def changes_since(before: Look) -> dict[str, set[int]]:
    """Keys by kind of what changed; inside ``one_snapshot``."""
    found: dict[str, set[int]] = {}
    with connection.cursor() as cursor:
        cursor.execute(SINCE, [before.snapshot, before.snapshot])
        for kind, key in cursor.fetchall():
            found.setdefault(kind, set()).add(key)
    return found


def unseen(before: Look) -> bool:
    """Whether anything was committed since a look; outside ``one_snapshot``."""
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT EXISTS ({SINCE})", [before.snapshot, before.snapshot])
        return bool(cursor.fetchone()[0])


def feed_clean(below: Look) -> int:
    """Drop the rows that everybody who looked at ``below`` or later has seen, and those that came from another
    server with a restored database; returns how many.
    """
    with connection.cursor() as cursor:
        cursor.execute(CLEAN, [str(below.xmin)] * 3)
        return int(cursor.rowcount)


def entries_claim(owner: str) -> None:
    """Note who writes the queue entries, in the transaction of the writing."""
    with connection.cursor() as cursor:
        cursor.execute("UPDATE pool_planner_mark SET entries_by = %s WHERE id = 1", [owner])
