"""The agent's side of what people do in their leases from afar: a connection and a process for each session.

The installation has checked who asks and for which lease; it names a session, the agent dials out once more for it and
pumps frames between that connection and the session's process (``session``). Nothing of it touches the agent's own
connection: a slow copy holds up no report.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import struct
import subprocess
from typing import TYPE_CHECKING, Any

from pool.agent import ws
from pool.agent.channel import ERROR, EXIT, ORDER, Channel
from pool.agent.collector import self_command, self_environment
from pool.agent.line import MOST
from pool.agent.transfer import mark_path, marked_at

if TYPE_CHECKING:
    from pool.agent.config import Config
    from pool.agent.jobs import Jobs

log = logging.getLogger("gpupool.agent")
MOST_SESSIONS = 32
LAST_WORDS_SECONDS = 5.0


class Sessions:
    """All sessions of this agent."""

    def __init__(self, jobs: Jobs, settings: Config) -> None:
        self.jobs = jobs
        self.settings = settings
        self.open: dict[str, asyncio.Future[None]] = {}

    def begin(self, message: dict[str, Any]) -> None:
        """Serve a session in a task of its own; the same one asked for twice is one."""
        name = str(message.get("session") or "")
        if not name or name in self.open:
            return
        task = asyncio.ensure_future(self._serve(name, message))
        self.open[name] = task
        task.add_done_callback(lambda _task: self.open.pop(name, None))

    async def _serve(self, name: str, message: dict[str, Any]) -> None:
        url = self.settings.ws_url
        url = url[: -len("/agent/ws/")] if url.endswith("/agent/ws/") else url.rstrip("/")
        headers = {"Authorization": f"Bearer {self.settings.token}"}
        try:
            connection = await ws.connect(f"{url}/agent/remote/{name}/", headers, self.settings.ca_file)
        except (ws.WebSocketError, OSError) as error:
            log.info("session %s: %s", name, error)
            return
        channel = Channel(connection)
        try:
            await self._run(channel, message)
        except (ws.WebSocketError, OSError, ValueError, asyncio.IncompleteReadError) as error:
            log.info("session %s ended: %s", name, error)
        finally:
            await connection.close()

    async def _run(self, channel: Channel, message: dict[str, Any]) -> None:
        key = (str(message.get("allocation")), int(message.get("member") or 0))
        job = self.jobs.jobs.get(key)
        order = dict(message.get("order") or {})
        if job is None or not job.meta.get("account_ids"):
            await channel.send_json(
                ERROR, {"code": "job_not_here", "detail": "the node does not know this job"}
            )
            return
        if len(self.open) > MOST_SESSIONS:
            await channel.send_json(ERROR, {"code": "too_many_sessions", "detail": "the node serves enough"})
            return
        order["marked_at"] = marked_at(mark_path(self.jobs.root, str(job.meta.get("work_name") or "-")))
        order["group"] = job.pid if job.run and job.pid != job.run.get("shim_pid") else None
        ours, theirs = socket.socketpair()
        try:
            with open(job.path("shim.log"), "ab") as output:
                process = subprocess.Popen(
                    self_command("_session", job.folder, str(theirs.fileno())),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    cwd="/",
                    env=self_environment(),
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours)
        writer.write(_framed(ORDER, json.dumps(order).encode()))
        inward = asyncio.ensure_future(self._inward(channel, writer))
        outward = asyncio.ensure_future(self._outward(channel, reader))
        try:
            await asyncio.wait([inward, outward], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (inward, outward):
                task.cancel()
            await asyncio.gather(inward, outward, return_exceptions=True)
            writer.close()
            stays = order.get("kind") == "shell"
            await asyncio.get_event_loop().run_in_executor(None, _wait, process, stays)

    @staticmethod
    async def _inward(channel: Channel, writer: asyncio.StreamWriter) -> None:
        while True:
            kind, content = await channel.receive()
            writer.write(_framed(kind, content))
            await writer.drain()

    @staticmethod
    async def _outward(channel: Channel, reader: asyncio.StreamReader) -> None:
        while True:
            size = struct.unpack("!I", await reader.readexactly(4))[0]
            if not 1 <= size <= MOST:
                raise ValueError("a frame of no sensible size")
            data = await reader.readexactly(size)
            await channel.send(data[:1], data[1:])
            if data[:1] == EXIT:
                return

    async def close(self) -> None:
        """End them all: the agent stops."""
        tasks = list(self.open.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _framed(kind: bytes, content: bytes) -> bytes:
    return struct.pack("!I", len(content) + 1) + kind + content


def _wait(process: subprocess.Popen[bytes], stays: bool) -> None:
    """Its end, so that no zombie stays; it ends by itself when its line is closed, unless a shell left something that
    runs on: then it watches that until the job ends, with this agent or the next."""
    try:
        process.wait(LAST_WORDS_SECONDS)
    except subprocess.TimeoutExpired:
        if not stays:
            process.kill()
            process.wait()
