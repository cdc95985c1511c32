"""How often a told start range holds: a recorded week under tight department quotas through the engine, and for each
fourth job that had to wait the range from history that it would have been told when it came in line.

The learning begins with the week itself, from an empty pool: what is told while nothing is known yet (no range) is
counted apart. Promises of the plan are not in the measure; they tell a narrower range to the first of a line.
"""

from __future__ import annotations

import csv
import statistics
from pathlib import Path
from typing import Any

TOLD_EVERY = 4
"""All jobs are learnt from; telling costs what a look at all who wait costs."""
TRACES = Path(__file__).resolve().parents[2].parent / "shared" / "traces" / "quota"


def run(jobs: str = "jobs_week1.csv", quotas: str = "quotas_tight.csv") -> dict[str, Any]:
    """Share of true first starts inside the range told, its median width, and how many were told none."""
    from pool.engine.replay_jobs import Job, replay

    asked = [
        Job(
            row["job_id"],
            int(float(row["submit_time"]) * 1000),
            int(float(row["duration"]) * 1000),
            int(row["gpu_num"]),
            row["vc"],
        )
        for row in _rows(jobs)
    ]
    outcome = replay(asked, {row["vc"]: int(row["nominal_gpus"]) for row in _rows(quotas)})
    started: dict[str, int] = {}
    for event in outcome.events:
        if event.kind == "start":
            started.setdefault(event.job, event.at)
    sizes = {"jobs": len(asked), "started": len(started), "one_told_in": TOLD_EVERY}
    return {"sizes": sizes, **judge(asked, started)}


def judge(jobs: list[Any], started: dict[str, int]) -> dict[str, Any]:
    """Play arrivals and first starts through the outlook."""
    from pool.engine.waits import Outlook

    by_id = {job.id: job for job in jobs}
    events = [(job.submitted, 0, job.id) for job in jobs if job.id in started]
    events += [(at, 1, job_id) for job_id, at in started.items()]
    outlook = Outlook()
    told: dict[str, tuple[int, int] | None] = {}
    inside, widths, waits, silent, number = 0, [], [], 0, 0
    for at, kind, job_id in sorted(events):
        job = by_id[job_id]
        if kind == 0:
            milli = job.gpus * 1000
            ahead = outlook.arrive(job_id, job.department, milli, at)
            number += 1
            if number % TOLD_EVERY == 0:
                told[job_id] = outlook.span(job.department, milli, ahead, at)
            continue
        outlook.start(job_id, at)
        if at <= job.submitted or job_id not in told:
            continue
        waits.append(at - job.submitted)
        span = told[job_id]
        if span is None:
            silent += 1
            continue
        widths.append(span[1] - span[0])
        inside += span[0] <= at <= span[1]
    return {
        "figures": {
            "inside_percent": round(100 * inside / max(1, len(widths)), 1),
            "median_width_min": round(statistics.median(widths) / 60_000, 1) if widths else 0.0,
            "median_wait_min": round(statistics.median(waits) / 60_000, 1) if waits else 0.0,
            "told": len(widths),
            "told_none": silent,
        },
        "aims": {"inside_percent": [">=", 80]},
    }


def _rows(name: str) -> list[dict[str, str]]:
    with (TRACES / name).open() as handle:
        return list(csv.DictReader(handle))
