"""The supervisor's one loop: children are started, watched, started again and stopped here; what they are is
not its affair."""

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from portal.up.errors import UpError
from portal.up.forks import Forks
from portal.up.layout import Layout
from portal.up.process import Child, Handle, describe_exit, rotate
from portal.up.status import StatusFile

TICK_SECONDS = 0.5
START_LIMIT_SECONDS = 120.0
ONCE_LIMIT_SECONDS = 600.0
# Stopped from the top down: who asks before who answers, the database last.
STOP_ORDER = (
    ("demo history", "demo fleet", "agent"),
    ("beat",),
    ("worker", "web"),
    ("fork",),
    ("valkey",),
    ("postgres",),
)


class Stopped(Exception):
    """A signal asked to stop while something was being waited for."""


class Loop:
    """Children by name, the signals that end them, and the waiting between. One thread; nothing blocks for
    long."""

    layout: Layout
    status: StatusFile

    def __init__(self) -> None:
        self.children: dict[str, Child] = {}
        self.forks: Forks | None = None
        self.stopping = False
        self.ready = False
        self.started = time.monotonic()
        self._results: dict[str, dict[str, Any]] = {}
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)

    # -- talking ------------------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """A line of progress on standard output."""
        with contextlib.suppress(BrokenPipeError, OSError):
            print(f"  {time.monotonic() - self.started:5.1f} s  {text}", flush=True)

    def warn(self, process: str, text: str) -> None:
        """A line on standard error, kept in status.json too."""
        with contextlib.suppress(BrokenPipeError, OSError):
            print(f"up: {process} {text}", file=sys.stderr, flush=True)
        self.status.incident(process, text)

    def _signals(self) -> None:
        signal.set_wakeup_fd(self._wake_write)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if sig != signal.SIGHUP or signal.getsignal(sig) != signal.SIG_IGN:  # nohup stays nohup
                signal.signal(sig, self._asked_to_stop)

    def _asked_to_stop(self, *_: Any) -> None:
        if self.stopping:  # asked twice: no more patience
            for child in self.children.values():
                child.signal(signal.SIGQUIT if child.name == "postgres" else signal.SIGKILL)
        self.stopping = True

    # -- children -----------------------------------------------------------------------------------------

    def _child(self, name: str, start: Callable[[], Handle | None], **more: Any) -> Child:
        more.setdefault("log", self.layout.logs / f"{name.replace(' ', '-')}.log")
        child = self.children[name] = Child(name, start, **more)
        return child

    def _forked(self, name: str, role: str, arguments: list[Any], **more: Any) -> Child:
        log = self.layout.logs / f"{name.replace(' ', '-')}.log"

        def start() -> Handle | None:
            assert self.forks is not None
            return self.forks.fork(role, arguments, log=log, name=name, death_signal=signal.SIGKILL)

        return self._child(name, start, log=log, **more)

    def _once(self, name: str, role: str, arguments: list[Any], *, again: int = 0) -> None:
        self._forked(name, role, arguments, once=True, again=again, patience=5.0)

    def _want(self, *names: str) -> None:
        for name in names:
            self.children[name].wanted = True
        self._turn(0)

    def _run_once(self, name: str, failure: str) -> None:
        """Run a `once` child to its end; UpError with its last words where it failed or took too long."""
        child = self.children[name]
        self._want(name)
        if not self._until(lambda: not child.wanted and child.handle is None, limit=ONCE_LIMIT_SECONDS):
            words = child.last_lines(1)
            last = f"; its last words: {words[0]}" if words else ""
            raise UpError(
                f"{failure}: it took longer than {ONCE_LIMIT_SECONDS:g} s and was given up{last} (see {child.log})"
            )
        if child.last_exit != 0:
            words = child.last_lines(1)
            raise UpError(
                f"{failure}: {words[0] if words else describe_exit(child.last_exit or 0)} (see {child.log})"
            )
        del self.children[name]

    def _reported(self, name: str, message: dict[str, Any]) -> None:
        if message.get("ready") and name in self.children:
            self.children[name].ready = True
        if "say" in message:
            self.say(f"{name}: {message['say']}")
        self._results.setdefault(name, {}).update(message)

    # -- the loop -----------------------------------------------------------------------------------------

    def _turn(self, timeout: float) -> None:
        """Wait for news at most so long, then look at every child and start what is due."""
        waiting: list[int] = [self._wake_read]
        control = self.forks.fileno() if self.forks else None
        if control is not None:
            waiting.append(control)
        with contextlib.suppress(InterruptedError):
            select.select(waiting, [], [], timeout)
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        if self.forks:
            self.forks.pump()
        now = time.monotonic()
        for child in list(self.children.values()):
            code = child.check(now)
            if code is not None:
                self._ended(child, code)
            if not self.stopping:
                self._begin(child, now)
        self._mark_ready(now)
        self.status.write(list(self.children.values()))

    def _begin(self, child: Child, now: float) -> None:
        try:
            child.begin(now)
        except OSError as error:  # a full disk, a program that is gone: it is tried again like a crash
            child.missed(now)
            self.warn(child.name, f"cannot start: {error}; trying again in {child.pause:g} s")

    def _mark_ready(self, now: float) -> None:
        """Programs that do not report count as ready when they have run for a second."""
        for child in self.children.values():
            if child.handle and not child.ready and now - child.started_at > 1.0 and self.ready:
                child.ready = child.name in ("postgres", "valkey", "agent") or (
                    child.name == "fork" and self.forks is not None and self.forks.loaded
                )

    def _ended(self, child: Child, code: int) -> None:
        if child.name == "fork" and self.forks:
            self.forks.close()
            if not self.stopping:
                for other in self.children.values():
                    other.check(time.monotonic())
        if self.stopping or (child.once and code == 0):
            return
        text = describe_exit(code)
        if child.once and not self.ready:  # the start fails with this, and says so
            self.status.incident(child.name, text)
        elif child.wanted:
            self.warn(child.name, f"{text}; starting it again in {child.pause:g} s (see {child.log})")
        elif child.once:
            self.warn(child.name, f"{text}; see {child.log}")

    def _until(self, done: Callable[[], bool], *, limit: float = START_LIMIT_SECONDS) -> bool:
        """Turn the loop until something is so; Stopped when a signal came; False when the time is over."""
        end = time.monotonic() + limit
        while not done():
            if self.stopping:
                raise Stopped
            if time.monotonic() > end:
                return False
            self._turn(0.02)
        return True

    def _wait(self, name: str, done: Callable[[], bool], title: str) -> None:
        """Wait for a child during the start; UpError with its last words where it keeps ending."""
        child = self.children[name]
        came = self._until(lambda: done() or child.restarts >= 3)
        if not came or not done():
            words = child.last_lines(1)
            raise UpError(f"{title} does not start: {words[0] if words else 'no answer'} (see {child.log})")

    def _keep(self) -> None:
        """Run until a signal."""
        last_rotation = time.monotonic()
        while not self.stopping:
            self._turn(TICK_SECONDS if self._restless() else 5.0)
            if time.monotonic() - last_rotation > 60.0:
                last_rotation = time.monotonic()
                for log in self.layout.logs.glob("*.log"):
                    rotate(log)

    def _restless(self) -> bool:
        return any(c.wanted and (c.handle is None or not c.ready) for c in self.children.values())

    # -- stopping -----------------------------------------------------------------------------------------

    def _stop(self) -> None:
        """Stop every child in order, with patience and then without; the last word is in status.json."""
        self.stopping = True
        self.status.state = "stopping"
        for child in self.children.values():
            child.wanted = False
        if self.ready:
            print("Stopping.", flush=True)
        known = {name for group in STOP_ORDER for name in group}
        others = tuple(name for name in self.children if name not in known)
        for group in (others, *STOP_ORDER):
            members = [self.children[n] for n in group if n in self.children and self.children[n].handle]
            for child in members:
                child.signal(child.stop_signal)
            self._await_end(members)
        self.status.state = "stopped"
        self.status.write(list(self.children.values()))
        if self.ready:
            self.say("stopped; the data stay in the folder")

    def _await_end(self, members: list[Child]) -> None:
        began = time.monotonic()
        while any(child.handle for child in members):
            self._turn(0.02)
            waited = time.monotonic() - began
            for child in members:
                if child.handle and waited > child.patience:
                    hard = (
                        signal.SIGQUIT
                        if child.name == "postgres" and waited < child.patience + 5
                        else signal.SIGKILL
                    )
                    child.signal(hard)
