"""What a planner keeps in memory: it equals the database after any change, also with several planners; whom a cycle
judges; and what it writes of those who wait.
"""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from django.db import connection, transaction

from pool.engine.canonical import snapshot_hash
from pool.engine.model import Policy
from pool.models import Allocation, Gpu, Node, QueueEntry, QueueLine
from pool.services import cycle as cycles
from pool.services.cycle import planner_reset, schedule_cycle
from pool.services.feed import feed_clean
from pool.services.planner import PlannerMemory
from portal.accounts.models import Department
from portal.kernel.clock import set_clock
from quotas.models import CapacityRequest, QuotaUsage, UserLimit
from tests.pool import builders as pool
from tests.quotas import build

pytestmark = pytest.mark.django_db(transaction=True)
T = datetime(2026, 6, 16, 6, 0, tzinfo=UTC)


@pytest.fixture(autouse=True)
def clock():
    planner_reset()
    with set_clock(T):
        yield
    planner_reset()


def seen(memory: PlannerMemory) -> str:
    memory.refresh()
    return snapshot_hash(memory.snapshot(Policy()))


def end(allocation: Allocation) -> None:
    pool.report_running(allocation)
    pool.report_ended(allocation)
    pool.report_free(allocation)


def test_the_memory_equals_the_database_after_any_change(team, h800):
    other = build.department("og")
    for _ in range(3):
        pool.node(h800)
    for where in (team, other):
        build.limits(where, h800, 8, hard_cap=20)
    rng = random.Random(5)
    who = build.user(home=team)

    def change(number: int) -> None:
        match rng.randrange(10):
            case 0 | 1 | 2:
                pool.queued(rng.choice([team, other]), h800, rng.choice([1, 2, 4, 8]), who)
            case 3 | 4:
                schedule_cycle(cause="test")
            case 5:
                running = Allocation.objects.exclude(state="ended").order_by("?").first()
                if running is not None:
                    end(running)
            case 6:
                Node.objects.filter(pk=rng.choice(Node.objects.all()).pk).update(
                    schedulable=rng.choice(["open", "cordoned"]), rack=f"r{number}"
                )
            case 7:
                Gpu.objects.filter(pk=rng.choice(Gpu.objects.all()).pk).update(cordoned=rng.random() < 0.5)
            case 8:
                UserLimit.objects.update_or_create(user=who, defaults={"gpus_at_once_milli": number * 1000})
            case 9:
                Department.objects.filter(pk=other.pk).update(parent=rng.choice([team, None]))
                QuotaUsage.objects.filter(department=other).update(hard_cap=rng.randrange(30) * 1000)

    memory, late = PlannerMemory(), PlannerMemory()
    late.refresh()
    for number in range(40):
        change(number)
        assert seen(memory) == seen(PlannerMemory()), number
    assert seen(late) == seen(memory)
    assert (memory.loads, late.loads) == (1, 1)
    assert Allocation.objects.count() > 3


def test_uncommitted_changes_are_seen_once_they_are_committed_in_any_order(team, h800):
    """A transaction that began before a look and commits after it is not missed."""
    import threading

    pool.node(h800)
    build.limits(team, h800, 8)
    memory = PlannerMemory()
    memory.refresh()
    written, look_done = threading.Event(), threading.Event()

    def slow() -> None:
        with transaction.atomic():
            pool.queued(team, h800, 1)
            written.set()
            look_done.wait(10)
        connection.close()

    thread = threading.Thread(target=slow)
    thread.start()
    assert written.wait(10)
    fast = pool.queued(team, h800, 2)
    memory.refresh()
    assert list(memory.asked) == [fast.pk]
    look_done.set()
    thread.join()
    memory.refresh()
    assert len(memory.asked) == 2
    assert memory.loads == 1


def test_who_looked_before_rows_of_the_feed_were_dropped_reads_everything_anew(team, h800):
    pool.node(h800)
    memory, late = PlannerMemory(), PlannerMemory()
    memory.refresh()
    late.refresh()
    pool.queued(team, h800, 1)
    memory.refresh()
    assert memory.look is not None
    # Whatever else goes on in this server, all rows so far: those of transactions below the snapshot's xmax.
    everything = replace(memory.look, xmin=int(memory.look.snapshot.split(":")[1]))
    assert feed_clean(everything) > 0
    pool.queued(team, h800, 2)
    assert seen(late) == seen(memory) == seen(PlannerMemory())
    assert late.loads == 2


def test_a_missing_row_of_the_marks_is_made_and_everything_read_anew(team, h800):
    pool.node(h800)
    build.limits(team, h800, 8)
    memory, other = PlannerMemory(), PlannerMemory()
    memory.refresh()
    other.refresh()
    pool.queued(team, h800, 1)
    with connection.cursor() as cursor:
        cursor.execute("DELETE FROM pool_planner_mark")
    other.refresh()
    assert other.look is not None and feed_clean(other.look) >= 0
    assert other.loads == 2 and seen(other) == seen(memory) == seen(PlannerMemory())
    assert memory.loads == 2 and memory.entries is None
    with connection.cursor() as cursor:
        cursor.execute("TRUNCATE pool_planner_mark")
    assert len(schedule_cycle(cause="test").placed) == 1
    with connection.cursor() as cursor:
        cursor.execute("SELECT id FROM pool_planner_mark")
        assert cursor.fetchall() == [(1,)]


