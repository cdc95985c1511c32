"""The whole way from a laptop to a card: web process, agent with fake cards, scheduler, the real program."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from django.db import connections

from pool.client import build
from pool.models import Gpu, Node
from pool.services.cycle import schedule_cycle
from pool.services.execution import execution_reconcile
from portal.accounts.models import User
from portal.ops.services.outbox import outbox_deliver
from tests.pool.agent.conftest import (
    PATIENCE,
    ROOT,
    FakeNvml,
    Process,
    Site,
    agent,
    code,
    enrolled,
    nvml,
    nvml_library,
    online,
    serving,
    wait_for,
)
from tests.portal.builders import token_of
from tests.quotas import build as quota

__all__ = ["agent", "code", "enrolled", "nvml", "nvml_library", "online"]


@pytest.fixture
def site(transactional_db: None, settings: Any) -> Iterator[Site]:
    """All pages, the API and the sockets of machines."""
    settings.ALLOWED_HOSTS = ["*"]
    yield from serving()


@dataclass
class Laptop:
    """One person's machine: the program, its settings, its folder."""

    home: Path
    folder: Path
    program: list[str]
    environment: dict[str, str]
    running: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, *words: str, **more: Any) -> subprocess.Popen[str]:
        """The program with these words, its output kept apart."""
        process = subprocess.Popen(
            [*self.program, *words],
            env=self.environment,
            cwd=self.folder,
            stdin=more.get("stdin", subprocess.DEVNULL),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.running.append(process)
        return process

    def call(self, *words: str, timeout: float = PATIENCE, given: str | None = None) -> tuple[int, str, str]:
        """(exit code, standard output, standard error) of the program with these words."""
        process = self.start(*words, stdin=subprocess.PIPE if given is not None else subprocess.DEVNULL)
        out, err = process.communicate(given, timeout=timeout)
        return process.returncode, out, err

    def write(self, name: str, text: str) -> Path:
        """A file in the folder."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path


@pytest.fixture(scope="session")
def gpupool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that the installation serves."""
    path = tmp_path_factory.mktemp("gpupool") / "gpupool"
    path.write_bytes(build.build())
    return path


@pytest.fixture
def lin(transactional_db: None) -> User:
    """A researcher of a department."""
    team = quota.department("vision", name="Vision")
    who = quota.user("lin", home=team, system_account="nobody")
    quota.role(who, "researcher", team)
    return who


def laptop_of(who: User, site: Site, program: Path, folder: Path) -> Laptop:
    """A machine where this person is signed in."""
    home, work = folder / f"home-{who.username}", folder / f"work-{who.username}"
    home.mkdir()
    work.mkdir()
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    environment = kept | {"HOME": str(home), "GPUPOOL_LANGUAGE": "en", "TERM": "xterm"}
    made = Laptop(home, work, [sys.executable, "-I", str(program)], environment)
    code, _out, err = made.call(
        "login", site.url, "--token-stdin", given=token_of(who, "read", "request") + "\n"
    )
    assert code == 0, err
    return made


@pytest.fixture
def laptop(lin: User, site: Site, gpupool: Path, tmp_path: Path) -> Iterator[Laptop]:
    """Lin's machine, signed in."""
    made = laptop_of(lin, site, gpupool, tmp_path)
    yield made
    for process in made.running:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()


@pytest.fixture
def pool(online: Process, lin: User, nvml: FakeNvml) -> Iterator[Node]:
    """One node with two cards, a quota for them, and a scheduler that works as the beat would drive it."""
    for gpu in Gpu.objects.select_related("flavour"):
        assert gpu.flavour is not None
        quota.limits(lin.home_department, gpu.flavour, 2)  # type: ignore[arg-type]
    stop = threading.Event()

    def beat() -> None:
        while not stop.is_set():
            try:
                outbox_deliver()
                schedule_cycle(cause="test")
                execution_reconcile()
            except Exception as error:  # another thread of the test was at the same row
                print("beat:", repr(error))
            stop.wait(0.3)
        connections.close_all()

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    yield Node.objects.get()
    stop.set()
    thread.join(30)


def refs(text: str) -> list[str]:
    """R-numbers in a text, in order."""
    return [word.strip(":,") for word in text.split() if word.startswith("R-")]


__all__ += ["ROOT", "json", "wait_for"]
