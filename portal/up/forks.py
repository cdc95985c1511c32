"""The supervisor's side of the zygote: asks it for children and keeps what it says about them."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from portal.up.layout import BASE_DIR
from portal.up.process import MESSAGE_LIMIT, Handle, spawn


@dataclass
class Fork:
    """A child that the zygote forked. It counts as running until the zygote says, or its end shows,
    otherwise."""

    pid: int
    code: int | None = None

    def poll(self) -> int | None:
        return self.code


@dataclass
class Forks:
    """Starts the zygote, forks roles from it, and hands on what the children report."""

    log: Path
    environment: dict[str, str]
    inherited: tuple[int, ...] = ()
    on_report: Callable[[str, dict[str, Any]], None] = lambda name, message: None
    loaded: bool = False
    _control: socket.socket | None = None
    _children: dict[int, Fork] = field(default_factory=dict)
    _reports: dict[int, str] = field(default_factory=dict)
    _next: int = 0

    def start(self) -> subprocess.Popen[bytes]:
        """Start the zygote (also again, after it ended)."""
        self.close()
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        mine.setblocking(False)
        os.set_inheritable(theirs.fileno(), True)
        try:
            process = spawn(
                [sys.executable, "-m", "portal.up.zygote"],
                log=self.log,
                environment={**self.environment, "GPUPOOL_UP_CONTROL": str(theirs.fileno())},
                cwd=str(BASE_DIR),
                pass_fds=(theirs.fileno(), *self.inherited),
            )
        finally:
            theirs.close()
        self._control = mine
        return process

    def close(self) -> None:
        """The zygote is gone, and the kernel ends its children with it: none of them counts as running any
        more."""
        self.loaded = False
        for child in self._children.values():
            if child.code is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGKILL)
                child.code = -signal.SIGKILL
        self._children.clear()
        if self._control:
            self._control.close()
            self._control = None

    def fileno(self) -> int | None:
        return self._control.fileno() if self._control else None

    def fork(
        self, role: str, arguments: list[Any], *, log: Path, name: str, death_signal: int
    ) -> Handle | None:
        """A new child in that role, or None while the zygote is not ready. Waits for its process id
        (milliseconds)."""
        if not self.loaded or self._control is None:
            return None
        self._next += 1
        number = self._next
        self._reports[number] = name
        request = {
            "spawn": number,
            "role": role,
            "arguments": arguments,
            "log": str(log),
            "death_signal": death_signal,
            "closed": [] if role == "web" else list(self.inherited),
        }
        self._control.setblocking(True)
        self._control.settimeout(10)
        try:
            self._control.send(json.dumps(request).encode())
            while True:
                message = json.loads(self._control.recv(MESSAGE_LIMIT))
                if message.get("spawned") == number:
                    break
                self._take(message)
        except OSError:
            return None
        finally:
            self._control.setblocking(False)
        child = Fork(int(message["pid"]))
        self._children[child.pid] = child
        return child

    def pump(self) -> None:
        """Take what has come from the zygote and its children."""
        while self._control is not None:
            try:
                message = json.loads(self._control.recv(MESSAGE_LIMIT))
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                return
            self._take(message)

    def _take(self, message: dict[str, Any]) -> None:
        if message.get("loaded"):
            self.loaded = True
        elif "exited" in message:
            child = self._children.pop(int(message["exited"]), None)
            if child:
                child.code = int(message["code"])
        elif "report" in message:
            self.on_report(self._reports.get(int(message["report"]), "?"), message)
