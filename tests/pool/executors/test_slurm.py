"""The Slurm executor on a real Slurm: the conformance suite, and what only Slurm has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pool.executors.conformance import Conformance
from tests.pool.executors.slurm_rig import SlurmRig
from tests.pool.executors.slurm_testbed import Testbed, need_slurm

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.serial]


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Testbed]:
    """One Slurm for the whole module."""
    need_slurm()
    made = Testbed(Path(tmp_path_factory.mktemp("slurm")))
    try:
        made.up()
        yield made
    finally:
        made.down()


@pytest.fixture
def rig(bed: Testbed) -> Iterator[SlurmRig]:
    yield SlurmRig(bed)
    bed.run("scancel", f"--user={bed.me}", "--signal=KILL", "--full", check=False)
    bed.run("scancel", f"--user={bed.me}", check=False)
    bed.wait(lambda: bed.idle() >= bed.nodes, "idle nodes")


class TestSlurm(Conformance):
    @pytest.fixture
    def rig(self, rig: SlurmRig) -> SlurmRig:
        return rig
