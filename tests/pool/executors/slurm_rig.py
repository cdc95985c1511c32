"""The conformance suite's hands on a real Slurm, and the cluster that tests of it use."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

from pool.executors.base import RetryableFailure, executor_for
from pool.executors.slurm.cli import CommandLine
from pool.executors.slurm.transport import JobOrder
from pool.models import AllocationMember, Cluster, Gpu
from pool.services.outside_nodes import nodes_import
from portal.ops.actor import system
from tests.pool import builders
from tests.pool.executors.conformance import Rig
from tests.pool.executors.place import only_member, reserved
from tests.pool.executors.slurm_testbed import Testbed
from tests.quotas import build

CONTROLLED = "while [ ! -s {file} ]; do sleep 0.05; done; exit $(cat {file})"
A100 = {"model": "NVIDIA A100-SXM4-40GB", "memory_mib": 40960}


def slurm_cluster(bed: Testbed, **settings: Any) -> Cluster:
    """A cluster of this Slurm; its nodes are imported."""
    cluster = builders.cluster("hpc", executor="slurm")
    cluster.settings = {
        "conf": str(bed.conf),
        "partition": "batch",
        "folder": str(bed.folder),
        "accounts": {"vg": "ml"},
        "models": {"a100": A100},
        **settings,
    }
    cluster.save()
    nodes_import(
        acting_user=system("test"), cluster=cluster, found=executor_for(cluster).discover(cluster=cluster)
    )
    return cluster


class SlurmRig(Rig):
    """See ``Rig``."""

    deadline_s = 240.0

    def __init__(self, bed: Testbed, **settings: Any) -> None:
        self.bed = bed
        self.cluster = slurm_cluster(bed, **settings)
        self.executor = executor_for(self.cluster)
        self.team = build.department("vg")
        flavour = Gpu.objects.filter(node__cluster=self.cluster).order_by("id")[0].flavour
        assert flavour is not None
        self.flavour = flavour
        build.limits(self.team, self.flavour, 12)
        self._faults: list[Any] = []

    def member(self, command: str = "sleep 600", gpus: int = 1, **values: Any) -> AllocationMember:
        allocation = reserved(self.team, self.flavour, gpus, command=command, **values)
        if command == "sleep 600":
            text = CONTROLLED.format(file=self._file(allocation.uid))
            type(allocation.request).objects.filter(pk=allocation.request_id).update(command=text)
        return only_member(allocation)

    def _file(self, uid: Any) -> Path:
        return self.bed.folder / f"end-{uid}"

    def copies(self, member: AllocationMember) -> int:
        said = self.bed.run(
            "squeue", "-h", f"--name=gpupool-{member.allocation.uid}", "-t", "PD,R,CF", "-o", "%A"
        )
        return len(said.split())

    def finish(self, member: AllocationMember, code: int = 0) -> None:
        path = self._file(member.allocation.uid)
        half = path.with_suffix(".half")
        half.write_text(str(code))
        os.rename(half, path)

    def lose_answer(self) -> None:
        real, fault = CommandLine.submit, patch.object(CommandLine, "submit", autospec=True)

        def lost(this: CommandLine, order: JobOrder) -> str:
            fault.stop()
            real(this, order)
            raise RetryableFailure("answer_lost", "cut after the order was taken")

        fault.start().side_effect = lost

    def refuse(self) -> None:
        real, fault = CommandLine.submit, patch.object(CommandLine, "submit", autospec=True)

        def refused(this: CommandLine, order: JobOrder) -> str:
            fault.stop()
            return real(this, JobOrder(**{**order.__dict__, "account": "nobody-knows-it"}))

        fault.start().side_effect = refused

    def away(self) -> None:
        self.bed.stop_controller()

    def back(self) -> None:
        self.bed.start_controller()

    def slow(self) -> None:
        """The controller hangs: its port takes connections, nobody reads them."""
        self._patience(1)
        self.bed.halt_controller()

    def fast(self) -> None:
        self.bed.resume_controller()
        self._patience(10)

    def _patience(self, seconds: float) -> None:
        self.cluster.refresh_from_db()
        self.cluster.settings = {**self.cluster.settings, "timeout_s": seconds}
        self.cluster.save(update_fields=["settings"])

    def restart(self) -> None:
        self.bed.stop_controller()
        self.bed.start_controller()

    def forget(self, member: AllocationMember) -> None:
        self.bed.stop_controller(signal.SIGKILL)
        self.bed.start_controller(empty=True)
        self.bed.wait(lambda: self.bed.idle() >= self.bed.nodes, "nodes after the loss")
