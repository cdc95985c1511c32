"""Browser sockets: the wall in binary frames, and cards, nodes and allocations in JSON.

Close codes: 4401 not signed in, 4403 not yours to follow (or no longer), 1012 the server restarts. A snapshot comes
first, then numbered deltas, and a beat at least every 5 s, so a reader notices silence. `{"t": "resync"}` from the
reader asks for a snapshot. What a reader may follow is asked again every minute.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from datetime import timedelta
from typing import Any
from uuid import UUID

from asgiref.sync import sync_to_async
from channels.generic.websocket import AsyncWebsocketConsumer
from django.contrib.auth import get_user_model
from django.db import DatabaseError, connections

from monitoring.engine import frames
from monitoring.engine.board import Board
from monitoring.engine.tiles import is_silent, is_stale
from monitoring.live.hub import BEAT_S, CellOutlet, Hub, Outlet, hub
from monitoring.selectors.access import Key, topic_keys
from monitoring.selectors.series import recent
from portal.accounts.policy import policy_of
from portal.kernel.clock import now
from portal.kernel.errors import DomainError
from portal.kernel.units import to_ms

RECHECK_S = 60.0
LIVE_LENGTH = timedelta(minutes=15)
LIVE_POINTS = 900
SHARED_POINTS = 4000


class LiveSocket(AsyncWebsocketConsumer):
    """What all live sockets share: who may, one writer, and the end."""

    hub: Hub
    outlet: Outlet
    writer: asyncio.Task[None] | None = None

    async def connect(self) -> None:
        user = self.scope.get("user")
        await self.accept()
        if user is None or not user.is_authenticated or not user.is_active:
            await self.close(code=4401)
            return
        self.user_id = user.pk
        try:
            await self.allowed()
        except DomainError:
            await self.close(code=4403)
            return
        self.hub = await hub()
        self.join()
        self.writer = asyncio.get_running_loop().create_task(self.write())

    async def disconnect(self, code: int) -> None:
        if self.writer is not None:
            self.writer.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self.writer
            self.hub.leave(self.outlet)

    async def receive(self, text_data: str | None = None, bytes_data: bytes | None = None) -> None:
        with contextlib.suppress(ValueError, TypeError, AttributeError):
            if json.loads(text_data or "").get("t") == "resync":
                self.outlet.resync()

    async def allowed(self) -> None:
        """Raise a `DomainError` when this reader may not follow this."""
        await _in_thread(_active_user, self.user_id)

    def join(self) -> None:
        """Make the outlet and join the hub with it."""
        raise AssertionError("a socket joins something")

    async def write(self) -> None:
        """Send what the hub has, until the socket closes."""
        loop = asyncio.get_running_loop()
        check_at = loop.time() + RECHECK_S
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.outlet.wake.wait(), BEAT_S)
                self.outlet.wake.clear()
                await self.send_waiting()
                if loop.time() >= check_at:
                    check_at = loop.time() + RECHECK_S
                    with contextlib.suppress(DatabaseError):
                        await self.allowed()
        except DomainError:
            await self.close(code=4403)
        except (RuntimeError, OSError):  # the socket closed while we wrote
            return

    async def send_waiting(self) -> None:
        """Send a snapshot where one is due, else what waits."""
        raise AssertionError("a socket sends something")


class WallSocket(LiveSocket):
    """`/ws/wall/`: frames that the hub encoded once for all."""

    def join(self) -> None:
        self.outlet = Outlet()
        self.hub.join_wall(self.outlet)
        self.outlet.wake.set()

    async def send_waiting(self) -> None:
        outlet = self.outlet
        if outlet.lost:
            outlet.lost = False
            outlet.queue.clear()
            await self.send(bytes_data=self.hub.wall_snapshot())
            return
        while outlet.queue and not outlet.lost:
            await self.send(bytes_data=outlet.queue.pop(0))


class CellsSocket(LiveSocket):
    """`/ws/gpus/<uid>/`, `/ws/nodes/<uid>/`, `/ws/allocations/<uid>/`: some cards in full detail.

    snapshot: {"t", "n", "at", "cells": [{"gpu", "slot", "label", "state", "history": {t, busy, sm, mem, temp, power},
    "last": row}]}; delta: {"t", "n", "at", "rows": [row…]};
    row: [cell, at_ms, busy %, sm %, used MiB, total MiB, °C, W, processes, state, stale]; null is N/A.
    """

    keys: list[Key]

    async def allowed(self) -> None:
        route = self.scope["url_route"]["kwargs"]
        self.keys = await _in_thread(_keys, self.user_id, route["kind"], route["uid"])

    def join(self) -> None:
        self.number = 0
        self.told: dict[int, list[Any]] = {}
        self.look_at = 0.0
        self.outlet: CellOutlet = CellOutlet({gpu for gpu, _ in self.keys})
        self.hub.join_cells(self.outlet)
        self.outlet.wake.set()

    async def send_waiting(self) -> None:
        outlet, board = self.outlet, self.hub.board
        if board is None:
            return
        if outlet.lost:
            outlet.lost = False
            outlet.changed.clear()
            points = (
                LIVE_POINTS
                if len(self.keys) == 1
                else max(60, min(LIVE_POINTS, SHARED_POINTS // max(1, len(self.keys))))
            )
            lines = await _in_thread(_recent, list(self.keys), points)
            cells = []
            for i, key in enumerate(self.keys):
                at = board.index.get(key)
                line = lines[key].as_json()
                if at is None:
                    cells.append(
                        {"gpu": None, "slot": key[1], "label": "–", "node": "", "history": line, "last": None}
                    )
                    continue
                cell = board.cells[at]
                self.told[at] = row_of(board, at, i)
                cells.append(
                    {
                        "gpu": cell.uid,
                        "slot": cell.slot,
                        "label": _label(board, at),
                        "node": board.nodes[cell.node].name,
                        "limit_w": cell.power_limit_w or None,
                        "history": line,
                        "last": self.told[at],
                    }
                )
            await self.send(
                json.dumps({"t": "snapshot", "n": self.number, "at": self.data_at(board), "cells": cells})
            )
            return
        places = {board.index[key]: i for i, key in enumerate(self.keys) if key in board.index}
        which = outlet.changed & places.keys()
        outlet.changed.clear()
        moment = time.monotonic()
        if moment >= self.look_at:
            # Ages pass by themselves: what falls silent sends no sample that would tell so
            self.look_at, which = moment + BEAT_S, set(places)
        found = {at: row_of(board, at, places[at]) for at in sorted(which)}
        rows = [row for at, row in found.items() if row != self.told.get(at)]
        self.told |= found
        if rows:
            self.number += 1
            message: dict[str, Any] = {
                "t": "delta",
                "n": self.number,
                "at": self.data_at(board),
                "rows": rows,
            }
        else:
            message = {"t": "beat", "n": self.number, "at": self.data_at(board)}
        await self.send(json.dumps(message))

    def data_at(self, board: Board) -> int:
        """Time of the newest sample among these cards, 0 where there is none."""
        return max((int(board.at[board.index[key]]) for key in self.keys if key in board.index), default=0)


def row_of(board: Board, at: int, i: int) -> list[Any]:
    """One row of detail; see `CellsSocket`."""
    now_ms = to_ms(now())
    seen = int(board.at[at])
    state = board.state_of(at, now_ms)
    measures = [
        _or_none(board.util[at], frames.NONE16, 10),
        _or_none(board.sm[at], frames.NONE16, 10),
        _or_none(board.mem_used[at], frames.NONE32),
        _or_none(board.mem_total[at], frames.NONE32),
        _or_none(board.temp[at], frames.NONE16),
        _or_none(board.power[at], frames.NONE32, 1000),
    ]
    if is_silent(state=state, at_ms=seen, now_ms=now_ms):
        measures = [None] * len(measures)
    return [i, seen or None, *measures, int(board.procs[at]), state, is_stale(at_ms=seen, now_ms=now_ms)]


def _or_none(value: Any, none: int, scale: int = 1) -> float | int | None:
    if int(value) == none:
        return None
    return int(value) if scale == 1 else round(int(value) / scale, 1)


def _label(board: Board, at: int) -> str:
    cell = board.cells[at]
    return f"GPU {cell.number}" + (f" · {cell.profile}" if cell.profile else "")


def _active_user(user_id: int) -> Any:
    user = get_user_model().objects.filter(pk=user_id, is_active=True).first()
    policy_of(user).require(user is not None)
    return user


def _keys(user_id: int, kind: str, uid: UUID) -> list[Key]:
    return topic_keys(policy_of(_active_user(user_id)), kind, uid)


def _recent(keys: list[Key], points: int) -> Any:
    return recent(keys, length=LIVE_LENGTH, points=points)


async def _in_thread(function: Any, *args: Any) -> Any:
    def call() -> Any:
        try:
            return function(*args)
        finally:
            connections.close_all()

    return await sync_to_async(call, thread_sensitive=False)()
