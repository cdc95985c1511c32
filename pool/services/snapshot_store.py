"""Snapshots of decisions, kept so that a decision can be replayed: compressed, and as differences where possible.

A planner keeps a chain: the whole snapshot first, then for each cycle that decided something what differs from the one
before. After `CHAIN` differences, or when they weigh as much as the whole, it begins anew. One line an item: section
and key, a tab, the item's canonical text; no text means that the item went.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from datetime import timedelta

from django.conf import settings
from django.db import IntegrityError, connection, transaction
from django.utils.translation import gettext as _

from pool.engine.canonical import MODULUS, Key, Print, digest, snapshot_of, whole
from pool.engine.model import Snapshot
from pool.models import SchedulerCycle, SchedulerSnapshot
from portal.kernel.clock import now
from portal.kernel.errors import Conflict

CHAIN = 200
LEVEL = 1


class SnapshotStore:
    """The chain of one planner, with the hash of the snapshot that changes under it."""

    def __init__(self) -> None:
        self._print = Print()
        self._last: SchedulerSnapshot | None = None
        self._base_bytes = 0
        self._chain_bytes = 0

    def keep(self, snapshot: Snapshot) -> SchedulerSnapshot:
        """Store it, unless it is the one stored last; the row bears its hash."""
        digest_now = self._print.take(snapshot)
        last = self._last
        if last is not None and last.hash == digest_now:
            return last
        if last is not None and last.depth < CHAIN and self._chain_bytes < self._base_bytes:
            try:
                with transaction.atomic():
                    return self._add(last, digest_now)
            except IntegrityError:
                self._last = None  # the chain was removed meanwhile
        return self._begin(digest_now)

    def _begin(self, digest_now: str) -> SchedulerSnapshot:
        raw = _lines(self._print.texts.items())
        row = SchedulerSnapshot.objects.create(
            hash=digest_now, data=zlib.compress(raw, LEVEL), raw_bytes=len(raw), created_at=now()
        )
        self._base_bytes, self._chain_bytes = len(row.data), 0
        return self._stored(row)

    def _add(self, last: SchedulerSnapshot, digest_now: str) -> SchedulerSnapshot:
        texts = self._print.texts
        changed = [(key, texts[key]) for key in self._print.changed]
        raw = _lines([*changed, *((key, b"") for key in self._print.gone)])
        row = SchedulerSnapshot.objects.create(
            hash=digest_now,
            parent=last,
            base_id=last.base_id or last.pk,
            depth=last.depth + 1,
            data=zlib.compress(raw, LEVEL),
            raw_bytes=len(raw),
            created_at=now(),
        )
        self._chain_bytes += len(row.data)
        return self._stored(row)

    def _stored(self, row: SchedulerSnapshot) -> SchedulerSnapshot:
        self._print.changed.clear()
        self._print.gone.clear()
        self._last = row
        return row


def snapshot_stored(row: SchedulerSnapshot) -> Snapshot:
    """The snapshot of a row; Conflict `snapshot_damaged` where what was kept does not give its hash."""
    base_id = row.base_id or row.pk
    chain = SchedulerSnapshot.objects.filter(base_id=base_id, depth__lte=row.depth).order_by("depth")
    parts: dict[Key, bytes] = {}
    for stored in [SchedulerSnapshot.objects.get(pk=base_id), *chain] if row.base_id else [row]:
        for line in zlib.decompress(bytes(stored.data)).splitlines():
            head, _tab, text = line.partition(b"\t")
            section, key = json.loads(head)
            if text:
                parts[section, key] = text
            else:
                parts.pop((section, key), None)
    if whole(sum(digest(key, text) for key, text in parts.items()) % MODULUS) != row.hash:
        raise Conflict(
            code="snapshot_damaged", detail=_("What was kept of this decision is not what it saw.")
        )
    return snapshot_of(parts.items())


def snapshots_tidy() -> int:
    """Remove chains that nothing younger than the retention hangs on; returns the snapshots removed.

    Their decisions stay readable, with the hash of what they saw, but can no longer be replayed.
    """
    before = now() - timedelta(days=settings.GPUPOOL_DECISIONS_DAYS)
    bases = SchedulerSnapshot.objects.filter(base=None, created_at__lt=before).exclude(
        chain__created_at__gte=before
    )
    removed = 0
    for base_id in list(bases.values_list("pk", flat=True)):
        with transaction.atomic():
            chain = SchedulerSnapshot.objects.filter(pk=base_id) | SchedulerSnapshot.objects.filter(
                base_id=base_id
            )
            ids = list(chain.values_list("pk", flat=True))
            SchedulerCycle.objects.filter(snapshot_id__in=ids).update(snapshot=None)
            with connection.cursor() as cursor:
                cursor.execute("DELETE FROM pool_schedulersnapshot WHERE id = ANY(%s)", [ids])
            removed += len(ids)
    return removed


def _lines(parts: Iterable[tuple[Key, bytes]]) -> bytes:
    return b"\n".join(json.dumps(key).encode() + b"\t" + text for key, text in parts)
