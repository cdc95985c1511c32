"""Jobs through the whole chain: order as a row, agent, shim, process, reports, rows."""

from __future__ import annotations

import json
import os
import pwd
import signal
import time
from pathlib import Path

import pytest

from pool.agent import procs
from pool.executors.base import executor_for
from pool.models import AgentCommand, AllocationEvent, Gpu, Node
from tests.parts import missing
from tests.pool.agent.builders import allocation, output, start, state, stop
from tests.pool.agent.conftest import FakeNvml, Process, Site, wait_for

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.serial]


@pytest.fixture(autouse=True)
def followed(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """What the allocation's services were told; they have tests of their own."""
    calls: list[dict] = []
    monkeypatch.setattr("pool.services.member_reports._follow", lambda member, **what: calls.append(what))
    return calls


def test_a_job_runs_with_its_devices_its_folder_and_an_account_that_is_not_root(online: Process) -> None:
    node = Node.objects.get()
    cards = list(Gpu.objects.order_by("-index"))
    script = """echo "devices=$CUDA_VISIBLE_DEVICES order=$CUDA_DEVICE_ORDER"
        echo "who=$(id -un) in=$(pwd)"
        echo "token=${GPUPOOL_TOKEN-none} job=$GPUPOOL_ALLOCATION"
        echo done > result.txt; echo err >&2; exit 3"""
    member = allocation(node, script, cards, environment={"MINE": "1", "CUDA_VISIBLE_DEVICES": "7"})
    start(member)
    wait_for(lambda: state(member) == "exited")
    text = output(member)
    assert "devices=GPU-test-0,GPU-test-1 order=PCI_BUS_ID" in text
    assert f"job={member.allocation.uid}" in text and "err" in text
    account = "nobody" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name
    assert f"who={account} " in text
    folder = text.split(" in=")[1].splitlines()[0]
    assert Path(folder, "result.txt").read_text() == "done\n"
    assert member.exit_code == 3 and member.started_at and member.ended_at and member.account == account
    kinds = list(AllocationEvent.objects.order_by("id").values_list("kind", flat=True))
    assert kinds == ["member_starting", "member_running", "member_exited"]
    assert AgentCommand.objects.get().acked_at is not None


def test_quotes_newlines_and_chinese_reach_the_job_unchanged(online: Process) -> None:
    wanted = "单引号 ' 双引号 \" 反斜杠 \\ $HOME `id`"
    member = allocation(Node.objects.get(), f"cat <<'END'\n{wanted}\n第二行\nEND\nprintf '%s' \"a  b\"\n")
    start(member)
    wait_for(lambda: state(member) == "exited")
    assert output(member) == f"{wanted}\n第二行\na  b"
    assert member.exit_code == 0


def test_a_stop_ends_the_whole_group_and_the_one_that_ignores_it_is_killed(online: Process) -> None:
    script = """trap 'echo got term' TERM; (trap '' TERM; exec sleep 300) & setsid sleep 301 &
        echo up; while :; do sleep 0.2; done"""
    member = allocation(Node.objects.get(), script)
    start(member)
    wait_for(lambda: "up" in output(member))
    stop(member, grace_s=1)
    wait_for(lambda: state(member) == "exited")
    assert "got term" in output(member)
    assert member.exit_signal == signal.SIGKILL
    everything = os.popen("ps -eo args").read().splitlines()
    left = [line for line in everything if line in ("sleep 300", "sleep 301")]
    assert left == []


def test_a_hold_lives_until_it_is_stopped(online: Process) -> None:
    member = allocation(Node.objects.get(), "", [Gpu.objects.get(uuid="GPU-test-1")], run_kind="hold")
    start(member)
    wait_for(lambda: state(member) == "running")
    time.sleep(0.6)
    assert state(member) == "running"
    stop(member)
    wait_for(lambda: state(member) == "exited")
    assert member.exit_code == 0


def test_a_job_survives_kill_9_of_its_agent_and_is_adopted_without_loss(online: Process) -> None:
    member = allocation(Node.objects.get(), "for i in $(seq 1 12); do echo line $i; sleep 0.25; done; exit 5")
    start(member)
    wait_for(lambda: "line 2\n" in output(member))
    online.end(signal.SIGKILL)
    time.sleep(0.8)
    online.start()
    wait_for(lambda: state(member) == "exited")
    assert output(member) == "".join(f"line {i}\n" for i in range(1, 13))
    assert member.exit_code == 5


def test_a_job_that_ends_while_its_agent_is_dead_is_reported_by_the_next_one(online: Process) -> None:
    member = allocation(Node.objects.get(), "echo before; sleep 1; echo after; exit 4")
    start(member)
    wait_for(lambda: state(member) in ("running", "exited"))
    online.end(signal.SIGKILL)
    time.sleep(1.5)
    online.start()
    wait_for(lambda: state(member) == "exited")
    assert (member.exit_code, output(member)) == (4, "before\nafter\n")


def test_a_killed_shim_does_not_leave_the_job_unwatched(online: Process) -> None:
    member = allocation(Node.objects.get(), "sleep 300")
    start(member)
    wait_for(lambda: state(member) == "running")
    run = json.loads(next(online.state.glob("jobs/*/run.json")).read_text())
    os.kill(run["shim_pid"], signal.SIGKILL)
    stop(member, grace_s=1)
    wait_for(lambda: state(member) == "exited")
    assert not procs.alive(run["pid"], run["ticks"])


def test_output_and_end_are_spooled_while_the_installation_is_away(online: Process, site: Site) -> None:
    member = allocation(Node.objects.get(), "echo one; sleep 1.5; echo two")
    start(member)
    wait_for(lambda: "one" in output(member))
    taken = len(site.samples)
    site.stop()
    time.sleep(3)
    site.start()
    wait_for(lambda: state(member) == "exited")
    assert output(member) == "one\ntwo\n" and member.exit_code == 0
    wait_for(lambda: len(site.samples) > taken + 1)
    seqs = [message["seq"] for _, message in site.samples]
    assert sorted(set(seqs)) == list(dict.fromkeys(seqs)), "samples came in order"


def test_without_an_account_a_root_agent_refuses_in_words(enrolled: Process, followed: list[dict]) -> None:
    if os.geteuid() != 0:
        missing("only a root agent needs accounts")
    from pool.agent import config

    settings = config.load(str(enrolled.state))
    settings.job_account = None
    config.save(str(enrolled.state), settings)
    enrolled.start()
    node = wait_for(lambda: Node.objects.filter(health="ok").first())
    for account, wanted in (("no-such-person", "account_missing"), ("root", "account_refused")):
        member = allocation(node, "id")
        member.allocation.holder.system_account = account
        start(member)
        wait_for(lambda member=member: state(member) == "exited")
        assert followed[-1]["error"]["code"] == wanted and followed[-1]["failed_start"]
        assert followed[-1]["error"]["retryable"] is False
        member.allocation.state = "ended"
        member.allocation.save()


def test_a_card_that_is_taken_when_the_job_comes_is_told_and_nothing_starts(
    online: Process, nvml: FakeNvml, followed: list[dict]
) -> None:
    card = Gpu.objects.get(uuid="GPU-test-0")
    nvml.set(gpu_0_proc=f"{os.getpid()}:1073741824")
    member = allocation(Node.objects.get(), "echo never", [card])
    start(member)
    wait_for(lambda: state(member) == "exited")
    assert followed[-1]["error"]["code"] == "gpu_not_free" and followed[-1]["error"]["retryable"]
    card.refresh_from_db()
    assert (card.condition, card.condition_reason) == ("suspect", "gpu_not_free_processes")
    assert output(member) == "" and not list(online.state.glob("jobs/*"))
    wait_for(lambda: Gpu.objects.get(pk=card.pk).foreign_use)
    nvml.set(gpu_0_proc=None)
    wait_for(lambda: Gpu.objects.get(pk=card.pk).condition == "ok")


def test_cards_are_seen_free_only_without_processes_and_memory(
    online: Process, nvml: FakeNvml, followed: list[dict]
) -> None:
    card = Gpu.objects.get(uuid="GPU-test-0")
    member = allocation(Node.objects.get(), "true", [card])
    start(member)
    wait_for(lambda: state(member) == "exited")
    executor = executor_for(member.node.cluster)
    nvml.set(gpu_0_proc=f"{os.getpid()}:1073741824")
    executor.release(member=member)
    wait_for(lambda: followed[-1].get("busy"))
    assert followed[-1]["busy"]["GPU-test-0"]["reason"] == "processes" and state(member) == "exited"
    nvml.set(gpu_0_proc=None, gpu_0_mem_used=8589934592)
    executor.release(member=member)
    wait_for(lambda: (followed[-1].get("busy") or {}).get("GPU-test-0", {}).get("reason") == "memory_in_use")
    nvml.set(gpu_0_mem_used=0)
    executor.release(member=member)
    wait_for(lambda: state(member) == "free")
    card.refresh_from_db()
    assert card.seen_free_at is not None
