"""Why each request waits, written down: the lines as wholes, and of the reasons only what changed.

A reason's figures (how much is free where) change for thousands of requests when one card is given out. So a cycle
writes first what is new or has another code or range, then the head of each line, then of the rest those that were
written longest ago, up to `FIGURES_A_CYCLE`: `planned_at` says as of when an entry is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from hashlib import blake2b
from typing import Any, NamedTuple

from django.db import connection, transaction

from pool.engine.model import Waiting
from pool.services.feed import entries_claim
from portal.kernel.units import from_ms
from quotas.selectors.trees import INSTALLATION

FIGURES_A_CYCLE = 2000
HEAD = 50
HISTORY = "history"
"""Basis of a range that rests on how long such requests waited."""
GRID_MS = 600_000
"""Ranges from history are told in steps of ten minutes: they are no more precise, and change less."""
UNKNOWN = 0
"""Signature of an entry that somebody may have changed or removed."""
WRITE = """
INSERT INTO pool_queueentry (request_id, reason, figures, start_from, start_to, basis, planned_at, signature)
SELECT r.id, x.reason, x.figures, x.start_from, x.start_to, x.basis, %s, x.signature
  FROM jsonb_to_recordset(%s::jsonb)
       AS x(id bigint, reason text, figures jsonb, start_from timestamptz, start_to timestamptz, basis text,
            signature bigint)
  JOIN quotas_capacityrequest r ON r.id = x.id AND r.state = 'queued'
 ORDER BY r.id FOR NO KEY UPDATE OF r
ON CONFLICT (request_id) DO UPDATE SET reason = EXCLUDED.reason, figures = EXCLUDED.figures,
       start_from = EXCLUDED.start_from, start_to = EXCLUDED.start_to, basis = EXCLUDED.basis,
       planned_at = EXCLUDED.planned_at, signature = EXCLUDED.signature
RETURNING request_id
"""
LINE = """
INSERT INTO pool_queueline (line, requests, planned_at) VALUES (%s, %s, %s)
ON CONFLICT (line) DO UPDATE SET requests = EXCLUDED.requests, planned_at = EXCLUDED.planned_at
"""


class Seen(NamedTuple):
    """All that an entry's signature is of, names aside, with the signature."""

    signature: int
    code: str
    figures: Mapping[str, Any]
    span: tuple[int, int, str] | None


@dataclass(slots=True)
class Known:
    """What a planner knows of the entries in the database: signature and time of writing by request, the lines as
    they were written last.
    """

    signatures: dict[int, int] = field(default_factory=dict)
    reasons: dict[int, Seen] = field(default_factory=dict)
    """What a signature was made of, where this process made it: equal reasons need no text."""
    names: Mapping[int, str] | None = None
    """The departments' names as they were told."""
    told: dict[int, tuple[str, datetime | None, datetime]] = field(default_factory=dict)
    lines: dict[str, list[int]] = field(default_factory=dict)


class Told(NamedTuple):
    """One entry to be. ``text``: its figures as JSON."""

    request_id: int
    seen: Seen
    text: str

    @property
    def promised(self) -> datetime | None:
        return _promised(self.seen.span)


def entries_known() -> Known:
    """Read back what somebody wrote."""
    known = Known()
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT request_id, signature, reason, start_from, basis, planned_at FROM pool_queueentry"
        )
        for request_id, signature, reason, start_from, basis, planned_at in cursor.fetchall():
            known.signatures[request_id] = signature
            known.told[request_id] = (reason, None if basis == HISTORY else start_from, planned_at)
        cursor.execute("SELECT line, requests FROM pool_queueline")
        known.lines = dict(cursor.fetchall())
    return known


def entries_write(
    *,
    waiting: Sequence[Waiting],
    known: Known,
    owner: str,
    uids: Mapping[int, str],
    names: Mapping[int, str],
    at: datetime,
    line_names: Mapping[int, str],
    everybody: bool,
    outlooks: Mapping[int, tuple[int, int]],
    budget: int = FIGURES_A_CYCLE,
) -> int:
    """Write what changed, and bring ``known`` up to date; returns the entries written.

    ``line_names``: the line of each request that waits. ``everybody`` False: ``waiting`` are some of them, which are
    put at the end of their lines; True: they are all, and entries of others go. A request that left the queue
    meanwhile gets no entry. ``outlooks``: ranges from history, told where the plan promises nothing.
    """
    lines = lines_of(waiting, line_names)
    if known.names is not names and known.names != names:
        known.reasons.clear()
    known.names = names
    chosen = _chosen(waiting, known, lines, outlooks, _Texts(uids, names), budget)
    if everybody:
        fresh = {line: lines.get(line, []) for line in {*known.lines, *lines}}
    else:
        fresh = dict(known.lines)
        for line, requests in lines.items():
            present = set(fresh.get(line, ()))
            fresh[line] = [*fresh.get(line, ()), *(pk for pk in requests if pk not in present)]
    with transaction.atomic():
        entries_claim(owner)
        gone = _gone(known, fresh) if everybody else []
        with connection.cursor() as cursor:
            if gone:
                cursor.execute("DELETE FROM pool_queueentry WHERE request_id = ANY(%s)", [gone])
            written = _write(cursor, chosen, at)
            for line, requests in fresh.items():
                if requests != known.lines.get(line):
                    cursor.execute(LINE, [line, requests, at])
    for request_id in gone:
        known.signatures.pop(request_id, None)
        known.reasons.pop(request_id, None)
        known.told.pop(request_id, None)
    for one in chosen:
        if one.request_id in written:
            known.signatures[one.request_id] = one.seen.signature
            known.reasons[one.request_id] = one.seen
            known.told[one.request_id] = (one.seen.code, one.promised, at)
    known.lines = fresh
    return len(written)


