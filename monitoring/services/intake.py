"""From one message of a node to a batch: rows checked one by one, foreign and impossible ones refused and told."""

from __future__ import annotations

from collections import Counter
from typing import Any

import structlog
from django.utils.translation import gettext_noop

from monitoring.engine.samples import (
    RowRefused,
    Sample,
    parse_host,
    parse_row,
    parse_time,
    skew_to_take_off,
)
from monitoring.selectors.identity import node_identity
from monitoring.services.ingest import Batch, Row
from monitoring.services.partitions import oldest_kept
from pool.models import Gpu, Node
from portal.kernel.clock import now
from portal.kernel.units import from_ms, to_ms
from portal.ops.models import Incident
from portal.ops.services import incident_open

log = structlog.get_logger(__name__)
MAX_ROWS = 20_000
LEAN_FROM = 64
_told: dict[tuple[int, str], float] = {}
TELL_AGAIN_S = 600

REFUSALS = {
    "bad_row": gettext_noop("a row has not the agreed shape"),
    "bad_uuid": gettext_noop("the identity is not a UUID"),
    "bad_time": gettext_noop("the time cannot be read"),
    "future": gettext_noop("the time lies ahead: the node's clock is wrong"),
    "too_old": gettext_noop("the day is no longer kept"),
    "foreign": gettext_noop("the card does not belong to this node"),
    "unknown": gettext_noop("no card or slice of that identity is known"),
}


def batch_of(*, node_id: int, message: dict[str, Any]) -> tuple[Batch, Counter[str]]:
    """The batch of one samples message and how many rows were refused, by code.

    A refused row never holds the others back; the message is acknowledged, since sending it again would not help.
    """
    rows = message.get("rows")
    rows = rows if isinstance(rows, list) else []
    batch = Batch(node_id=node_id, host=parse_host(message.get("host")))
    now_ms, oldest_ms = to_ms(now()), to_ms(oldest_kept())
    ahead = skew_to_take_off(node_identity(node_id).skew_ms, _newest(rows), now_ms)
    between = (now_ms + ahead, oldest_ms + ahead)
    last = _last_of_each(rows[:MAX_ROWS]) if len(rows) > LEAN_FROM else None
    samples, refused = _parsed(rows[:MAX_ROWS], between, last)
    if refused and last is not None:  # perhaps it was a last row: nothing is left out then
        samples, refused = _parsed(rows[:MAX_ROWS], between, None)
    for sample in samples:
        sample.at_ms -= ahead
    if len(rows) > MAX_ROWS:
        refused["bad_row"] += len(rows) - MAX_ROWS
    identity = node_identity(node_id, need={s.mig_uuid or s.gpu_uuid for s in samples})
    strangers: set[str] = set()
    for sample in samples:
        place = (
            identity.slots.get(sample.mig_uuid)
            if sample.mig_uuid
            else (identity.gpus.get(sample.gpu_uuid), 0)
        )
        if place is None or place[0] is None:
            strangers.add(sample.gpu_uuid)
            refused["unknown"] += 1
            continue
        batch.rows.append(Row(place[0], place[1], sample))
    if strangers - identity.gpus.keys():
        refused.update(_name_foreign(node_id, strangers - identity.gpus.keys(), refused))
    if batch.rows:
        batch.at = from_ms(max(row.sample.at_ms for row in batch.rows))
    elif isinstance(message.get("at"), str):
        try:
            batch.at = from_ms(min(now_ms, parse_time(message["at"])))
        except RowRefused:
            batch.at = None
    if refused:
        _tell(node_id, refused)
    return batch, +refused


def _parsed(
    rows: list[Any], between: tuple[int, int], last: set[int] | None
) -> tuple[list[Sample], Counter[str]]:
    """Samples of the rows that can be trusted, and the others by code; `last`: rows to be read in full (None: all)."""
    samples: list[Sample] = []
    refused = Counter[str]()
    for number, raw in enumerate(rows):
        lean = last is not None and number not in last
        try:
            samples.append(parse_row(raw, now_ms=between[0], oldest_ms=between[1], lean=lean))
        except RowRefused as error:
            refused[error.code] += 1
    return samples, refused


def _last_of_each(rows: list[Any]) -> set[int]:
    """Numbers of the rows that are the last in time of their card or slice."""
    last: dict[tuple[Any, Any], tuple[int, int]] = {}
    for number, raw in enumerate(rows):
        try:
            key, at = (raw[0], raw[1]), parse_time(raw[2])
            if key not in last or last[key][0] <= at:
                last[key] = (at, number)
        except (RowRefused, IndexError, TypeError, KeyError):
            continue
    return {number for _, number in last.values()}


def _newest(rows: list[Any]) -> int | None:
    """The time of the last row (agents send rows in order of time), where it can be read."""
    try:
        return parse_time(rows[-1][2])
    except (RowRefused, IndexError, TypeError, KeyError):
        return None


def _name_foreign(node_id: int, uuids: set[str], refused: Counter[str]) -> Counter[str]:
    """Cards that are known, but on another node: their rows count as foreign, not as unknown."""
    elsewhere = Gpu.objects.filter(uuid__in=uuids).exclude(node_id=node_id).count()
    moved = min(elsewhere, refused["unknown"])
    return Counter({"foreign": moved, "unknown": -moved}) if moved else Counter()


def _tell(node_id: int, refused: Counter[str]) -> None:
    """Log each refusal, and open one incident a node and code, at most every ten minutes."""
    moment = now().timestamp()
    for code, count in refused.items():
        if count <= 0:
            continue
        key = (node_id, code)
        if moment - _told.get(key, 0) < TELL_AGAIN_S:
            continue
        _told[key] = moment
        log.warning("samples_refused", node=node_id, code=code, rows=count)
        node = Node.objects.filter(pk=node_id).first()
        incident_open(
            kind="telemetry_refused",
            dedupe_key=f"telemetry_refused:{node_id}:{code}",
            severity=Incident.Severity.WARNING,
            subject=node,
            facts={"code": code, "rows": count},
        )
