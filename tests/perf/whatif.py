"""A week of a real queue (12,751 gang jobs of 15 departments on 480 GPUs) played again three ways: hard quotas,
borrowing without taking back, borrowing with it. Seconds each, and the figures of the checker of the record.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "traces" / "quota"
JOBS, QUOTAS, CHECKER = "jobs_week1.csv", "quotas.csv", "verify_replay.py"
KEYS = (
    "util_pct",
    "idle_wanted_gpuh",
    "shortfall_gpuh",
    "preemptions",
    "wait_p50",
    "borrowed_gpuh",
    "violations",
)


def run() -> dict[str, Any]:
    """Aims: what a good scheduler reaches with borrowing and taking back, and seconds of that play."""
    from pool.engine.model import Policy
    from pool.engine.past import play
    from pool.engine.past_changes import Changes, changed
    from pool.engine.past_measures import measure
    from pool.engine.past_trace import events, trace_past

    trace = trace_past(_rows(JOBS), _rows(QUOTAS))
    sides = {
        "hard": Changes(borrowing=False),
        "borrow": Changes(policy=Policy(reclaim=False)),
        "reclaim": Changes(),
    }
    figures: dict[str, float] = {}
    for name, changes in sides.items():
        setting = changed(trace.setting, changes)
        began = time.monotonic()
        # a hard quota may leave a queue for weeks after the last job came: the measured window is enough
        played = play(trace.pieces, setting, trace.until if name == "hard" else None)
        figures[f"{name}_s"] = round(time.monotonic() - began, 1)
        checked = _check(events(trace, played.runs))
        figures |= {f"{name}_{key}": checked[key] for key in KEYS}
        own = measure(trace.pieces, setting, played, 0, trace.until).flavours["gpu"]
        figures[f"{name}_own_idle_wanted_gpuh"] = round(own.idle_wanted / 3_600_000, 1)
    return {
        "sizes": {"jobs": len(trace.pieces), "gpus": 480, "departments": 15},
        "figures": figures,
        "aims": {
            "reclaim_s": ["<", 60],
            "reclaim_violations": ["<", 1],
            "reclaim_util_pct": [">=", 72],
            "reclaim_idle_wanted_gpuh": ["<", 1],
            "reclaim_shortfall_gpuh": ["<", 1],
            "reclaim_preemptions": ["<", 284],
        },
    }


def _rows(name: str) -> list[dict[str, str]]:
    with (FOLDER / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _check(found: list[tuple[int, str, str]]) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile("w", suffix=".csv", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(("t", "job_id", "event"))
        writer.writerows((at / 1000, job, kind) for at, job, kind in found)
        out.flush()
        done = subprocess.run(
            [sys.executable, FOLDER / CHECKER, FOLDER / JOBS, FOLDER / QUOTAS, out.name, "--json"],
            capture_output=True,
            text=True,
            check=False,
        )
    return dict(json.loads(done.stdout))
