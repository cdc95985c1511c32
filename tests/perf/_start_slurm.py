"""The Slurm section of `start`: a real Slurm on this machine; the same job by `sbatch` by hand beside it.

From the decision (the allocation's row is there) to the command running, by the clock of the job itself.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from tests.perf._database import fresh_database
from tests.perf.start import Missing, Times

STAMP = "date +%s.%N > {file}.half && mv {file}.half {file}"
PATIENCE_S = 60.0


def measure(rounds: int) -> Times:
    """Seconds of each round, ours and by hand, in turn."""
    from tests.pool.executors.slurm_testbed import Testbed, missing_parts

    lacking = missing_parts()
    if lacking:
        raise Missing(f"a real Slurm needs: {lacking}")
    with tempfile.TemporaryDirectory(prefix="gpupool-perf-slurm-") as folder, fresh_database():
        bed = Testbed(Path(folder))
        try:
            bed.up()
            return _rounds(bed, rounds)
        finally:
            bed.down()


def _rounds(bed: object, rounds: int) -> Times:
    import structlog

    from pool.services.execution import allocation_start
    from pool.services.polling import cluster_poll
    from tests.pool.executors.slurm_rig import SlurmRig, Testbed

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    assert isinstance(bed, Testbed)
    rig = SlurmRig(bed)
    ours: list[float] = []
    bare: list[float] = []
    for number in range(rounds + 1):
        file = bed.folder / f"ours-{number}"
        member = rig.member(STAMP.format(file=file))
        began = time.time()
        assert allocation_start(allocation_id=member.allocation_id)
        ours.append(_stamp(file) - began)
        while type(member.allocation).objects.get(pk=member.allocation_id).state != "ended":
            cluster_poll(cluster_id=rig.cluster.pk, nodes=True)
        file = bed.folder / f"bare-{number}"
        words = ["--parsable", "-A", "ml", "-p", "batch", "-w", "gpu1", "--gres=gpu:a100:1", "--mem=100"]
        script = f"#!/bin/bash\n{STAMP.format(file=file)}\n"
        began = time.time()
        bed.run("sbatch", *words, "-o", "/dev/null", stdin=script)
        bare.append(_stamp(file) - began)
    return Times(ours[1:], bare[1:])  # the first of each pays for imports and caches


def _stamp(file: Path) -> float:
    until = time.monotonic() + PATIENCE_S
    while not file.exists():
        if time.monotonic() > until:
            raise RuntimeError("the job did not start")
        time.sleep(0.002)
    return float(file.read_text())
