"""Real parts: the ASGI application under uvicorn, the agent as a process of its own, a fake NVML under it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pool.agent import procs

ROOT = Path(__file__).resolve().parents[3]
NATIVE = ROOT / "tests" / "native" / "fake_nvml.c"
PATIENCE = 240.0
"""Only so that what never comes ends the test: a loaded machine takes its time."""


def wait_for(what: Callable[[], Any], timeout: float = PATIENCE, pause: float = 0.05) -> Any:
    """The first true answer of `what`; fails the test when there is none in time."""
    deadline = time.monotonic() + timeout
    while True:
        found = what()
        if found:
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout} s in vain")
        time.sleep(pause)


def python38() -> str | None:
    """A real Python 3.8 where this machine has one."""
    found = shutil.which("python3.8")
    places = sorted(Path.home().glob(".pyenv/versions/3.8.*/bin/python3.8"))
    candidates = [str(place) for place in places] + ([found] if found else [])
    for candidate in candidates:
        if subprocess.run([candidate, "-c", ""], capture_output=True, check=False).returncode == 0:
            return candidate
    return None


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the compiled fake library."""
    folder = tmp_path_factory.mktemp("nvml")
    command = ["gcc", "-shared", "-fPIC", "-O2", "-Wl,-soname,libnvidia-ml.so.1"]
    subprocess.run([*command, "-o", str(folder / "libnvidia-ml.so.1"), str(NATIVE), "-lpthread"], check=True)
    return folder


@dataclass
class FakeNvml:
    """The state file under the fake library; it is read at each call, so a write changes the card at once."""

    folder: Path
    file: Path
    values: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def set(self, **values: Any) -> None:
        """`gpu_0_util=5` becomes `gpu.0.util=5`; None removes."""
        for name, value in values.items():
            key = name
            if name.startswith("gpu_"):
                _, index, rest = name.split("_", 2)
                key = f"gpu.{index}.{rest}"
            if value is None:
                self.values.pop(key, None)
            else:
                self.values[key] = str(value)
        self.write()

    def write(self) -> None:
        new = self.file.with_suffix(".new")
        text = "".join(f"{key}={value}\n" for key, value in self.values.items())
        new.write_text(text + "".join(f"{line}\n" for line in self.lines))
        os.replace(new, self.file)

    @property
    def environment(self) -> dict[str, str]:
        return {"FAKE_NVML_FILE": str(self.file), "LD_LIBRARY_PATH": str(self.folder)}


@pytest.fixture
def nvml(nvml_library: Path, tmp_path: Path) -> FakeNvml:
    """Two A100s of this test alone."""
    fake = FakeNvml(nvml_library, tmp_path / "nvml.txt")
    fake.set(count=2, gpu_0_uuid="GPU-test-0", gpu_1_uuid="GPU-test-1", gpu_0_util=10, gpu_1_util=20)
    return fake


@dataclass
class Site:
    """The running web process: its address, and the samples its sink took."""

    port: int
    samples: list[tuple[int, dict[str, Any]]]
    stop: Callable[[], None]
    start: Callable[[], None]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def site(transactional_db: None, settings: Any) -> Iterator[Site]:
    """The agent's pages and its socket under uvicorn on a free port; it can be stopped and started again."""
    settings.ALLOWED_HOSTS = ["*"]
    settings.ROOT_URLCONF = "tests.pool.agent.urls"
    yield from serving()


def serving() -> Iterator[Site]:
    """What the settings' addresses serve, and the sockets of agents and of people's machines."""
    import uvicorn
    from channels.layers import channel_layers
    from channels.routing import ProtocolTypeRouter, URLRouter
    from django.core.asgi import get_asgi_application
    from django.urls import path

    from pool.live.agent_socket import AgentConsumer
    from pool.live.routing import machine_urlpatterns

    channel_layers.backends.clear()  # the layer of a server before belongs to its event loop
    samples: list[tuple[int, dict[str, Any]]] = []

    async def sink(node_id: int, message: dict[str, Any]) -> None:
        samples.append((node_id, message))

    application = ProtocolTypeRouter(
        {
            "http": get_asgi_application(),
            "websocket": URLRouter(
                [path("agent/ws/", AgentConsumer.as_asgi(on_samples=sink)), *machine_urlpatterns]
            ),
        }
    )
    port = free_port()
    running: dict[str, Any] = {}

    def start() -> None:
        config = uvicorn.Config(
            application,
            port=port,
            log_level="warning",
            lifespan="off",
            ws="websockets-sansio",
            timeout_graceful_shutdown=1,
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
        thread.start()
        running.update(server=server, thread=thread)
        wait_for(lambda: server.started)

    def stop() -> None:
        if running:
            running["server"].should_exit = True
            running["thread"].join(30)
            running.clear()

    start()
    yield Site(port, samples, stop, start)
    stop()


@dataclass
class Process:
    """One agent process over one state folder."""

    state: Path
    environment: dict[str, str]
    program: list[str]
    process: subprocess.Popen[bytes] | None = None

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.program, "--state", str(self.state), *words],
            env=self.environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )

    def start(self, *words: str) -> None:
        with open(self.state.parent / "agent.log", "ab") as log:
            self.process = subprocess.Popen(
                [*self.program, "--state", str(self.state), "run", *words],
                env=self.environment,
                cwd=ROOT,
                stdout=log,
                stderr=log,
            )

    def end(self, number: int = signal.SIGTERM) -> None:
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait(PATIENCE)
            self.process = None

    @property
    def log(self) -> str:
        return (self.state.parent / "agent.log").read_text()

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.command("status").stdout)
        return answer


def clean_environment(more: dict[str, str]) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    return kept | {"GPUPOOL_KMSG": "/dev/null"} | more


def kill_jobs(state: Path) -> None:
    """End what a test's jobs left, by the pids in their folders."""
    for file in state.glob("jobs/*/run.json"):
        run = json.loads(file.read_text())
        for pid, ticks in ((run["shim_pid"], run["shim_ticks"]), (run["pid"], run["ticks"])):
            if procs.alive(pid, ticks):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def agent(tmp_path: Path, nvml: FakeNvml) -> Iterator[Process]:
    """An agent from the source tree, not enrolled yet."""
    state = tmp_path / "state"
    made = Process(state, clean_environment(nvml.environment), [sys.executable, "-m", "pool.agent"])
    yield made
    if made.process is not None:
        made.process.kill()
        made.process.wait()
    kill_jobs(state)
    if (
        state.exists()
    ):  # where a root agent's jobs worked, as pytest's own folders are closed to other accounts
        shutil.rmtree(f"/var/tmp/gpupool-work-{state.stat().st_ino}", ignore_errors=True)


@pytest.fixture
def code(transactional_db: None) -> str:
    """A one-time code for a new node."""
    from pool.services.enrolment import enrolment_code_create
    from portal.ops.actor import SYSTEM

    return enrolment_code_create(acting_user=SYSTEM, node_name="test-node")


@pytest.fixture
def enrolled(agent: Process, site: Site, code: str) -> Process:
    """The agent with its token, not running yet; its jobs run as nobody."""
    answer = agent.command("enrol", code, "--url", site.url, "--job-account", "nobody")
    assert answer.returncode == 0, answer.stderr
    return agent


@pytest.fixture
def online(enrolled: Process) -> Process:
    """The running agent, connected, its cards known."""
    from pool.models import Gpu, Node

    enrolled.start()
    wait_for(lambda: Gpu.objects.count() == 2 and Node.objects.get().health == "ok")
    return enrolled
