"""The live hub: one per web process. One Redis subscription feeds one board; frames are encoded once a tick.

Each socket has a queue of two frames and the latest wins: a reader that is too slow loses its queue and gets a
whole snapshot instead, so memory is bounded and nobody waits for the slowest. When Redis goes away the hub keeps
trying and, once back, reads the last states from the database: what was published meanwhile is not missed (P076).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import redis.asyncio
import structlog
from asgiref.sync import sync_to_async
from django.conf import settings
from django.db import connections

from monitoring.engine import frames
from monitoring.engine.board import Board
from monitoring.selectors.board import board_load, board_share, facts_reload
from monitoring.services.bus import CHANNEL
from portal.kernel.clock import now
from portal.kernel.units import to_ms

log = structlog.get_logger(__name__)
TICK_S = 0.5
SWEEP_S = 5.0
FACTS_S = 30.0
BEAT_S = 5.0
QUEUE = 2
LINGER_S = 30.0


def _db(function: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    """Run a database reader in a thread, and give its connection back."""

    def call(*args: Any) -> Any:
        try:
            return function(*args)
        finally:
            connections.close_all()

    return sync_to_async(call, thread_sensitive=False)


class Outlet:
    """The hub's end of one socket: a queue of two, latest wins; `wake` is set when there is something to send."""

    def __init__(self) -> None:
        self.queue: list[bytes] = []
        self.lost = True  # a new reader starts with a snapshot
        self.wake = asyncio.Event()

    def put(self, frame: bytes) -> None:
        """Queue a frame, or give the queue up for a snapshot to come."""
        if self.lost:
            self.wake.set()
            return
        if len(self.queue) >= QUEUE:
            self.queue.clear()
            self.lost = True
        else:
            self.queue.append(frame)
        self.wake.set()

    def resync(self) -> None:
        """The reader asks for a snapshot."""
        self.queue.clear()
        self.lost = True
        self.wake.set()


class CellOutlet(Outlet):
    """An outlet that follows some cards in full detail: it is told of each sample, not of frames."""

    def __init__(self, gpu_ids: set[int]) -> None:
        super().__init__()
        self.gpu_ids = gpu_ids
        self.changed: set[int] = set()

    def touch(self, cells: set[int]) -> None:
        """These cells of mine have a newer sample; only the newest is kept for a slow reader."""
        self.changed |= cells
        self.wake.set()


