"""The conformance suite over the system in memory: the polling services, without a real system's seconds."""

from __future__ import annotations

from typing import Any

import pytest

from pool.executors.base import Found
from pool.models import AllocationMember
from tests.pool import builders
from tests.pool.executors.conformance import Conformance, Rig
from tests.pool.executors.memory import MemorySystem
from tests.pool.executors.place import only_member, reserved
from tests.quotas import build

pytestmark = pytest.mark.django_db(transaction=True)


class MemoryRig(Rig):
    deadline_s = 60.0

    def __init__(self, system: MemorySystem) -> None:
        self.executor = self.system = system
        self.cluster = builders.cluster("hpc", executor="slurm")
        self.team, self.flavour = build.department("vg"), build.flavour("h800", installed=None)
        self.node = builders.node(self.flavour, 2, self.cluster, name="hpc1")
        build.limits(self.team, self.flavour, 8)
        system.nodes = [Found("hpc1")]

    def member(self, command: str = "sleep 600", gpus: int = 1, **values: Any) -> AllocationMember:
        return only_member(reserved(self.team, self.flavour, gpus, command=command, **values))

    def start(self, member: AllocationMember) -> bool:
        done = super().start(member)
        for run in self.system.of(member):
            run.deaf = "trap" in member.allocation.request.command
        return done

    def copies(self, member: AllocationMember) -> int:
        return sum(run.state in ("starting", "running") for run in self.system.of(member))

    def finish(self, member: AllocationMember, code: int = 0) -> None:
        self.system.over(self.system.of(member)[-1], code)

    def lose_answer(self) -> None:
        self.system.lose = True

    def refuse(self) -> None:
        self.system.refuse = True

    def away(self) -> None:
        self.system.away = True

    def back(self) -> None:
        self.system.away = False

    def slow(self) -> None:
        self.system.late = True

    def fast(self) -> None:
        self.system.late = False

    def restart(self) -> None:
        pass

    def forget(self, member: AllocationMember) -> None:
        self.system.runs = [run for run in self.system.runs if run.uid != member.allocation.uid]


class TestMemory(Conformance):
    @pytest.fixture
    def rig(self, memory: MemorySystem) -> MemoryRig:
        return MemoryRig(memory)
