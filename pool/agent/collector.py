"""NVML in a child process: a crash or a hang of the driver's library ends the child, never the agent.

The child answers one JSON line per request line (``inventory``, ``sample``); ``source`` in it says whether NVML
or, where that cannot be used, the program ``nvidia-smi`` was asked. ``Collector`` is the agent's
side: it starts the child, gives each request a deadline, kills and restarts what does not answer, and says
why there is nothing to read. A machine without a driver has no child at all until it is time to look again.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

FIRST_TIMEOUT = 20.0  # without persistence mode the driver loads at the first query
TIMEOUT = 8.0
RESTART_SECONDS = (1.0, 2.0, 5.0, 10.0, 30.0)
LOOK_AGAIN_SECONDS = 300.0
LINE_LIMIT = 16 * 1024 * 1024
DOWN_REASON = "collector_down"


def self_command(*arguments: str) -> list[str]:
    """How this program starts itself again: as the zipapp it was started from, or as a module."""
    program = os.path.abspath(sys.argv[0]) if sys.argv and sys.argv[0] else ""
    if program.endswith(".pyz") and os.path.exists(program):
        return [sys.executable, "-I", "-S", program, *arguments]
    return [sys.executable, "-m", "pool.agent", *arguments]


def self_environment() -> dict[str, str]:
    """The agent's own environment, with the source tree on the path when it runs as a module."""
    result = dict(os.environ)
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if os.path.isdir(root):
        result["PYTHONPATH"] = root + (os.pathsep + result["PYTHONPATH"] if result.get("PYTHONPATH") else "")
    return result


# What NVML lacks and the tool may have: a library where no binding looks, or one that no binding fits.
TRY_TOOL = ("no_binding", "no_driver", "nvml_error")


def child_main() -> int:
    """Serve requests from stdin until it closes."""
    readers = Readers()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(readers.answer(line.strip()), separators=(",", ":")) + "\n")
        sys.stdout.flush()
    return 0


class Readers:
    """NVML, and ``nvidia-smi`` in its place while NVML cannot be used. ``answer`` never raises."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._tool: Any = None

    def answer(self, operation: str) -> dict[str, Any]:
        """The answer to one request: {"ok": True, …} or {"ok": False, "reason": code}."""
        from pool.agent import nvidia_smi, nvml

        try:
            if self._nvml is None:
                self._nvml = nvml.Nvml(nvml.load())
            return dict(_asked(self._nvml, operation), source="nvml")
        except nvml.NvmlDown as error:
            reason = error.reason
        path = nvidia_smi.program() if reason in TRY_TOOL else None
        if path is None:
            return {"ok": False, "reason": reason}
        if self._tool is None:
            self._tool = nvidia_smi.NvidiaSmi(path)
        try:
            return dict(_asked(self._tool, operation), source="nvidia-smi")
        except nvml.NvmlDown as error:
            return {"ok": False, "reason": error.reason}


def _asked(reader: Any, operation: str) -> dict[str, Any]:
    if operation == "inventory":
        return dict(reader.inventory(), ok=True)
    if operation == "sample":
        rows = reader.sample()
        return {"ok": True, "rows": rows, "xids": reader.xids()}
    return {"ok": False, "reason": "unknown_operation"}


class Collector:
    """One child and its restarts. ``ask`` always answers: {"ok": True, …} or {"ok": False, "reason":
    code}."""

    def __init__(self, command: list[str] | None = None, timeout: float | None = None) -> None:
        self.command = command or self_command("_collect")
        self.timeout = timeout
        self.reason: str | None = None
        self.breaks = 0
        self._process: asyncio.subprocess.Process | None = None
        self._fresh = True
        self._failures = 0
        self._not_before = 0.0
        self._lock = asyncio.Lock()

    async def _start(self) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *self.command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=LINE_LIMIT,
            env=self_environment(),
            start_new_session=True,
        )
        self._fresh = True
        return process

    async def _drop(self, broke: bool) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            try:
                process.kill()
                await asyncio.wait_for(process.wait(), 5)
            except (ProcessLookupError, asyncio.TimeoutError):
                pass  # a child stuck in the driver cannot be killed; it is left to the kernel
        if broke:
            self.breaks += 1
            wait = RESTART_SECONDS[min(self._failures, len(RESTART_SECONDS) - 1)]
            self._failures += 1
            self._not_before = time.monotonic() + wait
            self.reason = DOWN_REASON

    async def ask(self, operation: str) -> dict[str, Any]:
        """One request to the child. While it may not be restarted yet, the last reason is the answer."""
        async with self._lock:
            if time.monotonic() < self._not_before and self._process is None:
                return {"ok": False, "reason": self.reason or DOWN_REASON}
            try:
                if self._process is None:
                    self._process = await self._start()
                process = self._process
                assert process.stdin is not None and process.stdout is not None
                process.stdin.write(operation.encode("ascii") + b"\n")
                await process.stdin.drain()
                limit = self.timeout or (FIRST_TIMEOUT if self._fresh else TIMEOUT)
                line = await asyncio.wait_for(process.stdout.readline(), limit)
                answer = json.loads(line) if line else None
            except (OSError, ValueError, asyncio.TimeoutError):
                answer = None
            if not isinstance(answer, dict):
                await self._drop(broke=True)
                return {"ok": False, "reason": DOWN_REASON}
            self._fresh = False
            self._failures = 0
            self.reason = None if answer.get("ok") else str(answer.get("reason") or "nvml_error")
            if self.reason in ("no_driver", "no_binding", "switched_off", "no_devices", "not_found"):
                # Nothing to read here: no child is kept for it, but a driver installed later is found.
                await self._drop(broke=False)
                self._not_before = time.monotonic() + LOOK_AGAIN_SECONDS
            return answer

    async def close(self) -> None:
        await self._drop(broke=False)