class Hub:
    """See the module. Everything runs on one event loop; only database reads leave it."""

    def __init__(self) -> None:
        self.board: Board | None = None
        self.number = 0
        self.walls: set[Outlet] = set()
        self.cells: dict[int, set[CellOutlet]] = {}
        self.tasks: list[asyncio.Task[None]] = []
        self.pending: set[int] = set()
        self.reload_all = False
        self.backlog: list[bytes] | None = None
        self.ready = asyncio.Event()
        self.subscribed = asyncio.Event()
        self.news = asyncio.Event()
        self.connected = False
        self.last_used = time.monotonic()

    # Sockets ---------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start once; later calls wait until the board is there."""
        self.last_used = time.monotonic()
        if not self.tasks:
            loop = asyncio.get_running_loop()
            self.tasks = [loop.create_task(self._listen()), loop.create_task(self._ticks())]
        await self.ready.wait()

    async def stop(self) -> None:
        """End the tasks (the last socket left, or the process ends)."""
        tasks, self.tasks = self.tasks, []
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self.ready.clear()
        self.subscribed.clear()
        self.board = None

    def join_wall(self, outlet: Outlet) -> None:
        """Send frames of the wall to this outlet."""
        self.walls.add(outlet)

    def join_cells(self, outlet: CellOutlet) -> None:
        """Tell this outlet of samples of its cards."""
        for gpu_id in outlet.gpu_ids:
            self.cells.setdefault(gpu_id, set()).add(outlet)

    def leave(self, outlet: Outlet) -> None:
        """Forget an outlet."""
        self.walls.discard(outlet)
        if isinstance(outlet, CellOutlet):
            for gpu_id in outlet.gpu_ids:
                group = self.cells.get(gpu_id, set())
                group.discard(outlet)
                if not group:
                    self.cells.pop(gpu_id, None)
        self.last_used = time.monotonic()

    @property
    def readers(self) -> int:
        """Sockets there are."""
        return len(self.walls) + sum(len(group) for group in self.cells.values())

    def wall_snapshot(self) -> bytes:
        """The whole wall as it stands, with the number that the next delta follows."""
        board = self._board
        return frames.snapshot(
            board.columns, identity=board.version, number=self.number, at_ms=board.newest_at()
        )

    @property
    def _board(self) -> Board:
        if self.board is None:
            raise RuntimeError("the hub has not started")
        return self.board

    # Feeding ---------------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        pause = 0.2
        while True:
            client = redis.asyncio.Redis.from_url(
                settings.REDIS_URL, socket_timeout=None, health_check_interval=0
            )
            try:
                async with client.pubsub() as channel:
                    await channel.subscribe(CHANNEL)
                    # Subscribed first, read after: nothing that is published in between is lost.
                    self.reload_all = self.subscribed.is_set()
                    self.news.set()
                    self.subscribed.set()
                    self.connected, pause = True, 0.2
                    while True:
                        message = await channel.get_message(ignore_subscribe_messages=True, timeout=30)
                        if message is None:
                            await channel.ping()
                        elif message["type"] == "message":
                            self.take(message["data"])
            except asyncio.CancelledError:
                raise
            except Exception as error:
                log.warning("hub_lost_redis", error=type(error).__name__)
            finally:
                self.connected = False
                with contextlib.suppress(Exception):
                    await client.aclose()
            await asyncio.sleep(pause)
            pause = min(5.0, pause * 2)

    def take(self, message: bytes) -> None:
        """One message of the bus."""
        if self.backlog is not None:
            self.backlog.append(message)
        if self.board is None:
            return
        self.news.set()
        try:
            kind, content = frames.bus_decode(message)
        except ValueError:
            log.warning("hub_bad_message", size=len(message))
            return
        if kind == frames.BUS_FACTS:
            self.pending.update(content.get("gpus", ()))
            self.reload_all = self.reload_all or bool(content.get("inventory"))
            return
        touched: dict[CellOutlet, set[int]] = {}
        changed = self.board.take(content)
        if not self.cells:
            return
        followed = np.isin(self.board.gpu_ids[changed], list(self.cells))
        for i in changed[followed].tolist():
            for outlet in self.cells.get(self.board.cells[i].gpu_id, ()):
                touched.setdefault(outlet, set()).add(i)
        for outlet, cells in touched.items():
            outlet.touch(cells)

    # Ticks -----------------------------------------------------------------------------------------------

    async def _ticks(self) -> None:
        sweep = facts = beat = time.monotonic()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.subscribed.wait(), 2)
        self.subscribed.set()  # without Redis the wall still shows the last states
        while True:
            moment = time.monotonic()
            if not self.readers and moment - self.last_used > LINGER_S:
                asyncio.get_running_loop().create_task(self.stop())  # noqa: RUF006
                return
            try:
                if self.board is None or self.reload_all or moment - facts > FACTS_S:
                    # The whole fleet now and then: a poke may have been lost with Redis.
                    await self._load()
                    facts = moment
                elif self.pending:
                    wanted, self.pending = self.pending, set()
                    await _db(facts_reload)(self.board, wanted)
                    self._touch_facts(wanted)
                everything = moment - sweep > SWEEP_S
                if everything:
                    sweep = moment
                if self.tick(everything=everything):
                    beat = moment
                elif moment - beat > BEAT_S:
                    self._beat()
                    beat = moment
            except asyncio.CancelledError:
                raise
            except Exception as error:  # the database is away: keep what we have, try again
                log.warning("hub_tick_failed", error=type(error).__name__)
            await self._pause(moment)

    async def _pause(self, moment: float) -> None:
        """Until the next tick: never sooner than `TICK_S` after the one at `moment`, then at the first news."""
        await asyncio.sleep(max(0.05, TICK_S - (time.monotonic() - moment)))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.news.wait(), TICK_S)
        self.news.clear()

    async def _load(self) -> None:
        self.reload_all = False
        self.backlog = []
        try:
            board = await _db(board_load)()
        finally:
            missed, self.backlog = self.backlog, None
        same = self.board is not None and self.board.version == board.version
        if same and self.board is not None:
            # The readers have these columns: what differs goes out as the next delta.
            board.columns = self.board.columns
            board.dirty = set(range(len(board.cells)))
        self.board = board
        for message in missed:
            self.take(message)
        board_share(board)
        self.ready.set()
        if same:
            return
        for outlet in list(self.walls):
            outlet.resync()
        for group in list(self.cells.values()):
            for outlet in list(group):
                outlet.resync()
        log.info("hub_board", cells=len(board.cells), version=board.version)

    def _touch_facts(self, gpu_ids: set[int]) -> None:
        for gpu_id in gpu_ids:
            i = self._board.index.get((gpu_id, 0))
            for outlet in self.cells.get(gpu_id, ()):
                if i is not None:
                    outlet.touch({i})

    def tick(self, *, everything: bool = False) -> bool:
        """Encode what changed and hand it to every wall; True when a frame went out."""
        board = self._board
        board_share(board)
        changed = board.refresh(to_ms(now()), everything=everything)
        if not len(changed):
            return False
        self.number += 1
        if self.walls:
            frame = frames.delta(
                board.columns, changed, identity=board.version, number=self.number, at_ms=board.newest_at()
            )
            for outlet in self.walls:
                outlet.put(frame)
        return True

    def _beat(self) -> None:
        board = self._board
        frame = frames.head(frames.BEAT, identity=board.version, number=self.number, at_ms=board.newest_at())
        for outlet in self.walls:
            outlet.put(frame)


_hubs: dict[asyncio.AbstractEventLoop, Hub] = {}


async def hub() -> Hub:
    """The hub of this process (of this event loop), started."""
    loop = asyncio.get_running_loop()
    for stale in [other for other in _hubs if other.is_closed()]:
        del _hubs[stale]
    found = _hubs.setdefault(loop, Hub())
    await found.start()
    return found
