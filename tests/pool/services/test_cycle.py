"""The cycle on a database: who gets what, what is written with it, and why the rest waits."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from pool.models import (
    AgentCommand,
    Allocation,
    Gpu,
    Lease,
    LeaseSpan,
    QueueEntry,
    SchedulerCycle,
    SchedulingPolicy,
)
from pool.services.cycle import schedule_cycle
from portal.kernel.clock import set_clock
from portal.ops.models import AuditEvent, OutboxEvent
from quotas.models import CapacityRequest, QuotaUsage, UsageSpan, UserLimit
from tests.pool import builders as pool
from tests.quotas import build

pytestmark = pytest.mark.django_db(transaction=True)
T = datetime(2026, 6, 16, 6, 0, tzinfo=UTC)


@pytest.fixture(autouse=True)
def clock():
    with set_clock(T):
        yield


def spans(allocation):
    rows = LeaseSpan.objects.filter(lease__allocation=allocation).order_by("gpu__index", "span")
    return [(row.gpu.index, row.span.lower, row.span.upper) for row in rows.select_related("gpu")]


def test_a_request_becomes_an_allocation_with_everything_written_once(team, h800):
    node = pool.node(h800)
    build.limits(team, h800, 4, hard_cap=8)
    request = pool.queued(team, h800, 2)
    result = schedule_cycle(cause="test")
    assert (result.ran, len(result.placed), result.refused, result.waiting) == (True, 1, 0, 0)
    allocation = Allocation.objects.get()
    assert (allocation.state, allocation.charge_milli, allocation.quota_debited) == ("starting", 2000, True)
    assert allocation.expires_at == T + timedelta(hours=1)
    member = allocation.members.get()
    assert (member.node_id, member.number, member.cpu_milli, member.memory_mib) == (
        node.pk,
        0,
        16000,
        128_000,
    )
    assert spans(allocation) == [(0, 0, 1000), (1, 0, 1000)]
    assert [lease.charge for lease in allocation.leases.all()] == [1000, 1000]
    assert set(UsageSpan.objects.values_list("key", "charge_milli", "node_name", "site_code")) == {
        (lease.uid, 1000, node.name, "bj") for lease in allocation.leases.all()
    }
    usage = QuotaUsage.objects.get(department=team, flavour=h800)
    assert (usage.direct, usage.total) == (2000, 2000)
    request.refresh_from_db()
    assert request.state == "allocated"
    assert list(allocation.events.order_by("id").values_list("kind", flat=True)) == ["reserved"]
    assert AuditEvent.objects.filter(action="allocation.reserved").count() == 1
    assert OutboxEvent.objects.filter(topic="pool.allocation_reserved").count() == 1
    command = AgentCommand.objects.get()
    assert (command.kind, command.payload["spec"]["command"]) == ("start", "python train.py")
    assert len(command.payload["spec"]["gpu_uuids"]) == 2
    cycle = SchedulerCycle.objects.get()
    assert (cycle.placed, cycle.refused_on_apply, cycle.considered, cycle.cause) == (1, 0, 1, "test")
    assert cycle.ops[0]["op"] == "place"
    assert allocation.cycle_id == cycle.pk


def test_what_quota_blocks_waits_with_the_sum_and_smaller_work_passes(team, h800):
    pool.node(h800, name="n-a")
    build.limits(team, h800, 8, hard_cap=8)
    pool.queued(team, h800, 3, duration_s=7200)
    gang = pool.queued(team, h800, 8, queued_at=T + timedelta(seconds=1))
    small = pool.queued(team, h800, 1, queued_at=T + timedelta(seconds=2))
    result = schedule_cycle()
    assert (len(result.placed), result.waiting) == (2, 1)
    assert Allocation.objects.filter(request=small).exists()
    entry = QueueEntry.objects.get(request=gang)
    assert (entry.reason, entry.position, entry.ahead, entry.basis) == ("quota_blocked", 1, [], "")
    assert entry.figures == {
        "level": "Vg", "level_is_installation": False, "rule": "hard_cap", "limit": 8000, "used": 3000,
        "requested": 8000, "available": 5000, "flavour": "h800",
    }  # fmt: skip
    assert entry.of == 1


def test_blocked_gang_gets_a_range_and_a_short_one_passes(team, h800):
    pool.node(h800, name="n-a")
    pool.node(h800, name="n-b", gpus=2)
    build.limits(team, h800, 8)
    first = pool.queued(team, h800, 3, duration_s=7200)
    schedule_cycle()
    assert Allocation.objects.get().request_id == first.pk
    gang = pool.queued(team, h800, 6, queued_at=T + timedelta(seconds=1))
    long_one = pool.queued(
        team, h800, 5, duration_s=7201, queued_at=T + timedelta(seconds=2), interruptible=True
    )
    schedule_cycle()
    entry = QueueEntry.objects.get(request=gang)
    assert entry.reason == "no_node_fits"
    assert (entry.figures["need_per_node"], entry.figures["best_free_on_one_node"]) == (6, 5)
    assert entry.figures["nodes"] == [
        {"node": "n-a", "free": 5, "of": 8},
        {"node": "n-b", "free": 2, "of": 2},
    ]
    assert entry.start_from == T + timedelta(hours=2)
    assert entry.start_to == T + timedelta(hours=2, minutes=30)
    assert entry.basis == "lease_ends"
    behind = QueueEntry.objects.get(request=long_one)
    assert behind.reason == "behind"
    assert behind.figures["requests"] == [str(gang.uid)]
    assert behind.ahead == [gang.pk]


def test_entries_go_with_their_requests(team, h800):
    build.limits(team, h800, 8)
    request = pool.queued(team, h800, 1)
    schedule_cycle()
    assert QueueEntry.objects.get().reason == "model_absent"
    CapacityRequest.objects.filter(pk=request.pk).update(state="withdrawn")
    schedule_cycle()
    assert QueueEntry.objects.count() == 0


def test_fractions_share_a_card_and_mig_takes_slices(team):
    t4 = build.flavour("t4", installed=None, memory_mib=16384)
    a100 = build.flavour(
        "a100", installed=None, memory_mib=40960, mig_table="A100-40GB", compute_slices=7, memory_slices=8
    )
    pool.node(t4, 1)
    split = pool.node(a100, 1)
    pool.slices(split.gpus.get(), ("3g.20gb", 4, 4, 3), ("1g.5gb", 0, 1, 1), ("1g.5gb", 1, 1, 1))
    for what in (t4, a100):
        build.limits(team, what, 4)
    half = {"shape": "fraction", "fraction_milli": 500, "fraction_mib": 4096}
    pool.queued(team, t4, **half)
    pool.queued(team, t4, **half)
    pool.queued(team, a100, shape="mig", mig_profile="1g.5gb", mig_count=2, charge_milli=284)
    assert len(schedule_cycle().placed) == 3
    shared = Lease.objects.filter(gpu__flavour=t4).order_by("id")
    assert [(lease.charge, lease.memory_mib) for lease in shared] == [(500, 4096), (500, 4096)]
    assert [s for a in Allocation.objects.filter(flavour=t4).order_by("id") for s in spans(a)] == [
        (0, 0, 500),
        (0, 500, 1000),
    ]
    mig = Allocation.objects.get(flavour=a100)
    assert mig.charge_milli == 284
    assert spans(mig) == [(0, 0, 125), (0, 125, 250)]
    assert sorted(mig.leases.values_list("charge", flat=True)) == [142, 142]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"condition": "fault", "condition_reason": "xid_79"}, "larger_than_any_node"),
        ({"cordoned": True}, "larger_than_any_node"),
        ({"foreign_use": [{"pid": 1}]}, "larger_than_any_node"),
    ],
)
def test_bad_cards_take_nothing(team, h800, change, reason):
    pool.node(h800, 1)
    build.limits(team, h800, 1)
    Gpu.objects.update(**change)
    pool.queued(team, h800, 1)
    assert schedule_cycle().placed == ()
    assert QueueEntry.objects.get().reason == reason


@pytest.mark.parametrize(
    ("change", "because"),
    [
        ({"health": "suspect"}, "suspect"),
        ({"health": "lost"}, "lost"),
        ({"health": "unknown"}, "no_agent"),
        ({"schedulable": "cordoned"}, "cordoned"),
        ({"schedulable": "maintenance"}, "maintenance"),
    ],
)
def test_closed_nodes_take_nothing(team, h800, change, because):
    pool.node(h800, 1, **change)
    build.limits(team, h800, 1)
    pool.queued(team, h800, 1)
    assert schedule_cycle().placed == ()
    entry = QueueEntry.objects.get()
    assert entry.reason == "nodes_unavailable"
    assert entry.figures["excluded"][0]["because"] == because


def test_a_late_node_still_takes_work(team, h800):
    pool.node(h800, 1, health="late")
    build.limits(team, h800, 1)
    pool.queued(team, h800, 1)
    assert len(schedule_cycle().placed) == 1


def test_personal_limit_of_cards_at_once(team, h800):
    pool.node(h800)
    build.limits(team, h800, 8)
    who = build.user(home=team)
    UserLimit.objects.create(user=who, gpus_at_once_milli=3000)
    pool.queued(team, h800, 2, who)
    second = pool.queued(team, h800, 2, who, queued_at=T + timedelta(seconds=1))
    assert len(schedule_cycle().placed) == 1
    entry = QueueEntry.objects.get(request=second)
    assert entry.reason == "user_limit"
    assert (entry.figures["limit"], entry.figures["used"], entry.figures["requested"]) == (3000, 2000, 2000)


def test_a_requirement_is_placed_on_the_first_flavour_that_has_room(team, h800):
    a100 = build.flavour("a100", installed=None, memory_mib=40960)
    pool.node(a100, 1)
    for what in (h800, a100):
        build.limits(team, what, 4)
    pool.queued(team, None, 1, options=["h800", "a100"], requirement={"memory_mib": 40000}, charge_milli=1000)
    schedule_cycle()
    assert Allocation.objects.get().flavour == a100


def test_work_without_a_gpu_goes_to_a_test_node_and_costs_nothing(team):
    test_node = pool.node(None, test_only=True)
    pool.queued(team, None, 0, shape="cpu", cpu_milli=1000)
    assert len(schedule_cycle().placed) == 1
    allocation = Allocation.objects.get()
    assert (allocation.flavour, allocation.charge_milli, allocation.quota_debited) == (None, 0, False)
    assert allocation.members.get().node == test_node
    assert (Lease.objects.count(), UsageSpan.objects.count()) == (0, 0)


def test_the_published_policy_is_used(team, h800):
    SchedulingPolicy.objects.create(name="p", active=True, values={"max_reservations": 0, "sorcery": 1})
    pool.node(h800)
    build.limits(team, h800, 16)
    pool.queued(team, h800, 4)
    pool.queued(team, h800, 8, queued_at=T + timedelta(seconds=1))
    schedule_cycle()
    assert QueueEntry.objects.get().start_from is None


def test_a_cycle_costs_a_fixed_number_of_queries(team, h800, django_assert_max_num_queries):
    for _ in range(4):
        pool.node(h800)
    build.limits(team, h800, 1, hard_cap=1)
    for number in range(12):
        pool.queued(team, h800, 2, queued_at=T + timedelta(seconds=number))
    with django_assert_max_num_queries(30):
        assert schedule_cycle().waiting == 12


def test_a_window_is_kept_and_told(team, h800):
    pool.node(h800)
    build.limits(team, h800, 16)
    window = pool.queued(team, h800, 8, start_at=T + timedelta(hours=2))
    pool.queued(team, h800, 1, duration_s=3 * 3600, queued_at=T + timedelta(seconds=1))
    short = pool.queued(team, h800, 1, duration_s=3600, queued_at=T + timedelta(seconds=2))
    schedule_cycle()
    assert Allocation.objects.get().request_id == short.pk
    entry = QueueEntry.objects.get(request=window)
    assert (entry.reason, entry.figures["kept"]) == ("not_before", True)
    assert entry.figures["start_at"] == "2026-06-16T08:00:00+00:00"
    assert (entry.start_from, entry.basis) == (T + timedelta(hours=2), "reservation")
    with set_clock(T + timedelta(hours=2)):
        pool.report_running(Allocation.objects.get())
        pool.report_ended(Allocation.objects.get())
        pool.report_free(Allocation.objects.get())
        schedule_cycle()
    assert Allocation.objects.exclude(state="ended").get().request_id == window.pk
