"""A gang over two nodes: the real torchrun with gloo on CPU meets by the variables that each agent sets."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth import get_user_model

from pool.models import Allocation, AllocationMember, Node
from pool.services.enrolment import enrolment_code_create
from portal.accounts.models import Department
from portal.ops.actor import SYSTEM
from quotas.models import CapacityRequest
from tests.parts import missing
from tests.pool.agent.builders import output, start, state
from tests.pool.agent.conftest import FakeNvml, Process, Site, clean_environment, kill_jobs, wait_for

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.serial]

TRAIN = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
got = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(got)
print("rank", dist.get_rank(), "of", dist.get_world_size(), "node", os.environ["NODE_RANK"], "sum", int(got.item()))
dist.destroy_process_group()
"""


def job_python() -> str:
    """A Python that a job's account may run, of the version that torch was installed for, where it may read torch."""
    look = f"import os; os.listdir({sysconfig.get_paths()['purelib']!r})"
    for candidate in (os.path.realpath(sys.executable), f"/usr/bin/python3.{sys.version_info.minor}"):
        try:
            more: dict[str, Any] = {"user": 65534, "extra_groups": []} if os.geteuid() == 0 else {}
            done = subprocess.run([candidate, "-c", look], check=False, capture_output=True, **more)
            if done.returncode == 0:
                return candidate
        except OSError:
            continue
    return ""


@pytest.fixture
def nodes(site: Site, nvml: FakeNvml, tmp_path: Path) -> Iterator[list[Node]]:
    """Two agents of one machine, enrolled as two nodes."""
    running: list[Process] = []
    try:
        for name in ("east", "west"):
            folder = tmp_path / name
            folder.mkdir()
            environment = clean_environment(nvml.environment | {"GPUPOOL_NO_NVML": "1"})
            agent = Process(folder / "state", environment, [sys.executable, "-m", "pool.agent"])
            running.append(agent)
            code = enrolment_code_create(acting_user=SYSTEM, node_name=name)
            answer = agent.command("enrol", code, "--url", site.url, "--job-account", "nobody")
            assert answer.returncode == 0, answer.stderr
            # Else the second code enrols the same machine again.
            Node.objects.update(hostname=name, machine_id="")
        for agent in running:
            agent.start()
        wait_for(lambda: Node.objects.filter(health="ok").count() == 2)
        Node.objects.update(address="127.0.0.1")
        yield list(Node.objects.order_by("name"))
    finally:
        for agent in running:
            if agent.process is not None:
                agent.process.kill()
                agent.process.wait()
            kill_jobs(agent.state)
            if agent.state.exists():
                shutil.rmtree(f"/var/tmp/gpupool-work-{agent.state.stat().st_ino}", ignore_errors=True)


def test_torchrun_meets_over_two_agents(nodes: list[Node], monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("torch") is None:
        missing("torch (pip install -e .[gang])")
    python = job_python()
    if not python:
        missing("a Python of this version that other accounts may run")
    monkeypatch.setattr("pool.services.member_reports._follow", lambda member, **what: None)
    person = get_user_model().objects.create(username="ming", display_name="Ming", system_account="nobody")
    team = Department.objects.create(code="vision", name="Vision")
    script = f"cat > train.py <<'END'\n{TRAIN}\nEND\nexec {python} -m torch.distributed.run train.py"
    request = CapacityRequest.objects.create(
        requester=person, department=team, shape="cpu", nodes=2, gpus_per_node=1, state="allocated",
        command=script, environment={"PYTHONPATH": sysconfig.get_paths()["purelib"], "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    made = Allocation.objects.create(
        request=request, holder=person, department=team, charge_milli=0, state="starting"
    )
    members = [
        AllocationMember.objects.create(allocation=made, number=number, node=node)
        for number, node in enumerate(nodes)
    ]
    for member in members:
        start(member)
    wait_for(lambda: all(state(member) == "exited" for member in members))
    for rank, member in enumerate(members):
        text = output(member)
        assert member.exit_code == 0, text
        assert f"rank {rank} of 2 node {rank} sum 3" in text, text