def test_a_new_request_is_judged_alone_and_keeps_off_promises(team, h800):
    pool.node(h800)
    build.limits(team, h800, 16)
    pool.queued(team, h800, 4, duration_s=7200)
    gang = pool.queued(team, h800, 8, queued_at=T + timedelta(seconds=1))
    first = schedule_cycle()
    assert (first.whole, len(first.placed), first.waiting) == (True, 1, 1)
    before = QueueEntry.objects.get(request=gang)
    long_one = pool.queued(team, h800, 1, duration_s=3 * 7200, queued_at=T + timedelta(seconds=2))
    short = pool.queued(team, h800, 1, duration_s=3600, queued_at=T + timedelta(seconds=3))
    result = schedule_cycle()
    assert (result.whole, len(result.placed)) == (False, 1)
    assert Allocation.objects.order_by("-id")[0].request_id == short.pk
    entry = QueueEntry.objects.get(request=long_one)
    assert (entry.reason, entry.position, entry.of) == ("behind", 2, 2)
    assert QueueLine.objects.get(line="h800").requests == [gang.pk, long_one.pk]
    assert QueueEntry.objects.get(request=gang).planned_at == before.planned_at
    assert schedule_cycle().placed == ()


@pytest.mark.parametrize("what", ["ended", "quota", "node", "policy", "withdrawn", "floor", "clock back"])
def test_what_makes_everybody_be_judged_again(team, h800, what):
    from pool.models import SchedulingPolicy

    node = pool.node(h800)
    build.limits(team, h800, 8)
    pool.queued(team, h800, 8)
    waits = pool.queued(team, h800, 8, queued_at=T + timedelta(seconds=1))
    assert schedule_cycle().whole
    assert not schedule_cycle().whole
    moment = T
    match what:
        case "ended":
            allocation = Allocation.objects.get()
            cycles.planner_reset()  # its closing plans at once, in this very process
            end(allocation)
            assert Allocation.objects.filter(request=waits).exists()
            return
        case "quota":
            QuotaUsage.objects.update(hard_cap=30_000)
        case "node":
            Node.objects.filter(pk=node.pk).update(schedulable="cordoned")
        case "policy":
            SchedulingPolicy.objects.create(name="p", active=True, values={"nodes_told": 1})
        case "withdrawn":
            CapacityRequest.objects.filter(pk=waits.pk).update(state="withdrawn")
        case "floor":
            moment = T + timedelta(seconds=61)
        case "clock back":
            moment = T - timedelta(hours=1)
    with set_clock(moment):
        assert schedule_cycle().whole


def test_a_start_moves_everybody_up_without_writing_their_entries(team, h800):
    pool.node(h800, 2)
    build.limits(team, h800, 8)
    first, second, third = (
        pool.queued(team, h800, 2, queued_at=T + timedelta(seconds=number)) for number in range(3)
    )
    schedule_cycle()
    assert [QueueEntry.objects.get(request=one).position for one in (second, third)] == [1, 2]
    written = QueueEntry.objects.get(request=third).planned_at
    with set_clock(T + timedelta(seconds=30)):
        end(Allocation.objects.get(request=first))
        schedule_cycle()
    entry = QueueEntry.objects.get(request=third)
    assert (entry.position, entry.of) == (1, 1)
    assert QueueEntry.objects.filter(request=second).count() == 0
    assert (entry.ahead, entry.planned_at >= written) == ([], True)


def test_a_cycle_inside_a_transaction_is_refused(team):
    with pytest.raises(RuntimeError), transaction.atomic():
        schedule_cycle()


def test_a_request_that_cannot_be_judged_is_set_aside_and_the_others_start(team, h800, monkeypatch):
    from portal.ops.models import Incident

    pool.node(h800)
    build.limits(team, h800, 8)
    bad = pool.queued(team, h800, 1, purpose="\u202e💥")
    good = [pool.queued(team, h800, 1, queued_at=T + timedelta(seconds=number)) for number in (1, 2, 3)]
    real = cycles.decide

    def decide(snapshot, policy, now, **values):
        if any(one.id == bad.pk for one in snapshot.pending):
            raise OverflowError("absurd")
        return real(snapshot, policy, now, **values)

    monkeypatch.setattr(cycles, "decide", decide)
    assert len(schedule_cycle().placed) == 3
    assert set(Allocation.objects.values_list("request_id", flat=True)) == {one.pk for one in good}
    entry = QueueEntry.objects.get(request=bad)
    assert (entry.reason, entry.figures) == ("cannot_be_judged", {"error": "OverflowError: absurd"})
    assert Incident.objects.get().kind == "request_cannot_be_judged"
    pool.queued(team, h800, 1, queued_at=T + timedelta(seconds=9))
    assert len(schedule_cycle().placed) == 1
    assert Incident.objects.get().occurrences == 1
