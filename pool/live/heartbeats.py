"""Heartbeats of all agents of this process, stamped in groups: a commit for each would be hundreds a second.

A heartbeat that comes alone is stamped at once, others with those of the same fifth of a second. The open commands of a
group's nodes are read with it, after its stamps: what a beat gets was never read before the beat came. What a group
cannot settle (a token that ended, a node whose health changes with it or that something else holds) is asked one by
one, after the others have their answer.
"""

from __future__ import annotations

import asyncio

from channels.db import database_sync_to_async

from pool.models import AgentCommand
from pool.selectors.agents import commands_open
from pool.services import agent_inbox
from pool.services.node_watch import listening_since

GROUP_S = 0.2
LISTENING_S = 10.0
"""How often a process that hears agents says that it does; well below what counts as a break."""
Answer = list[AgentCommand] | Exception


class Heartbeats:
    """The heartbeats that wait in one process."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.waiting: list[tuple[int, int, asyncio.Future[list[AgentCommand]]]] = []
        self.task: asyncio.Task[None] | None = None
        self.next_at = 0.0
        self.listening_at = 0.0

    async def beat(self, node_id: int, token_id: int) -> list[AgentCommand]:
        """Stamp one and return the node's open commands; raises what `agent_heartbeat` raises."""
        done: asyncio.Future[list[AgentCommand]] = self.loop.create_future()
        self.waiting.append((node_id, token_id, done))
        if self.task is None or self.task.done():
            self.task = self.loop.create_task(self._drain())
        return await done

    async def _drain(self) -> None:
        while self.waiting:
            await asyncio.sleep(self.next_at - self.loop.time())
            self.next_at = self.loop.time() + GROUP_S
            group, self.waiting = self.waiting, []
            try:
                if self.loop.time() >= self.listening_at:
                    await database_sync_to_async(listening_since)()
                    self.listening_at = self.loop.time() + LISTENING_S
                answers = await database_sync_to_async(group_answers)(
                    [(node_id, token_id) for node_id, token_id, _ in group]
                )
            except Exception as error:  # the database is away: each connection is to learn it
                for _, _, done in group:
                    _settle(done, error)
                continue
            alone = []
            for node_id, token_id, done in group:
                if (node_id, token_id) in answers:
                    _settle(done, answers[node_id, token_id])
                else:
                    alone.append((node_id, token_id, done))
            for node_id, token_id, done in alone:
                _settle(done, await _alone(node_id, token_id))


def group_answers(beats: list[tuple[int, int]]) -> dict[tuple[int, int], list[AgentCommand]]:
    """Stamp these (node, token); returns those that are stamped, each with the node's open commands.

    As many queries for a thousand as for one. Commands are given to beats alone whose token is valid now.
    """
    stamped = agent_inbox.agent_heartbeats(beats=beats)
    found = commands_open({node_id for node_id, _ in stamped})
    return {beat: found.get(beat[0], []) for beat in stamped}


def _one_answer(node_id: int, token_id: int) -> list[AgentCommand]:
    agent_inbox.agent_heartbeat(node_id=node_id, token_id=token_id)
    return commands_open([node_id]).get(node_id, [])


async def _alone(node_id: int, token_id: int) -> Answer:
    try:
        return await database_sync_to_async(_one_answer)(node_id, token_id)
    except Exception as error:
        return error


def _settle(done: asyncio.Future[list[AgentCommand]], answer: Answer) -> None:
    if done.done():  # the socket went away meanwhile
        return
    if isinstance(answer, Exception):
        done.set_exception(answer)
    else:
        done.set_result(answer)


_of_loops: dict[asyncio.AbstractEventLoop, Heartbeats] = {}


async def heartbeat(node_id: int, token_id: int) -> list[AgentCommand]:
    """A sign of life of this node, stamped once this returns; its open commands. Raises `Refused` (`token_revoked`)."""
    loop = asyncio.get_running_loop()
    for stale in [other for other in _of_loops if other.is_closed()]:
        del _of_loops[stale]
    return await _of_loops.setdefault(loop, Heartbeats()).beat(node_id, token_id)
