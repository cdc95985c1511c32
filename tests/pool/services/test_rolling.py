"""Services roll over nodes: a drained replica ends only when another is well elsewhere, or its notice is over."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from pool.models import Allocation, AllocationEvent, ReclaimCase
from pool.services.allocations import allocation_reclaim
from pool.services.cycle import schedule_cycle
from pool.services.ladder import ladder_sweep
from pool.services.maintenance import window_cancel, window_plan
from pool.services.nodes import node_drain, node_uncordon
from pool.services.rolling import replicas_roll
from portal.kernel.clock import now, set_clock
from portal.ops.actor import system
from portal.ops.services.outbox import outbox_deliver
from quotas.models import CapacityRequest
from quotas.services.requests import request_withdraw
from quotas.services.series import series_follow
from tests.pool import builders as pool
from tests.quotas import build

pytestmark = pytest.mark.django_db(transaction=True)
T = datetime(2026, 6, 16, 6, 3, tzinfo=UTC)
CHECK = {"kind": "http", "port": 8080, "path": "/ready"}
ADMIN = system("test")


@pytest.fixture
def house():
    with set_clock(T):
        yield build.House()


def service(house: Any, replicas: int, **changes: Any) -> CapacityRequest:
    """An agreed service of so many replicas, running on as many nodes."""
    made = house.submit(
        is_service=True, review_at=(T + timedelta(days=90)).isoformat(), duration_s="", health=CHECK,
        replicas_min=1, replicas_max=replicas, scale_by="timetable",
        timetable={"zone": "Asia/Shanghai", "days": [[replicas] * 24] * 7}, **changes,
    )  # fmt: skip
    CapacityRequest.objects.filter(pk=made.pk).update(
        state="series", decided_at=T, queued_at=T, version=made.version + 1
    )
    series_follow(head_id=made.pk)
    schedule_cycle()
    for row in live():
        begins(row)
    made.refresh_from_db()
    return made


def live() -> list[Allocation]:
    return list(Allocation.objects.exclude(state="ended").select_related("request").order_by("id"))


def node_of(allocation: Allocation) -> Any:
    return allocation.members.get().node


def begins(allocation: Allocation, well: bool = True) -> None:
    pool.report_running(allocation)
    if well:
        told(allocation, "health_ok")


def told(allocation: Allocation, kind: str) -> None:
    AllocationEvent.objects.create(
        allocation=allocation, at=now(), kind=kind, actor_name="agent", facts={"member": 0}
    )


def ends(allocation: Allocation) -> None:
    pool.report_ended(allocation)
    pool.report_free(allocation)
    for _ in range(3):
        outbox_deliver()


def states(*rows: Allocation) -> list[str]:
    return [str(Allocation.objects.get(pk=row.pk).state) for row in rows]


def drain(allocation: Allocation, grace_s: int = 1800) -> None:
    node_drain(acting_user=ADMIN, node=node_of(allocation), reason="fan", grace_s=grace_s)
    outbox_deliver()


def test_the_old_replica_ends_when_the_new_one_is_well_and_not_before(house):
    for _ in range(3):
        pool.node(house.h800)
    head = service(house, 2)
    old, other = live()
    drain(old)
    schedule_cycle()
    new = live()[-1]
    assert (len(live()), new.request.head_id, new.request.member_index) == (3, head.pk, 2)
    assert len({node_of(row).pk for row in (old, other, new)}) == 3
    pool.report_running(new)
    replicas_roll()
    assert states(old, other) == ["running", "running"]  # it runs, and nobody has heard that it answers
    told(new, "health_failed")
    replicas_roll()
    assert states(old) == ["running"]
    told(new, "health_ok")
    assert replicas_roll()["stopped"] == 1
    assert states(old, other, new) == ["stopping", "running", "running"]
    ends(old)
    schedule_cycle()
    old.refresh_from_db()
    assert (old.end_reason, old.request.state) == ("maintenance", "ended")
    assert [row.pk for row in live()] == [other.pk, new.pk]
    assert head.members.filter(state__in=["queued", "allocated"]).count() == 2
    assert replicas_roll() == {"moving": 0, "stopped": 0, "stay": 0}


def test_of_two_on_one_node_each_waits_for_one_of_its_own(house):
    pool.node(house.h800, gpus=2)
    service(house, 2)
    first, second = live()
    assert node_of(first) == node_of(second)
    pool.node(house.h800)
    drain(first)
    schedule_cycle()
    third, fourth = live()[2:]
    begins(third)
    assert replicas_roll()["stopped"] == 1
    assert sorted(states(first, second)) == ["running", "stopping"]
    assert replicas_roll()["stopped"] == 0
    begins(fourth)
    assert replicas_roll()["stopped"] == 1
    assert states(first, second, third, fourth) == ["stopping", "stopping", "running", "running"]


def test_where_nothing_is_free_elsewhere_the_notice_ends_as_any_other(house):
    pool.node(house.h800, gpus=1)
    head = service(house, 1)
    (old,) = live()
    drain(old, grace_s=600)
    schedule_cycle()
    assert live() == [old] and head.members.filter(state="queued").count() == 1
    with set_clock(T + timedelta(seconds=601)):
        replicas_roll()
        ladder_sweep()
        assert states(old) == ["stopping"]
        ends(old)
        node_uncordon(acting_user=ADMIN, node=node_of(old), reason="fan changed")
        schedule_cycle()
        (new,) = live()
    assert (new.request.member_index, new.request.queued_at) == (1, head.queued_at)
    old.refresh_from_db()
    assert old.request.state == "ended"


def test_a_node_that_is_opened_again_keeps_its_replica(house):
    pool.node(house.h800, gpus=1)
    head = service(house, 1)
    (old,) = live()
    drain(old)
    assert head.members.filter(state="queued").count() == 1
    node_uncordon(acting_user=ADMIN, node=node_of(old), reason="it was the other one")
    assert replicas_roll()["stay"] == 1
    old.request.refresh_from_db()
    assert (states(old), old.request.let_go_at, old.request.let_go_cause) == (["running"], None, "")
    assert head.members.filter(state="queued").count() == 0
    assert [
        event.kind for event in old.request.events.filter(kind__in=["moving", "stays"]).order_by("id")
    ] == [
        "moving",
        "stays",
    ]


def test_a_maintenance_window_rolls_too_and_calling_it_off_lets_stay(house):
    for _ in range(2):
        pool.node(house.h800)
    head = service(house, 1)
    (old,) = live()
    window = window_plan(
        acting_user=ADMIN, title="firmware", reason="firmware", starts_at=T + timedelta(hours=1),
        ends_at=T + timedelta(hours=2), notice_s=3600, nodes=[node_of(old)],
    )  # fmt: skip
    outbox_deliver()
    schedule_cycle()
    new = live()[-1]
    assert (new.request.member_index, node_of(new) != node_of(old)) == (1, True)
    window_cancel(acting_user=ADMIN, window=window, reason="not today")
    replicas_roll()
    outbox_deliver()
    assert states(old, new) == ["running", "stopping"]
    assert head.members.filter(state="allocated", let_go_at=None).get().pk == old.request_id


def test_a_service_that_is_taken_back_meanwhile_releases_the_leaving_one_too(house):
    for _ in range(2):
        pool.node(house.h800)
    head = service(house, 1)
    (old,) = live()
    drain(old)
    request_withdraw(
        acting_user=build.actor(head.requester), policy=build.policy(head.requester), request=head
    )
    outbox_deliver()
    leaving = live()
    assert (len(leaving), set(states(*leaving))) == (2, {"stopping"})
    for one in leaving:
        ends(one)
    head.refresh_from_db()
    assert (head.state, head.end_reason, live()) == ("ended", "withdrawn", [])


def test_work_that_is_no_replica_goes_its_usual_way(house):
    pool.node(house.h800)
    single = pool.queued(house.video, house.h800)
    schedule_cycle()
    (runs,) = live()
    pool.report_running(runs)
    drain(runs)
    assert replicas_roll() == {"moving": 0, "stopped": 0, "stay": 0}
    single.refresh_from_db()
    case = ReclaimCase.objects.get(allocation=runs)
    assert (single.let_go_at, case.cause, case.grace_until) == (
        None,
        "maintenance",
        T + timedelta(seconds=1800),
    )
    with set_clock(T + timedelta(seconds=1801)):
        ladder_sweep()
        ends(runs)
    single.refresh_from_db()
    assert single.state == "queued"


def test_a_replica_that_is_taken_back_for_another_reason_does_not_ask_for_one_more(house):
    for _ in range(2):
        pool.node(house.h800)
    head = service(house, 1)
    (served,) = live()
    allocation_reclaim(
        acting_user=ADMIN, allocation=served, cause="idle", rule="idle", grace_until=T + timedelta(hours=1)
    )
    outbox_deliver()
    assert replicas_roll() == {"moving": 0, "stopped": 0, "stay": 0}
    assert head.members.count() == 1
