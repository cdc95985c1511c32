"""What looks at outside systems lead to: outages, strays, foreign work, drains, lost orders, output. On the system in
memory, under a set clock."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from pool.executors.base import Found
from pool.models import Allocation, AllocationLog, AllocationMember, Cluster, Gpu, Lease, Node
from pool.services import stopping
from pool.services.cycle import schedule_cycle
from pool.services.execution import execution_reconcile
from pool.services.node_watch import nodes_sweep
from pool.services.nodes import node_cordon, node_uncordon
from pool.services.outside_output import outputs_follow
from pool.services.polling import cluster_poll
from portal.kernel.clock import set_clock
from portal.ops.actor import system
from portal.ops.models import Incident
from tests.pool.executors.conformance import allocation, state
from tests.pool.executors.memory import MemorySystem, Run
from tests.pool.executors.test_memory import MemoryRig

pytestmark = pytest.mark.django_db(transaction=True)
T = datetime(2026, 6, 16, 6, 0, tzinfo=UTC)
M = AllocationMember.State
TESTER = system("test")


def at(seconds: float) -> set_clock:
    return set_clock(T + timedelta(seconds=seconds))


@pytest.fixture
def rig(memory: MemorySystem) -> Iterator[MemoryRig]:
    with at(0):
        yield MemoryRig(memory)


def running(rig: MemoryRig, gpus: int = 1) -> AllocationMember:
    member = rig.member(gpus=gpus)
    assert rig.start(member)
    rig.look()
    assert state(member) == M.RUNNING
    return member


@pytest.mark.parametrize(("lasts", "step"), [(600, 20), (3600, 300)], ids=["ten minutes", "an hour"])
def test_an_outage_of_a_controller_loses_nothing_and_doubles_nothing(
    rig: MemoryRig, lasts: int, step: int
) -> None:
    runs, ends = running(rig), running(rig)
    rig.away()
    rig.system.over(rig.system.of(ends)[0], 0)  # it ends while nobody can see it
    for seconds in range(0, lasts + 1, step):
        with at(seconds):
            rig.look()
            nodes_sweep()
            execution_reconcile()
    node = Node.objects.get()
    cluster = Cluster.objects.get(pk=rig.cluster.pk)
    assert (state(runs), state(ends)) == (M.RUNNING, M.RUNNING)
    assert (cluster.away_since, cluster.away_code) == (T, "controller_away")
    assert (node.health, node.takes_work) == (Node.Health.SUSPECT, False)
    incident = Incident.objects.get(kind="cluster_away")
    assert (incident.state, incident.severity) == ("open", "critical")
    rig.back()
    with at(lasts + 10):
        rig.look()
        rig.look()
    assert (state(runs), state(ends)) == (M.RUNNING, M.FREE)
    assert (allocation(ends).end_reason, rig.copies(runs)) == ("finished", 1)
    assert Node.objects.get().health == Node.Health.OK
    assert Cluster.objects.get(pk=rig.cluster.pk).away_since is None
    assert Incident.objects.get(kind="cluster_away").state == "closed"


def test_a_node_that_is_down_is_lost_and_its_cards_wait_until_they_are_seen(rig: MemoryRig) -> None:
    member = running(rig)
    rig.system.of(member)[0].deaf = True
    rig.system.nodes = [Found("hpc1", up=False)]
    with at(121):
        rig.look()
        nodes_sweep()
    assert (Node.objects.get().health, state(member)) == (Node.Health.LOST, M.LOST)
    with at(430):
        rig.look()
        nodes_sweep()
    assert allocation(member).state == "ended"
    assert Lease.objects.filter(allocation=member.allocation_id, ended_at=None).count() == 1
    with at(
        440
    ):  # back, and the work still runs there: it was given up, so it is ended, then its card is free
        rig.system.nodes = [Found("hpc1")]
        rig.look()
        assert "stop SIGKILL" in rig.system.calls
        rig.look()
    assert state(member) == M.FREE
    assert not Lease.objects.filter(allocation=member.allocation_id, ended_at=None).exists()


def test_a_stray_of_ours_is_ended_and_foreign_work_is_let_be(rig: MemoryRig) -> None:
    member = running(rig)
    rig.finish(member)
    rig.look()
    rig.look()
    assert allocation(member).state == "ended"
    rig.system.runs += [
        Run("900", member.allocation.uid, 0, "hpc1"),
        Run("901", None, 0, "hpc1", indexes=(1,)),
    ]
    rig.look()
    assert "end 900" in rig.system.calls
    assert "end 901" not in rig.system.calls
    assert [work["id"] for work in Cluster.objects.get(pk=rig.cluster.pk).foreign_work] == ["901"]
    assert list(Gpu.objects.exclude(foreign_use=[]).values_list("index", flat=True)) == [1]
    assert Incident.objects.filter(kind="stray_work", state="open").count() == 1
    rig.system.runs.clear()
    rig.look()
    assert not Gpu.objects.exclude(foreign_use=[]).exists()


def test_foreign_work_on_a_leased_card_is_counted_on_a_free_one(rig: MemoryRig) -> None:
    """Slurm gives which card it likes; the numbers must be right for what is placed next."""
    member = running(rig)
    leased = Lease.objects.get(allocation=member.allocation_id).gpu
    rig.system.runs.append(Run("901", None, 0, "hpc1", indexes=(leased.index,)))
    rig.look()
    assert list(Gpu.objects.exclude(foreign_use=[]).values_list("index", flat=True)) == [1 - leased.index]


def marks(rig: MemoryRig) -> list[str | None]:
    """What each card is marked with: work by its name there, "awaited", or None."""
    return [
        (card.foreign_use[0]["work"] or "awaited") if card.foreign_use else None
        for card in rig.node.gpus.order_by("index")
    ]


def put_out(rig: MemoryRig, member: AllocationMember) -> None:
    run = rig.system.of(member)[0]
    run.error = {"code": "preempted_outside", "detail": "PREEMPTED", "retryable": True}
    rig.system.over(run, None, 15)


def test_cards_that_were_taken_wait_for_whoever_they_were_taken_for(rig: MemoryRig) -> None:
    """The look that sees our work put out comes before the urgent work begins: nothing of ours slips in between."""
    member = running(rig, gpus=2)
    put_out(rig, member)
    rig.look()
    row = allocation(member)
    assert (row.state, row.error_code, row.end_rule) == ("ended", "preempted_outside", "requeue")
    assert marks(rig) == ["awaited", "awaited"]
    assert not Incident.objects.filter(kind="foreign_use").exists()
    schedule_cycle()
    assert not Lease.objects.filter(ended_at=None).exists()
    rig.look()
    assert marks(rig) == ["awaited", "awaited"]
    rig.system.runs.append(Run("900", None, 0, "hpc1", indexes=(), gpus=1))  # which card nobody tells yet
    rig.look()
    assert marks(rig) == ["900", "awaited"]
    rig.system.runs[-1] = Run("900", None, 0, "hpc1", indexes=(0,))
    rig.system.runs.append(Run("901", None, 0, "hpc1", indexes=(1,)))
    rig.look()
    assert marks(rig) == ["900", "901"]
    assert Incident.objects.filter(kind="foreign_use", state="open").count() == 2
    rig.system.runs.clear()
    rig.look()
    assert marks(rig) == [None, None]


def test_cards_that_nobody_came_for_are_free_again_after_a_while(rig: MemoryRig) -> None:
    member = running(rig)
    card = Lease.objects.get(allocation=member.allocation_id).gpu
    put_out(rig, member)
    rig.look()
    with at(59):
        rig.look()
        assert Gpu.objects.get(pk=card.pk).foreign_use
    with at(61):
        rig.look()
    assert marks(rig) == [None, None]
    schedule_cycle()
    assert Lease.objects.filter(ended_at=None).count() == 1


def test_what_was_there_before_is_not_who_it_was_taken_for(rig: MemoryRig) -> None:
    rig.system.runs.append(Run("900", None, 0, "hpc1", indexes=(0,)))
    rig.look()
    member = running(rig)
    put_out(rig, member)
    rig.look()
    rig.look()
    assert marks(rig) == ["900", "awaited"]


def test_cards_of_work_that_was_put_back_in_line_wait_too(rig: MemoryRig) -> None:
    member = running(rig, gpus=2)
    rig.system.of(member)[0].state = "starting"
    rig.look()  # back in line over there: it is ended, and its cards are free at the next look
    rig.look()
    rig.look()
    assert allocation(member).state == "ended"
    assert marks(rig) == ["awaited", "awaited"]


def test_an_order_whose_process_died_is_given_again(rig: MemoryRig) -> None:
    member = rig.member()
    Allocation.objects.filter(pk=member.allocation_id).update(state="starting", start_attempts=1)
    AllocationMember.objects.filter(pk=member.pk).update(ordered_at=T)
    with at(20):
        rig.look()  # it may still be on its way
    assert "start" not in rig.system.calls
    with at(31):
        rig.look()
        rig.look()
    assert rig.system.calls.count("start") == 1
    assert state(member) == M.RUNNING


def test_a_start_that_is_slow_over_there_is_waited_for_and_ordered_once(rig: MemoryRig) -> None:
    rig.system.pending = True
    member = rig.member()
    assert rig.start(member)
    for seconds in (1, 60, 120):
        with at(seconds):
            rig.look()
            execution_reconcile()
        assert (state(member), allocation(member).state) == (M.STARTING, "starting")
    rig.system.of(member)[0].state = "running"
    with at(121):
        rig.look()
    assert (state(member), allocation(member).state) == (M.RUNNING, "running")
    assert (rig.system.calls.count("start"), rig.copies(member)) == (1, 1)


def test_work_that_no_kill_ends_keeps_its_card_until_it_is_gone(rig: MemoryRig) -> None:
    """A kill that hangs in the driver: asked again and again, shown as ending, and the card is nobody else's."""
    member = running(rig)
    run = rig.system.of(member)[0]
    run.stuck = True
    stopping.stop(acting_user=TESTER, allocation_id=member.allocation_id, cause="revoked", grace_s=1)
    for seconds in (2, 5, 15, 30, 90):
        with at(seconds):
            rig.look()
            execution_reconcile()
    assert allocation(member).state == "stopping"
    assert Lease.objects.filter(allocation=member.allocation_id, ended_at=None).count() == 1
    assert rig.system.calls.count("stop SIGKILL") >= 4
    run.stuck = False
    with at(105):
        rig.look()
        rig.look()
    row = allocation(member)
    assert (row.state, row.end_reason, state(member)) == ("ended", "revoked", M.FREE)
    assert not Lease.objects.filter(allocation=member.allocation_id, ended_at=None).exists()


