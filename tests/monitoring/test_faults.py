"""The database or Redis away while samples come: nothing acknowledged that is not stored, nothing stored twice."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest
import redis
from asgiref.sync import sync_to_async
from django.db import IntegrityError, OperationalError, connection

from monitoring.live import ingest_sink
from monitoring.live.ingest_sink import SinkFull, samples_sink
from monitoring.models import GpuState
from monitoring.services import bus, ingest
from portal.kernel.clock import now
from tests.monitoring import builders as b

pytestmark = pytest.mark.usefixtures("committed")


@sync_to_async
def scene() -> tuple[Any, list[Any]]:
    node = b.node("fault-01", 2)
    return node, list(node.gpus.all())


@sync_to_async
def stored() -> int:
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM monitoring_gpusample")
        return int(cursor.fetchone()[0])


async def test_a_database_that_was_away_gets_the_batch_once_it_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node, cards = await scene()
    real, calls = ingest_sink.samples_write, []

    def broken(**more: Any) -> int:
        calls.append(1)
        if len(calls) < 3:
            raise OperationalError("the server closed the connection")
        return real(**more)

    monkeypatch.setattr(ingest_sink, "samples_write", broken)
    monkeypatch.setattr(ingest_sink, "RETRY_S", (0.05, 0.05, 0.05))
    assert await samples_sink(node.pk, b.message(b.row(cards[0]))) == {}
    assert len(calls) == 3 and await stored() == 1


async def test_a_connection_killed_under_load_loses_nothing() -> None:
    node, cards = await scene()
    at = now()

    @sync_to_async
    def kill() -> None:
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() "
                "AND pid <> pg_backend_pid()"
            )

    jobs = [asyncio.ensure_future(samples_sink(node.pk, b.message(b.row(card, at)))) for card in cards]
    await asyncio.sleep(0.26)
    await kill()
    done = await asyncio.gather(*jobs, return_exceptions=True)
    # Whoever was not acknowledged sends again; either way each sample is there once.
    for card, outcome in zip(cards, done, strict=True):
        if isinstance(outcome, Exception):
            await samples_sink(node.pk, b.message(b.row(card, at)))
    assert await stored() == 2


async def test_a_bad_batch_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    node, cards = await scene()
    real = ingest_sink.samples_write

    def picky(*, batches: Any, **more: Any) -> int:
        if any(row.gpu_id == cards[1].pk for batch in batches for row in batch.rows):
            raise IntegrityError("no such card")
        return real(batches=batches, **more)

    monkeypatch.setattr(ingest_sink, "samples_write", picky)
    jobs = [samples_sink(node.pk, b.message(b.row(card))) for card in cards]
    good, bad = await asyncio.gather(*jobs, return_exceptions=True)
    assert good == {} and isinstance(bad, IntegrityError)
    assert await stored() == 1


async def test_a_message_that_cannot_be_checked_fails_alone_and_small_groups_lose_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node, cards = await scene()
    real = ingest_sink.batch_of

    def picky(*, node_id: int, message: dict[str, Any]) -> Any:
        if message["seq"] == 2:
            raise KeyError("nobody foresaw this")
        return real(node_id=node_id, message=message)

    monkeypatch.setattr(ingest_sink, "batch_of", picky)
    monkeypatch.setattr(ingest_sink, "GROUP_ROWS", 2)
    at = now()
    rows = [b.row(card, at - timedelta(seconds=10 * n)) for card in cards for n in range(3)]
    jobs = [samples_sink(node.pk, b.message(row) | {"seq": n}) for n, row in enumerate(rows)]
    done = await asyncio.gather(*jobs, return_exceptions=True)
    assert isinstance(done.pop(2), KeyError) and done == [{}] * 5
    assert await stored() == 5


async def test_a_full_buffer_refuses_instead_of_growing(monkeypatch: pytest.MonkeyPatch) -> None:
    node, cards = await scene()
    monkeypatch.setattr(ingest_sink, "MAX_WAITING_ROWS", -1)
    with pytest.raises(SinkFull):
        await samples_sink(node.pk, b.message(b.row(cards[0])))


async def test_without_redis_samples_are_stored_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    node, cards = await scene()
    monkeypatch.setattr(
        bus, "_client", lambda: redis.Redis(host="127.0.0.1", port=1, socket_connect_timeout=0.2)
    )
    assert await samples_sink(node.pk, b.message(b.row(cards[0], util=55))) == {}
    assert await stored() == 1
    assert (await GpuState.objects.aget()).util_pm == 550
    assert ingest.HOLE.total_seconds() == 300
