"""From the decision to the process running, for each kind of cluster, against the bare system beside it.

One section a kind, in a module `_start_KIND.py` with `measure(rounds) -> Times`: for each round the seconds from the
decision (the allocation's row is there) to the executor's confirmation, and the seconds that the bare system needs
for the same (a shell; `sbatch`; `kubectl create` to pod bound). What the machine lacks raises `Missing`: it is named
in `sizes`, and has no figures.

A shell by hand runs after some 20 ms and a bare pod is bound after 10: what writes a decision, sends it, keeps it on
the node's disk and gives it a process that watches it cannot be within 1.2 times of that. There the milliseconds beside
the ratio (`more_than_bare_ms`) say what a person waits; against `sbatch` the ratio means something.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

KINDS = ("agent", "slurm", "kubernetes")
ROUNDS = 20


class Missing(Exception):
    """This machine has not what the section needs; the text says what."""


@dataclass(frozen=True)
class Times:
    """Seconds, one of each a round: through the installation, and by hand."""

    ours: list[float]
    bare: list[float]


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least this share of all is not above."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def figures(kind: str, times: Times) -> dict[str, float]:
    """p50 and p95 in milliseconds of both, and how many times the bare system's median ours is."""
    ours, bare = percentile(times.ours, 0.5), percentile(times.bare, 0.5)
    return {
        f"{kind}_p50_ms": round(ours * 1000, 1),
        f"{kind}_p95_ms": round(percentile(times.ours, 0.95) * 1000, 1),
        f"{kind}_bare_p50_ms": round(bare * 1000, 1),
        f"{kind}_bare_p95_ms": round(percentile(times.bare, 0.95) * 1000, 1),
        f"{kind}_times_bare": round(ours / bare, 3),
        f"{kind}_more_than_bare_ms": round((ours - bare) * 1000, 1),
    }


def section(kind: str, rounds: int) -> Times:
    """Measure one kind in a process of its own: each brings up an installation, and Django binds to one for good."""
    command = [sys.executable, "-m", "tests.perf.start", kind, str(rounds)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the section {kind} ended with {done.returncode}")
    answer = json.loads(done.stdout.splitlines()[-1])
    if "missing" in answer:
        raise Missing(answer["missing"])
    return Times(answer["ours"], answer["bare"])


def main() -> int:
    """The inner program: print the times of one section as JSON, last."""
    # By its package's name: the classes of this file are others than those that sections import.
    frame = importlib.import_module("tests.perf.start")
    try:
        times = importlib.import_module(f"tests.perf._start_{sys.argv[1]}").measure(int(sys.argv[2]))
        answer = {"ours": times.ours, "bare": times.bare}
    except frame.Missing as error:
        answer = {"missing": str(error)}
    print(json.dumps(answer), flush=True)
    return 0


def run() -> dict[str, Any]:
    """All sections that this machine can measure."""
    got: dict[str, float] = {}
    missing: dict[str, str] = {}
    for kind in KINDS:
        name = f"tests.perf._start_{kind}"
        if importlib.util.find_spec(name) is None:
            missing[kind] = "not measured yet"
            continue
        try:
            got |= figures(kind, section(kind, ROUNDS))
        except Missing as error:
            missing[kind] = str(error)
    aims = {f"{kind}_p95_ms": ["<", 1000] for kind in KINDS if f"{kind}_p95_ms" in got}
    aims |= {f"{kind}_times_bare": ["<", 1.2] for kind in KINDS if f"{kind}_times_bare" in got}
    return {"sizes": {"rounds": ROUNDS, "missing": missing}, "figures": got, "aims": aims}


if __name__ == "__main__":
    sys.exit(main())
