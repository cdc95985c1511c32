"""Health checks of services: an HTTP path, a TCP port or a command, asked on the node where the replica runs.

A replica that fails so many times in a row as its owner allows is stopped as ``unhealthy``, to be tried again: the
installation puts it back in line at its place, so that another takes over. Until its first success a replica is
starting up and has a longer time. Only changes are told.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from pool.agent import files, shim
from pool.agent.collector import self_command, self_environment
from pool.agent.job import Job

SECONDS = 5.0
STARTING_SECONDS = 300.0
GRACE = 10.0
MOST_HEAD = 4096


class Watched:
    """What is known of one job's health. ``ok``: None before the first answer."""

    def __init__(self, began: float) -> None:
        self.began = began
        self.due = began
        self.ok: bool | None = None
        self.failures = 0
        self.task: asyncio.Future[None] | None = None


class Health:
    """The checks of all jobs; ``tell(job, ok, facts)`` hears of changes."""

    def __init__(self, tell: Callable[[Job, bool, dict[str, Any]], None]) -> None:
        self.tell = tell
        self.watched: dict[str, Watched] = {}

    def turn(self, jobs: list[Job]) -> None:
        """Begin the checks that are due; none waits for another, and none runs twice at once."""
        now = time.monotonic()
        living = {job.folder: job for job in jobs if job.run is not None and job.meta.get("health")}
        for folder in [folder for folder in self.watched if folder not in living]:
            gone = self.watched.pop(folder)
            if gone.task is not None:
                gone.task.cancel()
        for folder, job in living.items():
            known = self.watched.setdefault(folder, Watched(now))
            if now >= known.due and (known.task is None or known.task.done()):
                known.due = now + float(job.meta["health"].get("every_s") or 15)
                known.task = asyncio.ensure_future(self._check(job, known))

    async def _check(self, job: Job, known: Watched) -> None:
        rule = job.meta["health"]
        why = await look(rule, job.folder)
        if job.exit is not None:
            return
        if not why:
            known.failures = 0
            if known.ok is not True:
                known.ok = True
                self.tell(job, True, {})
            return
        if known.ok is None and time.monotonic() - known.began < STARTING_SECONDS:
            return
        known.failures += 1
        if known.failures == 1 and known.ok is not False:
            known.ok = False
            self.tell(job, False, {"why": why, "failures": 1, "of": int(rule.get("failures") or 3)})
        if known.failures >= int(rule.get("failures") or 3):
            detail = f"{known.failures} checks in a row failed: {why}"
            job.stop("SIGTERM", GRACE, {"code": "unhealthy", "detail": detail, "retryable": True})


async def look(rule: dict[str, Any], folder: str) -> str:
    """Empty where all is well, else what is not."""
    kind = rule.get("kind")
    try:
        if kind == "command":
            return await asyncio.wait_for(_command(folder), SECONDS + 5)
        return await asyncio.wait_for(_port(rule, kind == "http"), SECONDS)
    except asyncio.TimeoutError:
        return f"no answer within {SECONDS:g} s"
    except (OSError, ValueError) as error:
        return str(error) or type(error).__name__


async def _port(rule: dict[str, Any], http: bool) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(rule["port"]))
    try:
        if not http:
            return ""
        path = str(rule.get("path") or "/")
        if not path.startswith("/") or any(sign in path for sign in "\r\n \0"):
            return "not a path"
        head = f"GET {path} HTTP/1.0\r\nHost: localhost\r\nUser-Agent: gpupool-health\r\nAccept: */*\r\n\r\n"
        writer.write(head.encode())
        await writer.drain()
        line = (await reader.read(MOST_HEAD)).split(b"\r\n", 1)[0].split()
        if len(line) < 2 or not line[1].isdigit():
            return "not HTTP"
        status = int(line[1])
        return "" if 200 <= status < 400 else f"HTTP {status}"
    finally:
        writer.close()


async def _command(folder: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *self_command("_health", folder),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=self_environment(),
        start_new_session=True,
    )
    out, _ = await process.communicate()
    return out.decode("utf-8", "replace")[:300].strip()


def main(folder: str) -> int:
    """The inner program: the command as the job's account, in its folder and environment; prints what failed."""
    job = files.read_json(os.path.join(folder, "job.json"))
    meta = files.read_json(os.path.join(folder, "meta.json")) or {}
    rule = meta.get("health") or {}
    if job is None:
        print("the job is over")
        return 0
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            null = os.open(os.devnull, os.O_RDWR)
            for number in range(3):
                os.dup2(null, number)
            shim.become(job["account"])
            os.chdir(job["cwd"])
            os.execvpe("/bin/sh", ["/bin/sh", "-c", str(rule.get("command") or "false")], job["env"])
        finally:
            os._exit(126)
    deadline = time.monotonic() + SECONDS
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    try:
        os.killpg(pid, signal.SIGKILL)
    except OSError:
        pass
    if not ended:
        os.waitpid(pid, 0)
        print(f"no end within {SECONDS:g} s")
    elif status != 0:
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else f"signal {os.WTERMSIG(status)}"
        print(f"the command ended with {code}")
    return 0
