"""Series through the scheduler: arrays a few at a time, replicas over nodes, windows, elastic gangs, data sets."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from pool.executors.agent.spec import start_spec
from pool.models import Allocation, AllocationMember, Dataset, NodeFabric, QueueEntry
from pool.selectors.what_if import what_if
from pool.services.cycle import schedule_cycle
from pool.services.datasets import dataset_save
from portal.kernel.clock import set_clock
from portal.ops.services.outbox import outbox_deliver
from quotas.models import CapacityRequest, QuotaUsage, UserLimit
from quotas.selectors.flavours import flavours_on_offer
from quotas.selectors.user_limits import held_milli
from quotas.services.asking import read_request
from quotas.services.queue_sweep import queue_sweep
from quotas.services.series import series_follow
from tests.pool import builders as pool
from tests.quotas import build

pytestmark = pytest.mark.django_db(transaction=True)
T = datetime(2026, 6, 16, 6, 3, tzinfo=UTC)  # 14:03 in Shanghai
OFFICE = [[3 if 9 <= hour < 18 else 1 for hour in range(24)]] * 5 + [[1] * 24] * 2


@pytest.fixture
def house():
    with set_clock(T):
        yield build.House()


def open_allocations():
    return Allocation.objects.exclude(state="ended").order_by("id")


def finish(allocation, exit_code: int = 0) -> None:
    """The work ran and ended; its cards were seen free."""
    pool.report_running(allocation)
    pool.report_ended(allocation, exit_code)
    pool.report_free(allocation)
    for _ in range(3):
        outbox_deliver()


def agreed(request: CapacityRequest) -> CapacityRequest:
    """In line, as if everybody had agreed."""
    CapacityRequest.objects.filter(pk=request.pk).update(state="queued", queued_at=T, decided_at=T)
    request.refresh_from_db()
    return request


def service(house, **changes: Any) -> CapacityRequest:
    """A service that everybody has agreed to."""
    made = house.submit(
        is_service=True, review_at=(T + timedelta(days=90)).isoformat(), duration_s="", **changes
    )  # fmt: skip
    CapacityRequest.objects.filter(pk=made.pk).update(
        state="series", decided_at=T, queued_at=T, version=made.version + 1
    )
    series_follow(head_id=made.pk)
    made.refresh_from_db()
    return made


def test_an_array_runs_a_few_at_a_time_with_its_index(house):
    pool.node(house.h800)
    head = house.submit(array_count=3, array_at_once=2)
    schedule_cycle()
    first, second = open_allocations()
    assert [a.request.member_index for a in (first, second)] == [0, 1]
    env = start_spec(AllocationMember.objects.select_related("node").get(allocation=second))["env"]
    assert (env["GPUPOOL_ARRAY_INDEX"], env["GPUPOOL_ARRAY_SIZE"], env["GPUPOOL_SERIES"]) == (
        "1",
        "3",
        head.ref,
    )
    assert not QueueEntry.objects.filter(request__head=head, request__member_index=2).exists()
    finish(first)
    schedule_cycle()
    assert [a.request.member_index for a in open_allocations()] == [1, 2]
    for allocation in open_allocations():
        finish(allocation)
    head.refresh_from_db()
    assert (head.state, head.end_reason) == ("ended", "completed")
    assert QuotaUsage.objects.get(department=house.video, flavour=house.h800).total == 0


def test_S142_members_that_failed_for_good_hold_nothing_while_the_rest_goes_on(house):
    pool.node(house.h800)
    head = house.submit(array_count=3, array_at_once=3)
    schedule_cycle()
    members = list(open_allocations())
    usage = QuotaUsage.objects.get(department=house.video, flavour=house.h800)
    assert (len(members), usage.total) == (3, 3000)
    for allocation in members[:2]:
        finish(allocation, 1)
    usage.refresh_from_db()
    head.refresh_from_db()
    assert (usage.total, usage.direct, open_allocations().count(), head.state) == (1000, 1000, 1, "series")


def test_S143_replicas_stand_on_different_nodes_and_lend_by_night(house):
    for _ in range(3):
        pool.node(house.h800)
    head = service(house, scale_by="timetable", timetable={"zone": "Asia/Shanghai", "days": OFFICE})
    schedule_cycle()
    taken = list(open_allocations())
    assert len(taken) == 3
    assert len({m.node_id for a in taken for m in a.members.all()}) == 3
    for allocation in taken:
        pool.report_running(allocation)
    usage = QuotaUsage.objects.get(department=house.video, flavour=house.h800)
    assert usage.total == 3000
    with set_clock(datetime(2026, 6, 16, 10, 0, tzinfo=UTC)):  # 18:00
        queue_sweep()
        for _ in range(2):
            outbox_deliver()
        leaving = list(Allocation.objects.filter(state="stopping").order_by("id"))
        assert {a.end_rule for a in leaving} == {"scaled_down"}
        assert [a.request.member_index for a in leaving] == [1, 2]
        usage.refresh_from_db()
        assert usage.total == 3000  # what ends is charged until it has ended
        for allocation in leaving:
            pool.report_ended(allocation)
            pool.report_free(allocation)
        usage.refresh_from_db()
        assert usage.total == 1000  # what the night does not need may be borrowed
        for _ in range(3):
            outbox_deliver()
    with set_clock(datetime(2026, 6, 17, 0, 50, tzinfo=UTC)):
        queue_sweep()
        schedule_cycle()
    assert open_allocations().count() == 3
    assert head.members.filter(end_reason="released").count() == 2


def test_a_window_starts_at_its_time_and_ends_with_it(house):
    pool.node(house.h800)
    head = house.submit(
        duration_s="",
        window={
            "days": [1], "from": "15:00", "to": "16:00", "zone": "Asia/Shanghai", "first": "2026-06-16",
            "until": "2026-06-16",
        },
    )  # fmt: skip
    start = datetime(2026, 6, 16, 7, tzinfo=UTC)
    schedule_cycle()
    assert open_allocations().count() == 0
    entry = QueueEntry.objects.get(request__head=head)
    assert (entry.reason, entry.figures["kept"]) == ("not_before", True)
    with set_clock(start + timedelta(minutes=20)):
        schedule_cycle()
        allocation = open_allocations().get()
        assert allocation.expires_at == start + timedelta(hours=1)
        pool.report_running(allocation)
        allocation.refresh_from_db()
        assert allocation.expires_at == start + timedelta(hours=1)
        env = start_spec(AllocationMember.objects.select_related("node").get(allocation=allocation))["env"]
        assert env["GPUPOOL_WINDOW_END"] == "2026-06-16T08:00:00Z"


def test_S144_an_elastic_gang_starts_with_what_there_is_and_is_charged_for_that(house):
    for _ in range(3):
        pool.node(house.h800)
    agreed(house.submit(gpus_per_node=8, nodes=1))
    schedule_cycle()
    made = agreed(house.submit(gpus_per_node=8, nodes=3, nodes_min=2, purpose="elastic"))
    schedule_cycle()
    allocation = open_allocations().get(request=made)
    assert (allocation.members.count(), allocation.charge_milli) == (2, 16_000)
    assert QuotaUsage.objects.get(department=house.video, flavour=house.h800).total == 24_000


def test_an_elastic_gang_starts_as_large_as_its_persons_limit_allows_and_counts_as_large_as_it_is(house):
    for _ in range(4):
        pool.node(house.h800)
    UserLimit.objects.create(user=house.lin, gpus_at_once_milli=17_000)
    made = agreed(house.submit(gpus_per_node=8, nodes=3, nodes_min=2, purpose="elastic"))
    schedule_cycle()
    assert open_allocations().get(request=made).charge_milli == 16_000
    last, beyond = house.submit(), house.submit()
    schedule_cycle()
    assert open_allocations().filter(request=last).exists()
    entry = QueueEntry.objects.get(request=beyond)
    assert (entry.reason, entry.figures["used"]) == ("user_limit", 17_000)
    assert held_milli(house.lin.pk) == 17_000


def test_a_person_runs_no_more_requests_than_allowed_and_is_told(house):
    pool.node(house.h800)
    UserLimit.objects.create(user=house.lin, running_at_once=1)
    house.submit()
    second = house.submit()
    schedule_cycle()
    entry = QueueEntry.objects.get(request=second)
    assert (entry.reason, entry.figures["limit"], entry.figures["used"]) == ("running_limit", 1, 1)


def test_work_goes_where_its_data_set_and_network_are(house):
    far, near = pool.node(house.h800, name="far"), pool.node(house.h800, name="near")
    NodeFabric.objects.create(node=near, kind="infiniband", speed_gbit_s=400)
    dataset_save(
        acting_user=build.actor(house.zhao), values={"code": "laion", "name": "LAION", "nodes": ["near"]}
    )
    made = house.submit(datasets=["laion"], stage_datasets=False)
    schedule_cycle()
    assert open_allocations().get(request=made).members.get().node_id == near.pk
    assert Dataset.objects.get().cached_on.get().pk == near.pk
    assert far.pk != near.pk


def wish(house, **changes: Any):
    who = house.lin
    cleaned = read_request(house.ask(**changes), user=who, policy=build.policy(who), draft=True)
    return what_if(cleaned, user_id=who.pk, offered=list(flavours_on_offer()), max_age_s=0)


def test_what_if_tells_start_and_what_would_start_sooner(house):
    pool.node(house.h800)
    a100 = build.flavour("a100", installed=None, name="A100 80GB", mig_capable=True, mig_table="a100-80")
    build.limits(house.video, a100, 8)
    build.price(a100, 10)
    pool.node(a100)
    now_ = wish(house, gpus_per_node=4)
    assert (now_.fit.starts_now, now_.near, now_.deadline) == (True, (), "")
    agreed(house.submit(gpus_per_node=6))
    schedule_cycle()
    before = CapacityRequest.objects.count()
    soon = (T + timedelta(hours=6, minutes=30)).isoformat()
    later = wish(house, gpus_per_node=4, duration_s=6 * 3600, deadline_at=soon)
    assert (later.fit.starts_now, later.fit.reason) == (False, "no_node_fits")
    assert [(n.kind, dict(n.changes), n.cost_micro) for n in later.near] == [
        ("fewer", {"gpus_per_node": 2}, 2 * 6 * 16_000_000),
        ("other_model", {"flavour": "a100", "requirement": {}}, 4 * 6 * 10_000_000),
    ]
    assert later.fit.start_from is not None
    assert (later.deadline, later.ends_by) == ("missed", later.fit.start_from + timedelta(hours=6))
    assert CapacityRequest.objects.count() == before
