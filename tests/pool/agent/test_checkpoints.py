"""Checkpoint hooks through the whole chain: the ladder, the agent, the job's own folder and account, and back."""

from __future__ import annotations

import os
import pwd
import signal
import time
from typing import Any

import pytest

from pool.models import AgentCommand, Node, ReclaimCase
from pool.services.ladder import case_begin, ladder_sweep
from portal.ops.actor import SYSTEM
from tests.pool.agent.builders import allocation, output, start, state
from tests.pool.agent.conftest import Process, wait_for

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.serial]
LOOP = "trap 'echo got USR1; exit 0' USR1; echo ready; while true; do sleep 0.1; done"


def running(command: str, checkpoint: dict[str, Any]) -> Any:
    member = allocation(Node.objects.get(), command, checkpoint=checkpoint)
    start(member)
    wait_for(lambda: state(member) == "running")
    member.allocation.refresh_from_db()
    wait_for(lambda: _runs(member.allocation))
    return member


def _runs(made: Any) -> bool:
    made.refresh_from_db()
    return made.state == "running"


def begin(member: Any) -> ReclaimCase:
    return case_begin(
        acting_user=SYSTEM, allocation_id=member.allocation_id, cause="maintenance", rule="test", grace_s=0
    )


def step(case: ReclaimCase) -> str:
    case.refresh_from_db()
    return str(case.step)


def test_a_command_saves_in_the_works_folder_as_its_account_and_then_it_is_stopped(online: Process) -> None:
    save = 'echo state > saved.txt; echo "saved by $(id -un) in $(pwd) for $GPUPOOL_ALLOCATION"'
    member = running("echo begun; sleep 600", {"command": save, "seconds": 60})
    case = begin(member)
    wait_for(lambda: step(case) in ("stopping", "freed"))
    wait_for(lambda: state(member) in ("exited", "free"))
    account = "nobody" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name
    text = output(member)
    assert f"saved by {account} in " in text and f"for {member.allocation.uid}" in text
    assert case.checkpoint_result == {"0": {"ok": True, "detail": "", "exit_code": 0}}
    assert case.checkpoint_done_at is not None
    assert AgentCommand.objects.get(kind="checkpoint").acked_at is not None


def test_a_command_that_takes_too_long_is_ended_and_the_work_stopped(online: Process) -> None:
    member = running("sleep 600", {"command": "sleep 300 & sleep 300", "seconds": 1})
    case = begin(member)
    wait_for(lambda: step(case) != "notice")

    def over() -> bool:
        ladder_sweep()
        return state(member) in ("exited", "free")

    wait_for(over)
    assert step(case) in ("stopping", "freed")


def test_a_signal_reaches_the_work_which_saves_itself_and_ends(online: Process) -> None:
    member = running(LOOP, {"signal": "SIGUSR1", "seconds": 60})
    wait_for(lambda: "ready" in output(member))
    begin(member)
    wait_for(lambda: state(member) in ("exited", "free"))
    assert "got USR1" in output(member)
    member.allocation.refresh_from_db()
    assert member.allocation.end_reason == "maintenance"
    assert not AgentCommand.objects.filter(kind="stop").exists()


def test_a_command_goes_on_when_its_agent_is_killed_and_is_told_by_the_next_one(online: Process) -> None:
    member = running("sleep 600", {"command": "sleep 2; echo late > late.txt; echo finished", "seconds": 60})
    case = begin(member)
    wait_for(lambda: AgentCommand.objects.filter(kind="checkpoint", acked_at__isnull=False).exists())
    online.end(signal.SIGKILL)
    time.sleep(2.5)
    online.start()
    wait_for(lambda: step(case) in ("stopping", "freed"))
    assert case.checkpoint_result["0"]["ok"] is True
