"""A real agent against a real web process: enrol, report, run, stop, survive."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest

from pool.executors.base import executor_for
from pool.models import Gpu, Node
from portal.ops.models import OutboxEvent
from tests.pool.agent.builders import allocation, output, start, state
from tests.pool.agent.conftest import FakeNvml, Process, Site, python38, wait_for

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.serial]


def test_an_enrolled_agent_reports_its_machine_and_its_cards(online: Process, site: Site) -> None:
    node = Node.objects.get()
    assert node.name == "test-node" and node.cpu_milli >= 1000 and node.memory_mib > 0
    assert node.driver == "550.54.15" and node.cuda == "12.4" and node.run_as_root is not None
    assert [gpu.uuid for gpu in Gpu.objects.order_by("index")] == ["GPU-test-0", "GPU-test-1"]
    rows = wait_for(lambda: [m["rows"] for _, m in site.samples if m["rows"]])[0]
    assert {row[0]: row[3]["util"] for row in rows} == {"GPU-test-0": 10, "GPU-test-1": 20}
    wait_for(lambda: online.status()["connected"])


def test_an_xid_in_the_kernel_log_is_told_with_its_card(
    enrolled: Process, nvml: FakeNvml, tmp_path: Path
) -> None:
    log = tmp_path / "kmsg"
    log.write_text("6,1,1,-;NVRM: Xid (PCI:0000:01:00): 31, an old one\n")
    nvml.set(gpu_0_bus="00000000:3B:00.0")
    enrolled.environment["GPUPOOL_KMSG"] = str(log)
    enrolled.start()
    wait_for(lambda: Gpu.objects.count() == 2)
    with open(log, "a") as handle:
        handle.write(
            "4,2,2,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=42, name=python, GPU has fallen off the bus.\n"
        )
    event = wait_for(lambda: OutboxEvent.objects.filter(topic="pool.agent_event").first())
    assert event.payload["gpu_uuid"] == "GPU-test-0" and event.payload["kind"] == "xid"
    assert event.payload["data"]["xid"] == 79 and event.payload["data"]["pid"] == 42


def test_a_machine_without_a_gpu_runs_cpu_only_tests_and_says_why(
    enrolled: Process, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pool.services.member_reports._follow", lambda member, **what: None)
    enrolled.environment.pop("LD_LIBRARY_PATH")
    enrolled.start()
    node = wait_for(lambda: Node.objects.filter(health="ok").first())
    assert node.facts["nvml"] == {"ok": False, "reason": "no_driver"}
    member = allocation(node, 'echo "devices=[$CUDA_VISIBLE_DEVICES] $NVIDIA_VISIBLE_DEVICES"')
    start(member)
    wait_for(lambda: state(member) == "exited")
    assert output(member) == "devices=[] void\n" and member.exit_code == 0
    executor_for(node.cluster).release(member=member)
    wait_for(lambda: state(member) == "free")
    assert wait_for(lambda: [m["host"] for _, m in site.samples if m["host"].get("cpu") is not None])


def test_the_served_file_does_it_all_on_python_38(
    agent: Process, site: Site, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = python38()
    if python is None:
        pytest.skip("no Python 3.8 here")
    monkeypatch.setattr("pool.services.member_reports._follow", lambda member, **what: None)
    program = tmp_path / "agent.pyz"
    with urllib.request.urlopen(f"{site.url}/agent/agent.pyz") as answer:
        program.write_bytes(answer.read())
    agent.program = [python, "-I", "-S", str(program)]
    enrolled = agent.command("enrol", code, "--url", site.url, "--job-account", "nobody")
    assert enrolled.returncode == 0, enrolled.stderr
    agent.start()
    wait_for(lambda: Gpu.objects.count() == 2)
    member = allocation(
        Node.objects.get(), "echo $CUDA_VISIBLE_DEVICES", [Gpu.objects.get(uuid="GPU-test-1")]
    )
    start(member)
    wait_for(lambda: state(member) == "exited")
    assert output(member) == "GPU-test-1\n" and member.exit_code == 0
    agent.end()
    assert "Traceback" not in agent.log
