"""Keep the history of the cards' states: in service, down, under maintenance, or gone.

A sweep compares what the pool says now with the open row of each card. It may run at any time and twice; a change is
dated to the moment that the pool noted for it, so that a late sweep loses nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from django.db import connection, transaction

from monitoring.models import CardSpan
from pool.models import Gpu, Node
from portal.kernel.clock import now

_LOCK = 7_301_005
GONE = frozenset({Gpu.Condition.RETIRED})
BROKEN = frozenset({Gpu.Condition.FAULT, Gpu.Condition.VANISHED})


@dataclass(frozen=True, slots=True)
class Seen:
    """What the pool says of a card now; `state` None: it is no part of the pool. `since`: when that began, as far as
    the pool knows."""

    gpu_id: int
    state: str | None
    since: datetime | None
    flavour_id: int | None
    site_code: str
    node_name: str
    created_at: datetime

    def differs(self, row: CardSpan) -> bool:
        """Whether the open row tells something else."""
        return (row.state, row.flavour_id, row.site_code, row.node_name) != (
            self.state,
            self.flavour_id,
            self.site_code,
            self.node_name,
        )


def card_states_sweep() -> int:
    """Bring the rows in line with the pool; returns rows begun or ended. A second run at once does nothing."""
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_try_advisory_xact_lock(%s)", [_LOCK])
            if not cursor.fetchone()[0]:
                return 0
        open_rows = {row.gpu_id: row for row in CardSpan.objects.filter(ended_at=None)}
        moment = now()
        ended: list[CardSpan] = []
        begun: list[CardSpan] = []
        for seen in _look():
            row = open_rows.get(seen.gpu_id)
            if row is None:
                begun += _first(seen, moment)
            elif seen.state is None or seen.differs(row):
                at = _when(seen, row, moment)
                row.ended_at = at
                ended.append(row)
                if seen.state is not None:
                    begun.append(_row(seen, seen.state, at))
        CardSpan.objects.bulk_update(ended, ["ended_at"], batch_size=1000)
        CardSpan.objects.bulk_create(begun, batch_size=1000)
        return len(ended) + len(begun)


def _look() -> Iterable[Seen]:
    rows = Gpu.objects.order_by("id").values_list(
        "id", "condition", "condition_since", "flavour_id", "node__cluster__site__code", "node__name", "node__health",
        "node__health_since", "node__schedulable", "node__schedulable_since", "node__test_only", "created_at",
    )  # fmt: skip
    for pk, condition, c_since, flavour, site, node, health, h_since, plan, p_since, test, created in rows:
        state: str | None = CardSpan.State.OK
        since = None
        if test or condition in GONE or plan == Node.Schedulable.RETIRED:
            state, since = None, p_since if plan == Node.Schedulable.RETIRED else c_since
        elif plan == Node.Schedulable.MAINTENANCE:
            state, since = CardSpan.State.MAINTENANCE, p_since
        elif condition in BROKEN:
            state, since = CardSpan.State.DOWN, c_since
        elif health == Node.Health.LOST:
            state, since = CardSpan.State.DOWN, h_since
        else:
            since = max((s for s in (c_since, h_since, p_since) if s is not None), default=None)
        yield Seen(pk, state, since, flavour, site, node, created)


def _row(seen: Seen, state: str, start: datetime, end: datetime | None = None) -> CardSpan:
    return CardSpan(
        gpu_id=seen.gpu_id,
        state=state,
        flavour_id=seen.flavour_id,
        site_code=seen.site_code,
        node_name=seen.node_name,
        started_at=start,
        ended_at=end,
    )


def _first(seen: Seen, moment: datetime) -> list[CardSpan]:
    """A card without an open row: new, or back after it had gone. A new one that is not well was well before."""
    if seen.state is None:
        return []
    last = (
        CardSpan.objects.filter(gpu_id=seen.gpu_id)
        .order_by("-ended_at")
        .values_list("ended_at", flat=True)
        .first()
    )
    start = min(moment, max(seen.created_at, last) if last else seen.created_at)
    if last is not None or seen.state == CardSpan.State.OK or seen.since is None or seen.since <= start:
        return [_row(seen, seen.state, moment if last is not None else start)]
    since = min(seen.since, moment)
    return [_row(seen, CardSpan.State.OK, start, since), _row(seen, seen.state, since)]


def _when(seen: Seen, row: CardSpan, moment: datetime) -> datetime:
    """When a change happened: as the pool noted it, but never before the row that it ends began."""
    if seen.since is None or not row.started_at < seen.since <= moment:
        return moment
    return seen.since
