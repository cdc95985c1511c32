"""Where the agent socket hands its samples over: buffered per process, committed in groups every 250 ms.

`samples_sink` returns once its batch is committed, so the agent's acknowledgement means *durable*. While the
database is away batches wait (the agent is not acknowledged and keeps its spool) and are written when it is back;
past a bound new batches are refused at once, which the agent meets in the same way.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import structlog
from django.db import DatabaseError, InterfaceError, connections

from monitoring.services.ingest import Batch, samples_write
from monitoring.services.intake import batch_of

log = structlog.get_logger(__name__)
GROUP_S = 0.25
MAX_WAITING_ROWS = 200_000
RETRY_S = (0.5, 1.0, 2.0, 4.0, 8.0)


class SinkFull(RuntimeError):
    """Too much waits to be written: do not acknowledge, the agent sends it again."""


class Sink:
    """The buffer of one process and the one thread that writes it (with a database connection of its own)."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Batch, asyncio.Future[None]]] = []
        self.rows = 0
        self.task: asyncio.Task[None] | None = None
        self.loop = asyncio.get_running_loop()
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ingest")

    async def put(self, node_id: int, message: dict[str, Any]) -> dict[str, int]:
        """Check, buffer, and wait for the commit; returns what was refused, by code."""
        if self.rows > MAX_WAITING_ROWS:
            raise SinkFull("telemetry buffer is full")
        alone = self.task is None or self.task.done()
        batch, refused = await self.loop.run_in_executor(self.thread, _checked, node_id, message, alone)
        if batch.rows or batch.host is not None:
            done: asyncio.Future[None] = self.loop.create_future()
            self.waiting.append((batch, done))
            self.rows += len(batch.rows)
            if self.task is None or self.task.done():
                self.task = self.loop.create_task(self._drain())
            await done
        return dict(refused)

    async def _drain(self) -> None:
        while self.waiting:
            await self._write_waiting()
            # While this gives the connection back more may come: it is looked at once more before the task ends.
            await self.loop.run_in_executor(self.thread, connections.close_all)

    async def _write_waiting(self) -> None:
        while self.waiting:
            await asyncio.sleep(GROUP_S)
            group, self.waiting = self.waiting, []
            self.rows -= sum(len(batch.rows) for batch, _ in group)
            error = await self._write([batch for batch, _ in group])
            if error is not None and len(group) > 1:
                # One bad batch must not fail the others: each on its own.
                for batch, done in group:
                    _settle(done, await self._write([batch]))
                continue
            for _, done in group:
                _settle(done, error)

    async def _write(self, batches: list[Batch]) -> Exception | None:
        for pause in (*RETRY_S, None):
            try:
                await self.loop.run_in_executor(self.thread, _written, batches)
                return None
            except (DatabaseError, InterfaceError) as error:
                log.warning("ingest_failed", error=type(error).__name__, batches=len(batches))
                if pause is None or not _worth_a_retry(error):
                    return error
                await asyncio.sleep(pause)
        return None


def _settle(done: asyncio.Future[None], error: Exception | None) -> None:
    if done.done():  # the socket went away meanwhile
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)


def _worth_a_retry(error: Exception) -> bool:
    from django.db import InternalError, OperationalError

    return isinstance(error, OperationalError | InterfaceError | InternalError)


def _checked(node_id: int, message: dict[str, Any], alone: bool) -> tuple[Batch, Counter[str]]:
    """`alone`: nothing is being written, so that a connection that was opened for this is not kept."""
    try:
        return batch_of(node_id=node_id, message=message)
    except (DatabaseError, InterfaceError):
        alone = True
        raise
    finally:
        if alone:
            connections.close_all()


def _written(batches: list[Batch]) -> None:
    """One connection serves group after group while they come (its staging tables stay); a failure gives it up."""
    try:
        samples_write(batches=batches)
    except BaseException:
        connections.close_all()
        raise


_sinks: dict[asyncio.AbstractEventLoop, Sink] = {}
_guard = threading.Lock()


async def samples_sink(node_id: int, message: dict[str, Any]) -> dict[str, int]:
    """Take one batch of a node's samples; returns once it is durable, with the rows refused by code.

    Raises `SinkFull` or a database error when it could not be stored: the message is not to be acknowledged.
    """
    loop = asyncio.get_running_loop()
    with _guard:
        for stale in [other for other in _sinks if other.is_closed()]:
            _sinks.pop(stale).thread.shutdown(wait=False)
        sink = _sinks.get(loop)
        if sink is None:
            sink = _sinks[loop] = Sink()
    return await sink.put(node_id, message)
