"""The agent's section of `start`: a database, the web process and an agent of its own; a shell by hand beside it.

By hand means what the agent must do as well, from a shell: a new session under the job's account, in a folder of its
own, with its output in a file; the time until the command runs.
"""

from __future__ import annotations

import os
import pwd
import subprocess
import tempfile
import time
from pathlib import Path

from tests.perf._agent_site import Site, site
from tests.perf.start import Times

STAMP = "date +%s.%N > began"


def measure(rounds: int) -> Times:
    """Seconds from the decision (the order's transaction begins) to the command running, by its own clock."""
    with tempfile.TemporaryDirectory(prefix="gpupool-perf-start-") as folder:
        os.chmod(folder, 0o755)
        with site(Path(folder)) as running:
            _ours(running)  # the first one pays for imports
            return Times([_ours(running) for _ in range(rounds)], [_bare(folder, i) for i in range(rounds)])


def _ours(running: Site) -> float:
    began, work = running.run(STAMP)
    return float((work / "began").read_text()) - began


def _bare(folder: str, number: int) -> float:
    where = Path(folder, f"bare-{number}")
    where.mkdir()
    more = {}
    if os.geteuid() == 0:
        entry = pwd.getpwnam("nobody")
        os.chown(where, entry.pw_uid, entry.pw_gid)
        more = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
    began = time.time()
    with open(where / "output.log", "w") as log:
        subprocess.run(
            ["/bin/sh", "-c", STAMP],
            cwd=where,
            stdout=log,
            stderr=log,
            start_new_session=True,
            check=True,
            **more,
        )  # type: ignore[call-overload]
    return float((where / "began").read_text()) - began
