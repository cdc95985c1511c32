"""A database, the web process and one real agent with fake cards, for measurements of what runs under it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.perf._database import fresh_database

NATIVE = Path(__file__).resolve().parents[1] / "native" / "fake_nvml.c"
PATIENCE = 60.0
CARDS = 8


@dataclass
class Site:
    """The node, and where its jobs work."""

    node: Any
    work: Path

    def run(self, command: str) -> tuple[float, Path]:
        """Run a command as an allocation to its end: when it was decided (seconds since 1970), and its folder."""
        from tests.pool.agent.builders import allocation, start

        self.node.refresh_from_db()  # its last heartbeat
        member = allocation(self.node, command)
        began = time.time()
        start(member)
        deadline = time.monotonic() + PATIENCE * 5
        while member.state not in ("exited", "free"):
            time.sleep(0.02)
            member.refresh_from_db()
            if time.monotonic() > deadline:
                raise RuntimeError(f"{command!r} did not end: {member.state}")
        if member.exit_code != 0:
            raise RuntimeError(f"{command!r} failed: {member.allocation.error_detail}")
        request = member.allocation.request
        return began, self.work / f"{request.ref}-{request.uid.hex[-8:]}"


@contextlib.contextmanager
def site(folder: Path, sample_s: float = 1.0) -> Iterator[Site]:
    """Bring it up below `folder` (open to all), and take it down."""
    library = folder / "libnvidia-ml.so.1"
    build = [
        "gcc",
        "-shared",
        "-fPIC",
        "-O2",
        "-Wl,-soname,libnvidia-ml.so.1",
        "-o",
        str(library),
        str(NATIVE),
    ]
    subprocess.run([*build, "-lpthread"], check=True, stderr=subprocess.DEVNULL)
    (folder / "nvml.txt").write_text(f"count={CARDS}\n")
    with fresh_database():
        import structlog
        from django.conf import settings

        from pool.agent.build import build as agent_file
        from pool.models import Cluster, Node
        from pool.services.enrolment import enrolment_code_create
        from portal.ops.actor import SYSTEM
        from tests.pool.agent.conftest import serving

        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
        settings.ALLOWED_HOSTS = ["*"]
        program, state = folder / "agent.pyz", folder / "state"
        program.write_bytes(agent_file())
        environment = {
            "PATH": os.environ["PATH"],
            "LD_LIBRARY_PATH": str(folder),
            "FAKE_NVML_FILE": str(folder / "nvml.txt"),
            "GPUPOOL_KMSG": "/dev/null",
        }
        command = [sys.executable, str(program), "--state", str(state), "--log-level", "ERROR"]
        with contextlib.contextmanager(serving)() as web:
            code = enrolment_code_create(acting_user=SYSTEM, node_name="measured")
            Cluster.objects.update(settings={"sample_s": sample_s})
            words = ["enrol", code, "--url", web.url, "--job-account", "nobody"]
            subprocess.run([*command, *words], env=environment, check=True, stdout=subprocess.DEVNULL)
            agent = subprocess.Popen([*command, "run"], env=environment)
            try:
                deadline = time.monotonic() + PATIENCE
                while not Node.objects.filter(health="ok").exists():
                    time.sleep(0.1)
                    if time.monotonic() > deadline:
                        raise RuntimeError("the agent did not come")
                yield Site(Node.objects.select_related("cluster").get(), state / "work")
            finally:
                agent.terminate()
                agent.wait(15)
                shutil.rmtree(state, ignore_errors=True)
