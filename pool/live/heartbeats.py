"""Heartbeats of all agents of this process, stamped in groups: a commit for each would be hundreds a second.

A heartbeat that comes alone is stamped at once, others with those of the same fifth of a second. What a group cannot
settle (a token that ended, a node whose health changes with it or that something else holds) is asked one by one.
"""

from __future__ import annotations

import asyncio

from channels.db import database_sync_to_async

from pool.services import agent_inbox

GROUP_S = 0.2


class Heartbeats:
    """The heartbeats that wait in one process."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self.task: asyncio.Task[None] | None = None
        self.next_at = 0.0

    async def beat(self, node_id: int, token_id: int) -> None:
        """Stamp one; raises what `agent_heartbeat` raises."""
        done: asyncio.Future[None] = self.loop.create_future()
        self.waiting.append((node_id, token_id, done))
        if self.task is None or self.task.done():
            self.task = self.loop.create_task(self._drain())
        await done

    async def _drain(self) -> None:
        while self.waiting:
            await asyncio.sleep(self.next_at - self.loop.time())
            self.next_at = self.loop.time() + GROUP_S
            group, self.waiting = self.waiting, []
            try:
                stamped = await database_sync_to_async(agent_inbox.agent_heartbeats)(
                    beats=[(node_id, token_id) for node_id, token_id, _ in group]
                )
            except Exception as error:  # the database is away: each connection is to learn it
                for _, _, done in group:
                    _settle(done, error)
                continue
            for node_id, token_id, done in group:
                _settle(done, None if (node_id, token_id) in stamped else await _alone(node_id, token_id))


async def _alone(node_id: int, token_id: int) -> Exception | None:
    try:
        await database_sync_to_async(agent_inbox.agent_heartbeat)(node_id=node_id, token_id=token_id)
    except Exception as error:
        return error
    return None


def _settle(done: asyncio.Future[None], error: Exception | None) -> None:
    if done.done():  # the socket went away meanwhile
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)


_of_loops: dict[asyncio.AbstractEventLoop, Heartbeats] = {}


async def heartbeat(node_id: int, token_id: int) -> None:
    """A sign of life of this node, stamped once this returns. Raises `Refused` (`token_revoked`)."""
    loop = asyncio.get_running_loop()
    for stale in [other for other in _of_loops if other.is_closed()]:
        del _of_loops[stale]
    await _of_loops.setdefault(loop, Heartbeats()).beat(node_id, token_id)
