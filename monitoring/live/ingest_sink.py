"""Where the agent socket hands its samples over: buffered per process, committed in groups: every 250 ms, or as soon
as 10,000 rows wait.

A group is checked as one piece of work in one thread, and the next while it is being written in another: a message
costs no thread of its own, and a backlog keeps both processors at work. `samples_sink` returns once its batch is
committed, so the agent's acknowledgement means *durable*. While the database is away batches wait (the agent is not
acknowledged and keeps its spool) and are written when it is back; past a bound new batches are refused at once, which
the agent meets in the same way.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import structlog
from django.db import DatabaseError, InterfaceError, connections

from monitoring.services.ingest import Batch, samples_write
from monitoring.services.intake import batch_of

log = structlog.get_logger(__name__)
GROUP_S = 0.25
GROUP_ROWS = 10_000
MAX_WAITING_ROWS = 200_000
RETRY_S = (0.5, 1.0, 2.0, 4.0, 8.0)


class SinkFull(RuntimeError):
    """Too much waits to be written: do not acknowledge, the agent sends it again."""


@dataclass(slots=True)
class _Waiting:
    """A message that waits for its commit; `done` gets what was refused of it, by code."""

    node_id: int
    message: dict[str, Any]
    rows: int
    done: asyncio.Future[dict[str, int]]


@dataclass(slots=True)
class _Checked:
    """What came of the check: a batch and the rows refused, or why it could not be checked."""

    batch: Batch
    refused: dict[str, int]
    error: Exception | None = None


class Sink:
    """The buffer of one process, and its two threads, each with a database connection of its own."""

    def __init__(self) -> None:
        self.waiting: list[_Waiting] = []
        self.rows = 0
        self.task: asyncio.Task[None] | None = None
        self.next_at = 0.0
        self.loop = asyncio.get_running_loop()
        self.checker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ingest-check")
        self.writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ingest-write")

    def end(self) -> None:
        """Let the threads go."""
        self.checker.shutdown(wait=False)
        self.writer.shutdown(wait=False)

    async def put(self, node_id: int, message: dict[str, Any]) -> dict[str, int]:
        """Buffer a message and wait for its commit; returns what was refused, by code."""
        if self.rows > MAX_WAITING_ROWS:
            raise SinkFull("telemetry buffer is full")
        rows = message.get("rows")
        size = len(rows) if isinstance(rows, list) else 0
        one = _Waiting(node_id, message, size, self.loop.create_future())
        self.waiting.append(one)
        self.rows += size
        if self.task is None or self.task.done():
            self.task = self.loop.create_task(self._drain())
        try:
            return await one.done
        finally:
            self.rows -= size

    async def _drain(self) -> None:
        while self.waiting:
            await self._groups()
            # While this gives the connections back more may come: it is looked at once more before the task ends.
            for thread in (self.checker, self.writer):
                await self.loop.run_in_executor(thread, connections.close_all)

    async def _groups(self) -> None:
        """Group after group in their order: the next is checked while the one before is being written."""
        writing: asyncio.Task[None] | None = None
        while self.waiting:
            if sum(one.rows for one in self.waiting) < GROUP_ROWS:
                await asyncio.sleep(self.next_at - self.loop.time())
            self.next_at = self.loop.time() + GROUP_S
            group = self._taken()
            checked = await self.loop.run_in_executor(self.checker, _checked, group)
            if writing is not None:
                await writing
            writing = self.loop.create_task(self._write_group(list(zip(group, checked, strict=True))))
            if not self.waiting:
                await writing

    def _taken(self) -> list[_Waiting]:
        """The next group: what waits, as far as one transaction goes."""
        rows, taken = 0, 0
        for one in self.waiting:
            if taken and rows + one.rows > GROUP_ROWS:
                break
            rows, taken = rows + one.rows, taken + 1
        group, self.waiting = self.waiting[:taken], self.waiting[taken:]
        return group

    async def _write_group(self, group: list[tuple[_Waiting, _Checked]]) -> None:
        write = []
        for one, found in group:
            if found.error is None and (found.batch.rows or found.batch.host is not None):
                write.append((one, found))
            else:  # nothing to write, or not checked
                _settle(one, found, found.error)
        if not write:
            return
        error = await self._write([found.batch for _, found in write])
        for one, found in write:
            if error is not None and len(write) > 1:
                # One bad batch must not fail the others: each on its own.
                _settle(one, found, await self._write([found.batch]))
            else:
                _settle(one, found, error)

    async def _write(self, batches: list[Batch]) -> Exception | None:
        for pause in (*RETRY_S, None):
            try:
                await self.loop.run_in_executor(self.writer, _written, batches)
                return None
            except (DatabaseError, InterfaceError) as error:
                log.warning("ingest_failed", error=type(error).__name__, batches=len(batches))
                if pause is None or not _worth_a_retry(error):
                    return error
                await asyncio.sleep(pause)
        return None


def _settle(one: _Waiting, found: _Checked, error: Exception | None) -> None:
    if one.done.done():  # the socket went away meanwhile
        return
    if error is None:
        one.done.set_result(found.refused)
    else:
        one.done.set_exception(error)


def _worth_a_retry(error: Exception) -> bool:
    from django.db import InternalError, OperationalError

    return isinstance(error, OperationalError | InterfaceError | InternalError)


def _checked(group: list[_Waiting]) -> list[_Checked]:
    """The messages checked, each by itself: what is wrong with one is told to its sender alone."""
    out = []
    for one in group:
        try:
            batch, refused = batch_of(node_id=one.node_id, message=one.message)
            out.append(_Checked(batch, dict(refused)))
        except Exception as error:
            if isinstance(error, DatabaseError | InterfaceError):
                connections.close_all()
            out.append(_Checked(Batch(one.node_id), {}, error))
    return out


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
            _sinks.pop(stale).end()
        sink = _sinks.get(loop)
        if sink is None:
            sink = _sinks[loop] = Sink()
    return await sink.put(node_id, message)
