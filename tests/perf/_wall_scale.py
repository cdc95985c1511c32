"""A fleet of many cards for measurements of the wall: rows in the database, samples on the bus, a web process."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PER_NODE = 8
PATIENCE = 60.0


@dataclass
class Web:
    """The web process and how to be let in."""

    port: int
    cookie: str
    pid: int


def fleet(cards: int) -> list[int]:
    """So many cards on nodes of eight at four sites, each with a last state; ids in order of the wall."""
    from monitoring.models import GpuState
    from pool.models import Cluster, Gpu, Node, Site
    from portal.kernel.clock import now

    sites = Site.objects.bulk_create([Site(code=f"s{k}", name=f"Site {k}", position=k) for k in range(4)])
    clusters = Cluster.objects.bulk_create(
        [Cluster(code=f"c{k}", name=f"c{k}", site=s) for k, s in enumerate(sites)]
    )
    nodes = Node.objects.bulk_create(
        [
            Node(name=f"n{k:05d}", cluster=clusters[k * 4 * PER_NODE // cards], health="ok")
            for k in range(cards // PER_NODE)
        ]
    )
    made = Gpu.objects.bulk_create(
        [
            Gpu(
                uuid=f"GPU-{k:012d}", node=nodes[k // PER_NODE], index=k % PER_NODE, model_name="NVIDIA H800",
                memory_mib=81559, power_limit_mw=700_000,
            )
            for k in range(cards)
        ],
        batch_size=2000,
    )  # fmt: skip
    at = now()
    GpuState.objects.bulk_create(
        [
            GpuState(
                gpu=g,
                slot=0,
                at=at,
                util_pm=500,
                mem_used_mib=40000,
                mem_total_mib=81559,
                temp_c=60,
                power_mw=1,
            )
            for g in made
        ],
        batch_size=2000,
    )
    return [g.pk for g in made]


def cookie_of(username: str = "watcher") -> str:
    """The session cookie of a person who may look."""
    from django.conf import settings
    from django.test import Client

    from portal.accounts.models import User

    client = Client()
    client.force_login(
        User.objects.create_user(username, f"{username}@example.org", "correct horse battery"),
        backend="django.contrib.auth.backends.ModelBackend",
    )
    return f"{settings.SESSION_COOKIE_NAME}={client.cookies[settings.SESSION_COOKIE_NAME].value}"


@contextlib.contextmanager
def web_process(cookie: str) -> Iterator[Web]:
    """The web role as `up` runs it, in a process of its own."""
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen(2048)
    port = listening.getsockname()[1]
    code = (
        "import sys; from portal.up.roles import run_role; "
        f"sys.exit(run_role('web', ['{listening.fileno()}'], lambda **_: None))"
    )
    environment = {**os.environ, "GPUPOOL_ALLOWED_HOSTS": "127.0.0.1,localhost"}
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        pass_fds=[listening.fileno()],
        env=environment,
        stdout=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=5):
                    break
            except (OSError, urllib.error.URLError):
                if time.monotonic() > deadline or process.poll() is not None:
                    raise RuntimeError("the web process did not come") from None
                time.sleep(0.1)
        yield Web(port, cookie, process.pid)
    finally:
        listening.close()
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:  # thousands of sockets that are still being closed
            process.kill()
            process.wait(20)


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mb(pid: int) -> float:
    """Memory that a process holds."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


def records(ids: list[int], part: int, parts: int, rng: Any) -> bytes:
    """A message of the bus: every `parts`-th card with a sample of now."""
    import numpy as np

    from monitoring.engine import frames

    chosen = np.array(ids[part::parts], np.int64)
    rows = np.zeros(len(chosen), frames.BUS)
    rows["gpu"], rows["at"] = chosen, int(time.time() * 1000)
    rows["util"] = rng.integers(0, 1000, len(chosen))
    rows["mem_used"], rows["mem_total"] = rng.integers(1000, 80000, len(chosen)), 81559
    rows["temp"], rows["power"] = (
        rng.integers(40, 85, len(chosen)),
        rng.integers(90_000, 700_000, len(chosen)),
    )
    rows["sm"] = frames.NONE16
    return frames.bus_samples(rows)
