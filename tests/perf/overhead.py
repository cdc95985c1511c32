"""What a lease costs the work inside it: a CPU-bound and an I/O-bound job, by their own clocks, inside and outside.

Inside means started by the real agent as a lease, with its cards sampled each second, its output streamed and its
folder on the same disk; outside means the same program by hand, under the same account. Pairs alternate in order, and
the figure is the median of the pairs' differences, so that a machine that becomes slower meanwhile counts for both.
"""

from __future__ import annotations

import os
import pwd
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from tests.perf._agent_site import Site, site

PAIRS = 5
CPU = """
import time
began = time.perf_counter()
n = 0
for i in range(%d):
    n += i * i %% 7
open("seconds", "w").write(str(time.perf_counter() - began))
"""
IO = """
import os, time
began = time.perf_counter()
block = os.urandom(1 << 20)
for turn in range(%d):
    with open("data.bin", "wb") as out:
        for _ in range(16):
            out.write(block)
        out.flush()
        os.fsync(out.fileno())
    with open("data.bin", "rb") as back:
        while back.read(1 << 16):
            pass
    print("turn", turn, flush=True)
open("seconds", "w").write(str(time.perf_counter() - began))
"""
AMOUNTS = {"cpu": (CPU, 20_000_000), "io": (IO, 24)}


def _by_hand(program: str, folder: Path) -> float:
    folder.mkdir()
    more: dict[str, Any] = {}
    if os.geteuid() == 0:
        entry = pwd.getpwnam("nobody")
        os.chown(folder, entry.pw_uid, entry.pw_gid)
        more = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
    with open(folder / "output.log", "w") as log:
        subprocess.run(["/usr/bin/env", "python3", program], cwd=folder, stdout=log, check=True, **more)
    return float((folder / "seconds").read_text())


def _inside(running: Site, program: str) -> float:
    _began, work = running.run(f"exec /usr/bin/env python3 {program}")
    return float((work / "seconds").read_text())


def _measure(folder: Path, running: Site) -> dict[str, float]:
    figures = {}
    for kind, (text, amount) in AMOUNTS.items():
        program = folder / f"{kind}.py"
        program.write_text(text % amount)
        hand, ours = [], []
        for number in range(PAIRS):
            if number % 2 == 0:
                hand.append(_by_hand(str(program), folder / f"{kind}-{number}"))
            ours.append(_inside(running, str(program)))
            if number % 2:
                hand.append(_by_hand(str(program), folder / f"{kind}-{number}"))
        more = [(mine - other) / other * 100 for mine, other in zip(ours, hand, strict=True)]
        figures[f"{kind}_overhead_pct"] = round(statistics.median(more), 2)
        figures[f"{kind}_outside_s"] = round(statistics.median(hand), 3)
        figures[f"{kind}_inside_s"] = round(statistics.median(ours), 3)
    return figures


def run() -> dict[str, Any]:
    """Percent more time inside a lease (less than nothing is noise)."""
    with tempfile.TemporaryDirectory(prefix="gpupool-perf-overhead-") as scratch:
        os.chmod(scratch, 0o755)
        folder = Path(scratch)
        with site(folder) as running:
            figures = _measure(folder, running)
    return {
        "sizes": {"pairs": PAIRS, "cpu_rounds": AMOUNTS["cpu"][1], "io_mib": AMOUNTS["io"][1] * 16},
        "figures": figures,
        "aims": {f"{kind}_overhead_pct": ["<", 1] for kind in AMOUNTS},
    }
