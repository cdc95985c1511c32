"""What a lease costs the work inside it: a CPU-bound and an I/O-bound job, by their own clocks, inside and outside.

Inside means started by the real agent as a lease, with its cards sampled each second, its output streamed and its
folder on the same disk; outside means the same program by hand, under the same account. Pairs alternate in order, and
the figure is the median of the pairs' differences, so that a machine that becomes slower meanwhile counts for both.
Two clocks: the wall's, by which a busy machine makes single pairs differ by more than what is measured, and the job's
own CPU time, which says what the lease adds to its work.
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

PAIRS = 7
CPU = """
import time
began = time.perf_counter()
n = 0
for i in range(%d):
    n += i * i %% 7
open("seconds", "w").write(f"{time.perf_counter() - began} {time.process_time()}")
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
open("seconds", "w").write(f"{time.perf_counter() - began} {time.process_time()}")
"""
AMOUNTS = {"cpu": (CPU, 20_000_000), "io": (IO, 24)}


def _said(folder: Path) -> tuple[float, float]:
    """Seconds on the wall and of CPU, as the program wrote them."""
    wall, cpu = (folder / "seconds").read_text().split()
    return float(wall), float(cpu)


def _by_hand(program: str, folder: Path) -> tuple[float, float]:
    folder.mkdir()
    more: dict[str, Any] = {}
    if os.geteuid() == 0:
        entry = pwd.getpwnam("nobody")
        os.chown(folder, entry.pw_uid, entry.pw_gid)
        more = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
    with open(folder / "output.log", "w") as log:
        subprocess.run(["/usr/bin/env", "python3", program], cwd=folder, stdout=log, check=True, **more)
    return _said(folder)


def _inside(running: Site, program: str) -> tuple[float, float]:
    _began, work = running.run(f"exec /usr/bin/env python3 {program}")
    return _said(work)


def _more(ours: list[float], hand: list[float]) -> float:
    return round(
        statistics.median((mine - other) / other * 100 for mine, other in zip(ours, hand, strict=True)), 2
    )


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
        ours_wall, ours_cpu = [wall for wall, _cpu in ours], [cpu for _wall, cpu in ours]
        hand_wall, hand_cpu = [wall for wall, _cpu in hand], [cpu for _wall, cpu in hand]
        figures[f"{kind}_overhead_pct"] = _more(ours_wall, hand_wall)
        figures[f"{kind}_overhead_cpu_time_pct"] = _more(ours_cpu, hand_cpu)
        figures[f"{kind}_outside_s"] = round(statistics.median(hand_wall), 3)
        figures[f"{kind}_inside_s"] = round(statistics.median(ours_wall), 3)
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
