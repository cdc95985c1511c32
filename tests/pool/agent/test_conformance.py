"""The conformance suite over a real agent: the same promises, kept by a program on a plain node.

Three faults are not an agent's: orders lie in rows until it takes them, so an answer cannot be lost or late for whoever
gave the order (what an agent does with one that comes twice is in `test_jobs.py`), it refuses nothing that was placed,
and its work is its own child: it is never forgotten, only seen to end.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch
from uuid import uuid4

import psutil
import pytest

from pool.executors.base import executor_for
from pool.models import Allocation, AllocationEvent, AllocationMember, Gpu, Node
from pool.services.cycle import schedule_cycle
from pool.services.execution import execution_reconcile
from portal.kernel.clock import now
from portal.ops.services.outbox import outbox_deliver
from quotas.models import CapacityRequest
from tests.pool import builders
from tests.pool.agent.conftest import Process, kill_jobs, wait_for
from tests.pool.executors.conformance import Conformance, Rig, allocation, state
from tests.pool.executors.place import only_member
from tests.quotas import build

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.serial]
CONTROLLED = "while [ ! -s {file} ]; do sleep 0.05; done; exit $(cat {file})"


class AgentRig(Rig):
    """See ``Rig``."""

    deadline_s = 240.0

    def __init__(self, agent: Process, folder: Path) -> None:
        self.agent, self.folder = agent, folder
        node = Node.objects.select_related("cluster").get()
        self.cluster, self.executor = node.cluster, executor_for(node.cluster)
        flavour = Gpu.objects.order_by("index")[0].flavour
        assert flavour is not None
        self.team, self.flavour = build.department("vg"), flavour
        self.who = build.user("lin", self.team, system_account="nobody")
        build.limits(self.team, flavour, 8)

    def member(self, command: str = "sleep 600", gpus: int = 1, **values: Any) -> AllocationMember:
        uid = uuid4()
        text = CONTROLLED.format(file=self._file(uid)) if command == "sleep 600" else command
        asked = builders.queued(self.team, self.flavour, gpus, self.who, command=text, uid=uid, **values)
        return only_member(wait_for(lambda: self.placed(asked)))

    def placed(self, request: CapacityRequest) -> Allocation | None:
        """By a cycle of ours, or by one that an agent's report set off in the web process meanwhile."""
        schedule_cycle()
        return Allocation.objects.filter(request=request).exclude(state="ended").first()

    def _file(self, uid: object) -> Path:
        """Where its exit code is put, by the uid of its request."""
        return self.folder / f"end-{uid}"

    def copies(self, member: AllocationMember) -> int:
        """Commands that lead a session of their own with this allocation in their environment."""
        found = 0
        for process in psutil.process_iter():
            try:
                mine = process.environ().get("GPUPOOL_ALLOCATION") == str(member.allocation.uid)
                found += (
                    mine
                    and process.status() != psutil.STATUS_ZOMBIE
                    and os.getpgid(process.pid) == process.pid
                )
            except (psutil.Error, ProcessLookupError):
                continue
        return found

    def finish(self, member: AllocationMember, code: int = 0) -> None:
        path = self._file(member.allocation.request.uid)
        path.with_suffix(".half").write_text(str(code))
        os.rename(path.with_suffix(".half"), path)

    def away(self) -> None:
        self.agent.end(signal.SIGKILL)
        Node.objects.update(last_heartbeat_at=now() - timedelta(minutes=1))

    def back(self) -> None:
        self.agent.start()
        wait_for(lambda: self.executor.ready(node=Node.objects.get()))

    def restart(self) -> None:
        self.agent.end(signal.SIGKILL)
        self.agent.start()

    def drive(self) -> None:
        execution_reconcile()


@pytest.fixture
def rig(online: Process, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentRig]:
    """A real agent's cluster; the folder of exit codes can be entered by the account that work runs as."""
    folder = tmp_path_factory.mktemp("ends")
    for one in (folder, *folder.parents):
        if os.stat(one).st_uid == os.getuid() and not os.stat(one).st_mode & 0o001:
            os.chmod(one, os.stat(one).st_mode | 0o011)
    with patch("pool.tasks.start_allocation.apply_async"):  # starts are ordered by the tests alone
        yield AgentRig(online, folder)


class TestAgent(Conformance, cannot=frozenset({"lost_answer", "slow", "refuses", "forgets"})):
    @pytest.fixture
    def rig(self, rig: AgentRig) -> AgentRig:
        return rig


def test_an_ill_replica_is_ended_and_another_takes_over_on_a_card_seen_free(rig: AgentRig) -> None:
    ill = rig.folder / "ill"
    ill.touch(mode=0o644)
    rule = {"kind": "command", "command": f"test ! -s {ill}", "every_s": 0.2, "failures": 2}
    first = rig.member(health=rule, is_service=True, duration_s=None, review_at=now() + timedelta(days=1))
    assert rig.start(first)
    healthy = AllocationEvent.objects.filter(allocation=first.allocation_id, kind="health_ok")
    rig.settle(lambda: bool(outbox_deliver() >= 0 and healthy.exists()))
    ill.write_text("ill")
    rig.settle(lambda: allocation(first).state == "ended")
    gone = allocation(first)
    assert (gone.error_code, gone.end_rule) == ("unhealthy", "requeue")
    assert gone.request.state in ("queued", "allocated")  # in line at its old place, or placed again already
    ill.write_text("")
    second = only_member(wait_for(lambda: rig.placed(gone.request)))
    assert rig.start(second)
    rig.settle(lambda: state(second) == AllocationMember.State.RUNNING)
    first.refresh_from_db()
    assert first.seen_free_at is not None
    assert second.allocation.reserved_at >= first.seen_free_at
    assert (rig.copies(first), rig.copies(second)) == (0, 1)


def test_a_reboot_of_the_node_puts_its_work_back_in_line_on_a_card_seen_free(rig: AgentRig) -> None:
    """The machine starts anew: nothing of its work is left, and the notes in its folders name another boot."""
    first = rig.member()
    assert rig.start(first)
    rig.settle(lambda: state(first) == AllocationMember.State.RUNNING)
    rig.agent.end(signal.SIGKILL)
    kill_jobs(rig.agent.state)
    wait_for(lambda: rig.copies(first) == 0)
    for name in ("run.json", "meta.json"):
        for file in rig.agent.state.glob(f"jobs/*/{name}"):
            kept = json.loads(file.read_text())
            assert kept["boot_id"]
            file.write_text(json.dumps(kept | {"boot_id": "the boot before"}))
    for file in rig.agent.state.glob("jobs/*/exit.json"):  # a reboot leaves the shim no time to write it
        file.unlink()
    rig.agent.start()
    rig.settle(lambda: allocation(first).state == "ended")
    gone = allocation(first)
    assert (gone.error_code, gone.end_rule) == ("node_rebooted", "requeue")
    second = only_member(wait_for(lambda: rig.placed(gone.request)))
    assert rig.start(second)
    rig.settle(lambda: state(second) == AllocationMember.State.RUNNING)
    first.refresh_from_db()
    assert first.seen_free_at is not None and second.allocation.reserved_at >= first.seen_free_at
    assert (rig.copies(first), rig.copies(second)) == (0, 1)
