"""An allocation's whole life by its real services and a real agent, from reserved to seen free."""

from __future__ import annotations

import pytest

from pool.models import Allocation, AllocationMember, Gpu, Node
from pool.services.allocations import allocation_release
from pool.services.execution import allocation_start
from portal.ops.actor import SYSTEM
from tests.pool.agent.builders import allocation, output
from tests.pool.agent.conftest import Process, wait_for

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.serial]


def state_of(member: AllocationMember) -> str:
    return str(Allocation.objects.get(pk=member.allocation_id).state)


def begin(command: str, **request: object) -> AllocationMember:
    member = allocation(Node.objects.get(), command, [Gpu.objects.get(uuid="GPU-test-0")], **request)
    Allocation.objects.update(state="reserved")
    assert allocation_start(allocation_id=member.allocation_id)
    return member


def test_a_command_that_ends_by_itself_frees_its_card(online: Process) -> None:
    member = begin("echo $CUDA_VISIBLE_DEVICES; sleep 0.5")
    wait_for(lambda: state_of(member) == "ended")
    done = Allocation.objects.get()
    assert (done.end_reason, done.exit_code) == ("finished", 0)
    assert done.started_at is not None
    assert done.leases.get().ended_at is not None and output(member) == "GPU-test-0\n"
    member.refresh_from_db()
    assert member.state == "free" and member.seen_free_at is not None


def test_a_release_stops_the_job_and_frees_its_card(online: Process) -> None:
    member = begin("trap 'echo saved; exit 0' TERM; echo up; while :; do sleep 0.1; done")
    wait_for(lambda: state_of(member) == "running" and "up" in output(member))
    allocation_release(acting_user=SYSTEM, allocation=Allocation.objects.get())
    wait_for(lambda: state_of(member) == "ended")
    done = Allocation.objects.get()
    assert done.end_reason == "released" and done.error_code == "" and "saved" in output(member)
    assert done.leases.get().ended_at is not None


def test_a_command_that_fails_says_so(online: Process) -> None:
    member = begin("exit 9")
    wait_for(lambda: state_of(member) == "ended")
    done = Allocation.objects.get()
    assert (done.end_reason, done.exit_code) == ("failed", 9)
