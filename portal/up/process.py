"""One child of the supervisor: started, watched, started again with growing pauses, and stopped."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from portal.up.accounts import die_with_parent

BACKOFF_SECONDS = (0.2, 1.0, 2.0, 5.0, 10.0, 30.0)
STEADY_SECONDS = 60.0  # a child that ran this long starts again with the shortest pause
MESSAGE_LIMIT = 65536  # bytes of one message between supervisor and zygote
LOG_LIMIT_BYTES = 10 * 1024 * 1024


class Handle(Protocol):
    """A started process. `poll` gives None while it runs, else its exit code (negative: the signal that ended
    it)."""

    pid: int

    def poll(self) -> int | None: ...


@dataclass
class Child:
    """What the supervisor knows about one child.

    `start` makes a new process, or gives None where it cannot yet (it is asked again at the next turn).
    A `once` child may end with 0; any other end of any child is a crash and is reported.
    """

    name: str
    start: Callable[[], Handle | None]
    stop_signal: signal.Signals = signal.SIGTERM
    patience: float = 10.0
    once: bool = False
    again: int = 0
    log: Path | None = None
    handle: Handle | None = None
    wanted: bool = False
    restarts: int = 0
    failures: int = 0
    started_at: float = 0.0
    next_start: float = 0.0
    last_exit: int | None = None
    last_exit_at: float | None = None
    ready: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def pid(self) -> int | None:
        return self.handle.pid if self.handle else None

    @property
    def state(self) -> str:
        """running | starting | waiting (before another start) | done | stopped."""
        if self.handle:
            return "running" if self.ready else "starting"
        if self.wanted:
            return "waiting"
        return "done" if self.once and self.last_exit == 0 else "stopped"

    def begin(self, now: float) -> bool:
        """Start it if it is wanted, not running and its pause is over; True when a process was started."""
        if self.handle or not self.wanted or now < self.next_start:
            return False
        self.handle = self.start()
        if self.handle is None:
            return False
        self.started_at = now
        return True

    def missed(self, now: float) -> None:
        """A start that came to nothing: the next one waits as after a crash."""
        self.failures += 1
        self.restarts += 1
        self.next_start = now + self.pause

    def check(self, now: float) -> int | None:
        """Exit code if it ended since the last look, and when to start it again."""
        if self.handle is None:
            return None
        code = self.handle.poll()
        if code is None:
            return None
        self.handle = None
        self.ready = False
        self.last_exit, self.last_exit_at = code, time.time()
        if self.once and (code == 0 or self.failures >= self.again):
            self.wanted = False
        elif self.wanted:
            self.failures = 1 if now - self.started_at > STEADY_SECONDS else self.failures + 1
            self.restarts += 1
            self.next_start = now + self.pause
        return code

    @property
    def pause(self) -> float:
        """Seconds until the next start after the failures so far."""
        return BACKOFF_SECONDS[min(self.failures, len(BACKOFF_SECONDS)) - 1] if self.failures else 0.0

    def signal(self, sig: int) -> None:
        if self.handle:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.handle.pid, sig)

    def last_lines(self, count: int = 3) -> list[str]:
        """The end of its log, for the terminal."""
        if self.log is None:
            return []
        try:
            with open(self.log, "rb") as handle:
                handle.seek(0, os.SEEK_END)
                handle.seek(max(0, handle.tell() - 4096))
                lines = handle.read().decode(errors="replace").splitlines()
        except OSError:
            return []
        return [line for line in lines if line.strip()][-count:]


def open_log(path: Path) -> int:
    """A descriptor that appends to a child's log, cut to one older file when it has grown."""
    rotate(path)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def rotate(path: Path) -> None:
    """Keep a log under its limit: copy it aside and empty it, so that a child that has it open writes on."""
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_size > LOG_LIMIT_BYTES:
            path.with_suffix(".log.1").write_bytes(path.read_bytes())
            os.truncate(path, 0)


def spawn(
    command: list[str],
    *,
    log: Path,
    environment: dict[str, str],
    cwd: str = "/",
    death_signal: int = signal.SIGKILL,
    **popen: Any,
) -> subprocess.Popen[bytes]:
    """Start a program in a session of its own, its output in a log, ended by the kernel if this process
    ends."""
    descriptor = open_log(log)
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=descriptor,
            cwd=cwd,
            env=environment,
            start_new_session=True,
            preexec_fn=die_with_parent(death_signal),
            **popen,
        )
    finally:
        os.close(descriptor)


def describe_exit(code: int) -> str:
    """An exit code in words."""
    if code < 0:
        try:
            return f"was ended by {signal.Signals(-code).name}"
        except ValueError:
            return f"was ended by signal {-code}"
    return f"ended with code {code}"