def _write(cursor: Any, chosen: Sequence[Told], at: datetime) -> set[int]:
    written: set[int] = set()
    for start in range(0, len(chosen), FIGURES_A_CYCLE):
        part = chosen[start : start + FIGURES_A_CYCLE]
        cursor.execute(WRITE, [at, f"[{','.join(_row(one) for one in part)}]"])
        written.update(row[0] for row in cursor.fetchall())
    return written


def _row(one: Told) -> str:
    """An entry as a JSON object; its figures are JSON already."""
    span = one.seen.span
    plain = {
        "id": one.request_id,
        "reason": one.seen.code,
        "start_from": from_ms(span[0]).isoformat() if span else None,
        "start_to": from_ms(span[1]).isoformat() if span else None,
        "basis": span[2] if span else "",
        "signature": one.seen.signature,
    }
    return f'{{"figures":{one.text},{json.dumps(plain)[1:]}'


def _gone(known: Known, lines: Mapping[str, list[int]]) -> list[int]:
    present = {request_id for requests in lines.values() for request_id in requests}
    return sorted(known.signatures.keys() - present)


def _chosen(
    waiting: Iterable[Waiting],
    known: Known,
    lines: Mapping[str, list[int]],
    outlooks: Mapping[int, tuple[int, int]],
    texts: _Texts,
    budget: int,
) -> list[Told]:
    """The entries that are to be written. Text is made for those alone, and where this process has not made it yet."""
    must: list[Told] = []
    may: list[tuple[Waiting, tuple[int, int, str] | None]] = []
    head = {pk for requests in lines.values() for pk in requests[:HEAD]}
    signatures, reasons, told = known.signatures, known.reasons, known.told
    for one in waiting:
        pk, code, figures, span = one.request_id, one.code, one.figures, _span(one, outlooks)
        signature, seen = signatures.get(pk), reasons.get(pk)
        if seen is not None and seen[0] == signature:
            if seen[1] == code and seen[3] == span and (seen[2] is figures or seen[2] == figures):
                continue
        elif signature is not None and signature != UNKNOWN:
            made = texts.told(one, span)
            if made.seen.signature == signature:
                reasons[pk] = made.seen
                continue
        before = told.get(pk)
        if before is None or before[0] != code or before[1] != _promised(span) or pk in head:
            must.append(texts.told(one, span))
        else:
            may.append((one, span))
    may.sort(key=lambda pair: (told[pair[0].request_id][2], pair[0].request_id))
    return must + [texts.told(*pair) for pair in may[: max(0, budget - len(must))]]


class _Texts:
    """Entries of a plan in people's words. Many requests share one reason object: its text is made once."""

    def __init__(self, uids: Mapping[int, str], names: Mapping[int, str]) -> None:
        self._uids, self._names = uids, names
        self._texts: dict[int, str] = {}
        self._signatures: dict[tuple[int, str, tuple[int, int, str] | None], int] = {}

    def told(self, one: Waiting, span: tuple[int, int, str] | None) -> Told:
        key = id(one.figures)
        text = self._texts.get(key)
        if text is None:
            plain = figures_for_people(dict(one.figures), self._uids, self._names)
            text = self._texts[key] = json.dumps(plain, sort_keys=True)
        signature = self._signatures.get((key, one.code, span))
        if signature is None:
            state = blake2b(f"{one.code}\x00{span}\x00{text}".encode(), digest_size=8)
            signature = int.from_bytes(state.digest(), "big", signed=True)
            self._signatures[key, one.code, span] = signature
        return Told(one.request_id, Seen(signature, one.code, one.figures, span), text)


def _promised(span: tuple[int, int, str] | None) -> datetime | None:
    """The beginning of a promised range; one from history moves all the time and is no news."""
    return None if span is None or span[2] == HISTORY else from_ms(span[0])


def _span(one: Waiting, outlooks: Mapping[int, tuple[int, int]]) -> tuple[int, int, str] | None:
    if one.estimate is not None:
        return one.estimate.earliest, one.estimate.latest, one.estimate.basis
    if one.request_id not in outlooks:
        return None
    earliest, latest = outlooks[one.request_id]
    return earliest // GRID_MS * GRID_MS, -(-latest // GRID_MS) * GRID_MS, HISTORY


def lines_of(waiting: Iterable[Waiting], line_names: Mapping[int, str]) -> dict[str, list[int]]:
    """Everybody who waits by line, in order of position."""
    lines: dict[str, list[tuple[int, int]]] = {}
    for one in waiting:
        lines.setdefault(line_names[one.request_id], []).append((one.position, one.request_id))
    return {line: [pk for _, pk in sorted(places)] for line, places in lines.items()}


def figures_for_people(
    figures: dict[str, Any], uids: Mapping[int, str], names: Mapping[int, str]
) -> dict[str, Any]:
    """Engine ids as names and uids: what is kept and shown never depends on row numbers."""
    if "level" in figures:
        level = figures["level"]
        figures["level"] = "" if level == INSTALLATION else names.get(level, str(level))
        figures["level_is_installation"] = level == INSTALLATION
    if "requests" in figures:
        figures["requests"] = [uids[pk] for pk in figures["requests"] if pk in uids]
    for key in ("start_at", "reserved_from"):
        if isinstance(figures.get(key), int):
            figures[key] = from_ms(figures[key]).isoformat()
    return figures
