"""Seconds from `manage.py up` to the first page, empty and second time; memory of all processes at rest."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.up.installation import Installation, memory_mb, running

RUNS = 3
REST_SECONDS = 20.0


def _measured(installation: Installation) -> float:
    return installation.wait_page()


def run() -> dict[str, Any]:
    """Three empty and three second starts of the real command; the median counts."""
    scratch = Path(tempfile.mkdtemp(prefix="gpupool-perf-"))
    scratch.chmod(0o755)
    first: list[float] = []
    second: list[float] = []
    stops: list[float] = []
    memory, count = 0.0, 0
    try:
        for number in range(RUNS):
            folder = scratch / f"run{number}"
            with running(folder) as installation:
                first.append(_measured(installation))
                installation.wait_running()
            with running(folder) as installation:
                second.append(_measured(installation))
                installation.wait_running()
                if number == RUNS - 1:
                    time.sleep(REST_SECONDS)
                    everyone = installation.processes()
                    memory, count = memory_mb(everyone), len(everyone)
                began = time.monotonic()
                installation.stop()
                stops.append(time.monotonic() - began)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return {
        "sizes": {"runs": RUNS, "processes": count, "rest_seconds": REST_SECONDS},
        "figures": {
            "first_page_empty_s": round(statistics.median(first), 2),
            "first_page_second_s": round(statistics.median(second), 2),
            "stop_s": round(statistics.median(stops), 2),
            "pss_at_rest_mb": round(memory),
        },
        "aims": {"first_page_empty_s": 8, "first_page_second_s": 5, "pss_at_rest_mb": 700},
    }
