"""Driving `manage.py up` as a person would: start it, read what it says, ask pages, end it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent.parent
PATIENCE = 180.0  # seconds; a machine may be slow, and what comes at all comes long before


def wait_for(what: Callable[[], Any], *, say: str = "it", pause: float = 0.05) -> Any:
    """Ask until the answer is true; AssertionError after the limit."""
    end = time.monotonic() + PATIENCE
    while True:
        answer = what()
        if answer:
            return answer
        if time.monotonic() > end:
            raise AssertionError(f"{say} did not come within {PATIENCE:g} s")
        time.sleep(pause)


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def clean_environment(**extra: str) -> dict[str, str]:
    """This process's environment without the tests' own servers and settings."""
    ours = ("DATABASE_URL", "REDIS_URL", "GPUPOOL_", "DJANGO_", "PYTEST_")
    return {**{k: v for k, v in os.environ.items() if not k.startswith(ours)}, **extra}


class Installation:
    """One run of `manage.py up` on a folder."""

    def __init__(
        self,
        folder: Path,
        *words: str,
        prefix: tuple[str, ...] = (),
        python: str = sys.executable,
        **environment: str,
    ) -> None:
        self.folder = folder
        self.demo = "--demo" in words
        self.port = free_port()
        self.began = time.monotonic()
        self.output = folder.parent / f"{folder.name}.out"
        command = [
            *prefix,
            python,
            "manage.py",
            "up",
            "--data",
            str(folder),
            "--port",
            str(self.port),
        ]
        with open(self.output, "ab") as handle:
            self.process = subprocess.Popen(
                [*command, *words],
                cwd=ROOT,
                env=clean_environment(**environment),
                stdin=subprocess.DEVNULL,
                stdout=handle,
                stderr=handle,
                start_new_session=True,
            )

    @property
    def home(self) -> Path:
        return self.folder / "demo" if self.demo else self.folder

    @property
    def said(self) -> str:
        """All that it printed so far."""
        return self.output.read_text(errors="replace")

    def get(self, path: str = "/", limit: float = 30.0) -> tuple[int, str]:
        """Status and body of a page, redirects followed; 0 where nothing answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=limit) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode(errors="replace")
        except OSError:
            return 0, ""

    def wait_page(self) -> float:
        """Seconds from the start until the first page (the sign-in page) came."""

        def come() -> bool:
            assert self.process.poll() is None, self.said
            return self.get("/accounts/login/", limit=30)[0] == 200

        wait_for(come, say=f"the first page of {self.folder}")
        return time.monotonic() - self.began

    def wait_running(self, *more: str) -> None:
        """Until every part that pages and tasks need is up, and those named."""
        parts = {"fork", "postgres", "valkey", "web", "worker", "beat", *more}

        def up() -> bool:
            assert self.process.poll() is None, self.said
            rows = self.status().get("children", [])
            return (
                self.status().get("state") == "running"
                and {r["name"] for r in rows if r["state"] == "running"} >= parts
            )

        wait_for(up, say="all processes")

    def status(self) -> dict[str, Any]:
        """What status.json says, {} while there is none."""
        with contextlib.suppress(OSError, ValueError):
            found: dict[str, Any] = json.loads((self.home / "status.json").read_text())
            if found["supervisor"]["pid"] == self.process.pid:  # else it is an earlier start's
                return found
        return {}

    def pid(self, name: str) -> int | None:
        """Process id of a child by its name in status.json."""
        for row in self.status().get("children", []):
            if row["name"] == name:
                return row["pid"]
        return None

    def processes(self) -> list[psutil.Process]:
        """The supervisor and all below it."""
        try:
            head = psutil.Process(self.process.pid)
            return [head, *head.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def first_sign_in(self) -> tuple[str, str] | None:
        found = re.search(r"First sign-in: (\S+) / (\S+)", self.said)
        return (found.group(1), found.group(2)) if found else None

    def stop(self, sig: int = signal.SIGTERM) -> int:
        """Ask it to end and wait; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(sig)
        return self.process.wait(PATIENCE)

    def psql(self, sql: str) -> str:
        """Ask the running installation's database as its administrator."""
        from portal.up.layout import Layout, load_secrets
        from portal.up.postgres import EmbeddedPostgres

        layout = Layout(self.folder, self.demo)
        return EmbeddedPostgres.of(layout, load_secrets(layout)).psql(sql, database=layout.database).strip()


@contextlib.contextmanager
def open_folder() -> Iterator[Path]:
    """A new folder that other accounts may pass through, as the database's; pytest's own are closed to them."""
    folder = Path(tempfile.mkdtemp(prefix="gpupool-up-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def running(folder: Path, *words: str, **more: Any) -> Iterator[Installation]:
    """An installation for a block of a test, ended after it however the test went."""
    installation = Installation(folder, *words, **more)
    try:
        yield installation
    finally:
        everyone = installation.processes()
        try:
            installation.stop()
        except subprocess.TimeoutExpired:
            for process in everyone:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()


def gone(processes: list[psutil.Process]) -> bool:
    """Whether none of these runs any more (psutil tells a process from a later one with its number)."""
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in _alive(processes))


def _alive(processes: list[psutil.Process]) -> Iterator[psutil.Process]:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.status()
            yield process


def memory_mb(processes: list[psutil.Process]) -> float:
    """Proportional set size of processes together, in MB: shared pages counted once."""
    total = 0
    for process in processes:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1])
    return total / 1024