def test_an_order_that_was_lost_and_given_up_never_holds_cards(rig: MemoryRig) -> None:
    member = rig.member()
    rig.away()
    assert rig.start(member) is False
    stopping.stop(acting_user=TESTER, allocation_id=member.allocation_id, cause="released", grace_s=0)
    rig.back()
    with at(10):
        rig.look()
    assert state(member) == M.RESERVED  # the order may still arrive
    with at(31):
        rig.look()
        rig.look()
    assert (state(member), allocation(member).state) == (M.FREE, "ended")


def test_put_back_in_line_over_there_it_is_back_in_line_here(rig: MemoryRig) -> None:
    member = running(rig)
    rig.system.of(member)[0].state = "starting"
    rig.look()
    row = allocation(member)
    assert (row.state, row.end_rule, row.error_code) == ("stopping", "requeue", "requeued_outside")
    rig.look()  # what waits there is cancelled, so that it does not come twice
    rig.look()
    assert "stop SIGKILL" in rig.system.calls
    assert allocation(member).state == "ended"


def test_drains_go_both_ways_and_whoever_closed_it_opens_it(rig: MemoryRig) -> None:
    rig.look()
    rig.system.nodes = [Found("hpc1", open=False, reason="fan broken")]
    rig.look()
    node = Node.objects.get()
    assert (node.schedulable, node.schedulable_reason) == ("cordoned", "fan broken")
    rig.system.nodes = [Found("hpc1")]
    rig.look()
    assert Node.objects.get().schedulable == "open"
    node_cordon(acting_user=TESTER, node=Node.objects.get(), reason="new driver")
    rig.look()
    assert rig.system.calls[-1] == "cordon hpc1 gpupool: new driver"
    rig.system.nodes = [Found("hpc1", open=False, reason="gpupool: new driver")]
    rig.look()
    assert Node.objects.get().schedulable_by_name == "test"
    node_uncordon(acting_user=TESTER, node=Node.objects.get(), reason="done")
    rig.look()
    assert rig.system.calls[-1] == "uncordon hpc1"


def test_output_is_followed_in_whole_characters_and_once(rig: MemoryRig) -> None:
    member = running(rig)
    run = rig.system.of(member)[0]
    text = "epoch 1 · 损失 0.5\n".encode()
    run.written = text[: text.index("损".encode()) + 1]
    outputs_follow(cluster_id=rig.cluster.pk)
    run.written = text
    outputs_follow(cluster_id=rig.cluster.pk)
    outputs_follow(cluster_id=rig.cluster.pk)
    rows = AllocationLog.objects.filter(allocation=member.allocation_id).order_by("offset")
    assert "".join(rows.values_list("data", flat=True)) == text.decode()
    assert [row.offset for row in rows] == [0, text.index("损".encode())]
    member.refresh_from_db()
    assert member.read_bytes == len(text)


def test_a_look_that_fails_changes_no_row_of_work(rig: MemoryRig) -> None:
    member = running(rig)
    before = (allocation(member).version, Allocation.objects.count())
    rig.away()
    told = cluster_poll(cluster_id=rig.cluster.pk, nodes=True)
    assert (told.answered, told.code, told.reports) == (False, "controller_away", 0)
    assert (allocation(member).version, Allocation.objects.count()) == before
