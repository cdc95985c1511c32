"""Arrays, recurring windows, services with replicas, dependencies, deadlines, queue limits: exact values, and
refusals that change nothing.
"""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta

import pytest

from portal.kernel.clock import set_clock
from portal.kernel.errors import Blocked, Conflict, Invalid, Refused
from portal.ops.models import AuditEvent, OutboxEvent
from portal.ops.services.outbox import outbox_deliver
from quotas.models import ApprovalStep, AskRule, CapacityRequest, PoolName, RequestDependency, UserLimit
from quotas.selectors.queue import queued_requests
from quotas.selectors.series import Progress, progress_of
from quotas.services.approvals import step_decide
from quotas.services.capacity import capacity_write, pool_names_write
from quotas.services.dependencies import dependencies_change
from quotas.services.lifecycle import request_allocated, request_ended, request_requeued
from quotas.services.queue_sweep import queue_sweep
from quotas.services.requests import request_change, request_withdraw, wishes_of
from quotas.services.scaling import service_renew, service_signal
from quotas.services.windows import occurrence_move, occurrence_skip
from tests.quotas import build

pytestmark = pytest.mark.django_db
T = datetime(2026, 6, 16, 6, 3, tzinfo=UTC)  # a Tuesday, 14:03 in Shanghai
HOUR = timedelta(hours=1)
OFFICE = [[3 if 9 <= hour < 18 else 1 for hour in range(24)]] * 5 + [[1] * 24] * 2


@pytest.fixture
def house():
    return build.House()


def problems(error):
    return {p["pointer"]: str(p["detail"]) for p in error.value.errors}


def rows():
    return CapacityRequest.objects.count(), RequestDependency.objects.count(), OutboxEvent.objects.count()


def members(head):
    return list(CapacityRequest.objects.filter(head=head).order_by("member_index", "id"))


def run(request, reason="finished"):
    """As the pool tells it: allocated, ended, and the events delivered."""
    request_allocated(request_id=request.pk)
    request_ended(request_id=request.pk, reason=reason)
    outbox_deliver()
    request.refresh_from_db()


def args(house, who=None):
    who = who or house.lin
    return {"acting_user": build.actor(who), "policy": build.policy(who)}


# -- arrays ----------------------------------------------------------------------------------------------


def test_an_array_is_agreed_on_once_and_runs_a_few_at_a_time(house):
    with set_clock(T):
        head = house.submit(array_count=5, array_at_once=2, duration_s=3600)
    assert (head.state, head.series, head.charge_milli) == ("series", "array", 2000)
    assert head.cost_at_most_micro == 5 * 16_000_000
    found = members(head)
    assert [(m.member_index, m.state, m.held) for m in found] == [
        (0, "queued", ""), (1, "queued", ""), (2, "queued", "array"), (3, "queued", "array"), (4, "queued", "array"),
    ]  # fmt: skip
    assert {(m.charge_milli, m.cost_at_most_micro, m.queued_at, m.command) for m in found} == {
        (1000, 16_000_000, T, "python train.py")
    }
    assert [r.member_index for r in queued_requests()] == [0, 1]
    run(found[0])
    assert [r.member_index for r in queued_requests()] == [1, 2]
    assert progress_of(head) == Progress(held=2, waiting=2, well=1)


def test_an_array_ends_when_its_last_member_has_and_tells_how(house):
    head = house.submit(array_count=3)
    first, second, third = members(head)
    run(first)
    run(second, "failed")
    assert CapacityRequest.objects.get(pk=head.pk).state == "series"
    run(third)
    head.refresh_from_db()
    assert (head.state, head.end_reason) == ("ended", "failed")
    assert head.events.get(kind="ended").facts == {"reason": "failed", "well": 2, "badly": 1, "withdrawn": 0}


def test_one_member_is_withdrawn_alone_and_the_next_takes_its_turn(house):
    head = house.submit(array_count=3, array_at_once=1)
    first, second, third = members(head)
    request_withdraw(**args(house), request=first)
    outbox_deliver()
    assert [r.pk for r in queued_requests()] == [second.pk]
    assert CapacityRequest.objects.get(pk=third.pk).held == "array"


def test_a_whole_array_is_withdrawn_and_what_runs_is_let_go(house):
    head = house.submit(array_count=4, array_at_once=2)
    first, *others = members(head)
    request_allocated(request_id=first.pk)
    request_withdraw(**args(house), request=head, reason="a mistake")
    assert {m.state for m in members(head)[1:]} == {"withdrawn"}
    first.refresh_from_db()
    assert (first.state, first.let_go_cause) == ("allocated", "withdrawn")
    assert OutboxEvent.objects.filter(topic="quotas.let_go", payload__request=str(first.uid)).count() == 1
    head.refresh_from_db()
    assert head.state == "series"
    with pytest.raises(Conflict):
        request_withdraw(**args(house), request=head)
    request_ended(request_id=first.pk, reason="released")
    outbox_deliver()
    head.refresh_from_db()
    assert (head.state, head.end_reason) == ("ended", "withdrawn")


def test_what_runs_may_go_on_when_the_rest_of_an_array_is_withdrawn(house):
    head = house.submit(array_count=3)
    first = members(head)[0]
    request_allocated(request_id=first.pk)
    request_withdraw(**args(house), request=head, stop_running=False)
    first.refresh_from_db()
    assert (first.state, first.let_go_at) == ("allocated", None)


def test_an_array_of_which_nothing_ran_is_withdrawn(house):
    head = house.submit(array_count=3)
    request_withdraw(**args(house), request=head)
    head.refresh_from_db()
    assert (head.state, head.end_reason) == ("withdrawn", "withdrawn")
    with pytest.raises(Refused):
        request_withdraw(**args(house, house.stranger), request=house.submit(array_count=2))


@pytest.mark.parametrize(
    ("changes", "pointer"),
    [
        ({"array_count": 1001}, "array_count"),
        ({"array_count": -1}, "array_count"),
        ({"array_count": 3, "is_service": True, "review_at": "2027-01-01T00:00:00Z"}, "array_count"),
        ({"nodes": 2, "nodes_min": 3}, "nodes_min"),
        ({"nodes_min": 0}, "nodes_min"),
        ({"fabric_gbit_s": 100}, "fabric"),
        ({"fabric": "wifi"}, "fabric"),
        ({"domain_required": "planet"}, "domain_required"),
        ({"datasets": ["no-such"]}, "datasets"),
        ({"after": ["R-999999"]}, "after"),
        ({"after": ["nonsense"]}, "after"),
        ({"health": {"kind": "http"}}, "health/port"),
        ({"health": {"colour": 1}}, "health"),
        ({"window": {"days": []}}, "window/days"),
        ({"deadline_at": "2026-06-16T06:30:00Z"}, "deadline_at"),
    ],
)
def test_wrong_wishes_are_refused_beside_their_field_and_change_nothing(house, changes, pointer):
    before = rows()
    with set_clock(T), pytest.raises(Invalid) as error:
        house.submit(**changes)
    assert pointer in problems(error)
    assert rows() == before


def test_the_whole_array_counts_for_approval(house):
    with set_clock(T):
        head = house.submit(array_count=30, array_at_once=30, duration_s=3600)
    assert (head.state, head.over_quota) == ("in_approval", True)  # 30 at once > 24 guaranteed
    assert members(head) == []
    assert head.charge_milli == 30_000


# -- dependencies ----------------------------------------------------------------------------------------


def test_a_request_waits_for_another_to_end_well(house):
    with set_clock(T):
        first = house.submit()
        second = house.submit(after=[first.ref])
    assert (second.state, second.held) == ("queued", "dependency")
    assert [r.pk for r in queued_requests()] == [first.pk]
    with set_clock(T + HOUR):
        run(first)
    second.refresh_from_db()
    assert (second.held, second.queued_at) == ("", T + HOUR)
    assert second.waits_for.get().met_at == T + HOUR
    assert [r.pk for r in queued_requests()] == [second.pk]


@pytest.mark.parametrize(
    ("how", "reason", "state", "held"),
    [
        ("ok", "failed", "withdrawn", ""),
        ("ok", "expired", "withdrawn", ""),
        ("any", "failed", "queued", ""),
        ("any", "expired", "queued", ""),
    ],
)
def test_what_happens_when_the_first_does_not_end_well(house, how, reason, state, held):
    first = house.submit()
    second = house.submit(after=[{"request": first.ref, "when": how}])
    run(first, reason)
    second.refresh_from_db()
    assert (second.state, second.held) == (state, held)
    if state == "withdrawn":
        assert second.end_reason == "dependency_failed"


def test_a_failed_dependency_may_leave_the_decision_to_its_owner(house):
    first = house.submit()
    second = house.submit(after=[first.ref], after_failed="wait")
    run(first, "failed")
    second.refresh_from_db()
    assert (second.state, second.held) == ("queued", "failed")
    assert list(queued_requests()) == []
    before = rows()
    with pytest.raises(Refused):
        dependencies_change(**args(house, house.chen), request=second, after=[])
    assert rows() == before
    dependencies_change(**args(house), request=second, after=[])
    assert [r.pk for r in queued_requests()] == [second.pk]
    with pytest.raises(Conflict):
        dependencies_change(**args(house), request=second, after=[])


def test_a_chain_falls_as_a_whole(house):
    first = house.submit()
    second = house.submit(after=[first.ref])
    third = house.submit(after=[second.ref])
    request_withdraw(**args(house), request=first)
    for _ in range(3):
        outbox_deliver()
    assert {CapacityRequest.objects.get(pk=r.pk).end_reason for r in (second, third)} == {"dependency_failed"}


def test_circles_are_refused_and_change_nothing(house):
    first = house.submit(array_count=30)
    assert first.state == "in_approval"  # so it may still be changed
    second = house.submit(after=[first.ref])
    third = house.submit(after=[second.ref])
    before = rows()
    for target in (first, third):
        with pytest.raises(Invalid) as error:
            request_change(**args(house), request=first, values={**wishes_of(first), "after": [target.ref]})
        assert "after" in problems(error)
    assert rows() == before
    assert first.waits_for.count() == 0


def test_waiting_for_what_has_ended_is_met_at_once_or_refused(house):
    good, bad = house.submit(), house.submit()
    run(good)
    run(bad, "failed")
    assert house.submit(after=[good.ref]).held == ""
    before = rows()
    with pytest.raises(Invalid) as error:
        house.submit(after=[bad.ref])
    assert "did not end well" in problems(error)["after"]
    assert rows() == before


def test_an_array_waits_as_a_whole_and_is_waited_for_as_a_whole(house):
    first = house.submit()
    head = house.submit(array_count=3, array_at_once=2, after=[first.ref])
    last = house.submit(after=[head.ref])
    assert [m.held for m in members(head)] == ["dependency"] * 3
    run(first)
    assert [m.held for m in members(head)] == ["", "", "array"]
    for member in members(head):
        assert CapacityRequest.objects.get(pk=last.pk).held == "dependency"
        run(member)
    for _ in range(3):
        outbox_deliver()
    assert CapacityRequest.objects.get(pk=last.pk).held == ""


def test_a_dependency_is_settled_once_and_by_the_sweep_where_the_event_was_lost(house):
    first = house.submit()
    second = house.submit(after=[first.ref])
    request_allocated(request_id=first.pk)
    request_ended(request_id=first.pk, reason="finished")
    assert queue_sweep()["settled"] == 1
    assert queue_sweep()["settled"] == 0
    outbox_deliver()
    assert CapacityRequest.objects.get(pk=second.pk).held == ""
    assert second.events.filter(kind="in_line").count() == 1


# -- windows ---------------------------------------------------------------------------------------------

WINDOW = {
    "days": [0, 2],
    "from": "09:00",
    "to": "17:00",
    "zone": "Asia/Shanghai",
    "first": "2026-06-16",
    "until": "2026-07-31",
}


def window(house, **changes):
    with set_clock(T):
        return house.submit(window={**WINDOW, **changes}, duration_s="")


def test_a_recurring_window_brings_its_coming_occurrences_into_the_queue(house):
    head = window(house)
    assert (head.state, head.series, head.charge_milli, head.duration_s) == (
        "series",
        "window",
        1000,
        8 * 3600,
    )
    assert head.cost_at_most_micro == 13 * 8 * 16_000_000  # 6 Mondays and 7 Wednesdays
    found = members(head)
    assert [(m.start_at, m.end_at, m.duration_s) for m in found] == [
        (datetime(2026, 6, day, 1, tzinfo=UTC), datetime(2026, 6, day, 9, tzinfo=UTC), 28800)
        for day in (17, 22, 24, 29)
    ]
    with set_clock(T + timedelta(days=2)):
        assert queue_sweep()["added"] == 1  # 1 July
        assert queue_sweep()["added"] == 0


def test_one_occurrence_is_left_out_near_or_far(house):
    head = window(house)
    with set_clock(T):
        occurrence_skip(**args(house), request=head, day=date(2026, 6, 22))
        occurrence_skip(**args(house), request=head, day=date(2026, 7, 6))
    with set_clock(T + timedelta(days=12)):
        queue_sweep()
        queue_sweep()
    head.refresh_from_db()
    waiting = [date.fromordinal(m.member_index) for m in members(head) if m.state == "queued"]
    assert date(2026, 6, 22) not in waiting
    assert date(2026, 7, 6) not in waiting
    assert date(2026, 7, 8) in waiting
    before = rows()
    for day in (date(2026, 6, 23), date(2027, 1, 4)):
        with set_clock(T), pytest.raises(Invalid):
            occurrence_skip(**args(house), request=head, day=day)
    with pytest.raises(Refused):
        occurrence_skip(**args(house, house.chen), request=head, day=date(2026, 6, 24))
    assert rows() == before


def test_S163_one_occurrence_is_moved_and_the_others_stay(house):
    head = window(house)
    moved, *others = members(head)
    kept = [(m.start_at, m.end_at) for m in others]
    start = datetime(2026, 6, 18, 1, tzinfo=UTC)
    with set_clock(T):
        occurrence_move(
            **args(house), request=head, day=date(2026, 6, 17), start_at=start, end_at=start + 4 * HOUR
        )
        moved.refresh_from_db()
        assert (moved.start_at, moved.duration_s) == (start, 4 * 3600)
        assert [(m.start_at, m.end_at) for m in members(head)[1:]] == kept
        before = rows()
        with pytest.raises(Conflict) as clash:  # into the next one: its capacity would be asked twice
            occurrence_move(
                **args(house), request=head, day=date(2026, 6, 17),
                start_at=datetime(2026, 6, 22, 8, 59, tzinfo=UTC), end_at=datetime(2026, 6, 22, 9, 30, tzinfo=UTC),
            )  # fmt: skip
        assert clash.value.code == "occurrences_overlap"
        with pytest.raises(Invalid):
            occurrence_move(
                **args(house), request=head, day=date(2026, 6, 17), start_at=start, end_at=start + 9 * HOUR
            )
        with pytest.raises(Invalid):
            occurrence_move(**args(house), request=head, day=date(2026, 6, 17), start_at=start, end_at=start)
    assert rows() == before
    with set_clock(T):
        occurrence_move(  # right up to the next one: half-open times touch
            **args(house), request=head, day=date(2026, 6, 17),
            start_at=datetime(2026, 6, 21, 23, tzinfo=UTC), end_at=datetime(2026, 6, 22, 1, tzinfo=UTC),
        )  # fmt: skip


def test_a_window_that_nobody_could_start_is_over_at_its_end(house):
    head = window(house)
    first = members(head)[0]
    with set_clock(datetime(2026, 6, 17, 9, 0, tzinfo=UTC)):
        queue_sweep()
    first.refresh_from_db()
    assert (first.state, first.end_reason) == ("withdrawn", "window_missed")
    assert OutboxEvent.objects.filter(topic="quotas.window_missed").count() == 1


def test_a_recurring_window_ends_after_its_last_day(house):
    head = window(house, until="2026-06-17")
    only = members(head)[0]
    with set_clock(datetime(2026, 6, 17, 1, tzinfo=UTC)):
        request_allocated(request_id=only.pk)
    with set_clock(datetime(2026, 6, 17, 9, tzinfo=UTC)):
        request_ended(request_id=only.pk, reason="expired")
    with set_clock(datetime(2026, 6, 20, tzinfo=UTC)):
        queue_sweep()
    head.refresh_from_db()
    assert (head.state, head.end_reason) == ("ended", "completed")


# -- services --------------------------------------------------------------------------------------------


def service(house, **changes):
    with set_clock(T):
        return house.submit(
            is_service=True,
            review_at="2026-09-16T00:00:00+08:00",
            work_class="inference",
            duration_s="",
            **changes,
        )


def approve(house, request):
    """All steps agreed, as the approvers would."""
    people = {"lead": house.chen, "pool_admin": house.zhao, "finance": house.sun}
    for _ in range(4):
        step = ApprovalStep.objects.filter(request=request, state="open").first()
        if step is None:
            break
        who = people[step.role]
        step_decide(
            acting_user=build.actor(who), policy=build.policy(who), step=step, decision="approve", comment=""
        )
    request.refresh_from_db()
    return request


@pytest.fixture
def office(house):
    with set_clock(T):
        made = service(house, scale_by="timetable", timetable={"zone": "Asia/Shanghai", "days": OFFICE})
        return approve(house, made)


def test_a_service_has_as_many_replicas_as_its_timetable_says(house, office):
    assert (office.state, office.series, office.charge_milli) == ("series", "service", 3000)
    assert (office.replicas_min, office.replicas_max, office.replicas_wanted) == (1, 3, 3)
    found = members(office)
    assert [(m.member_index, m.nodes, m.charge_milli, m.state) for m in found] == [
        (n, 1, 1000, "queued") for n in range(3)
    ]
    assert {m.duration_s for m in found} == {None}


def test_a_job_with_a_timetable_is_refused_beside_the_field(house):
    for values in ({"timetable": {"zone": "Asia/Shanghai", "days": OFFICE}}, {"scale_by": "timetable"}):
        with set_clock(T), pytest.raises(Invalid) as error:
            house.submit(**values)
        assert [p["pointer"] for p in error.value.errors] == ["timetable"]
    assert not CapacityRequest.objects.exists()


def test_the_cost_of_a_timetable_is_its_hours(office):
    assert office.cost_at_most_micro is not None
    hours = office.cost_at_most_micro / 16_000_000
    days = (datetime(2026, 9, 15, 16, tzinfo=UTC) - T).total_seconds() / 86400
    assert 24 * days < hours < 3 * 24 * days
    week = 5 * (9 * 3 + 15) + 2 * 24
    assert abs(hours - week * days / 7) < 60


def test_by_night_replicas_go_back_and_by_day_they_come_again(house, office):
    found = members(office)
    for member in found:
        request_allocated(request_id=member.pk)
    night = datetime(2026, 6, 16, 10, 0, tzinfo=UTC)  # 18:00 in Shanghai
    with set_clock(night):
        queue_sweep()
        queue_sweep()
    gone = [m for m in members(office) if m.let_go_at]
    assert [(m.member_index, m.let_go_cause, m.let_go_at) for m in gone] == [
        (1, "scaled_down", night), (2, "scaled_down", night),
    ]  # fmt: skip
    assert OutboxEvent.objects.filter(topic="quotas.let_go").count() == 2
    with set_clock(night + HOUR):
        for member in gone:
            request_ended(request_id=member.pk, reason="released")
        outbox_deliver()
    with set_clock(datetime(2026, 6, 17, 0, 49, tzinfo=UTC)):
        queue_sweep()
    assert CapacityRequest.objects.filter(head=office, state="queued").count() == 0
    with set_clock(datetime(2026, 6, 17, 0, 50, tzinfo=UTC)):  # ten minutes before nine
        queue_sweep()
    again = CapacityRequest.objects.filter(head=office, state="queued")
    assert sorted(again.values_list("member_index", flat=True)) == [1, 2]
    assert set(again.values_list("queued_at", flat=True)) == {office.queued_at}
    scaled = [e.facts for e in office.events.filter(kind="scaled").order_by("id")]
    assert [(f["from"], f["to"]) for f in scaled] == [(None, 3), (3, 1), (1, 3)]


def test_replicas_that_only_wait_go_first(house, office):
    request_allocated(request_id=members(office)[2].pk)
    with set_clock(datetime(2026, 6, 16, 10, 0, tzinfo=UTC)):
        queue_sweep()
    assert [(m.member_index, m.state, bool(m.let_go_at)) for m in members(office)] == [
        (0, "withdrawn", False), (1, "withdrawn", False), (2, "allocated", False),
    ]  # fmt: skip


def test_a_replica_that_failed_is_started_again_but_not_without_end(house):
    with set_clock(T):
        head = approve(house, service(house, replicas_max=2))
    for n in range(3):
        with set_clock(T + timedelta(seconds=60 * (n + 1))):
            run(
                CapacityRequest.objects.filter(head=head, state="queued").order_by("member_index")[0],
                "failed",
            )
    with set_clock(T + timedelta(seconds=200)):
        queue_sweep()
        assert CapacityRequest.objects.filter(head=head, state="queued").count() == 1
    assert head.events.filter(kind="crash_loop").count() == 1
    with set_clock(T + timedelta(seconds=180 + 300)):
        queue_sweep()
        assert CapacityRequest.objects.filter(head=head, state="queued").count() == 2


def test_a_signal_adds_replicas_at_once_and_takes_them_after_calm(house):
    with set_clock(T):
        head = approve(
            house, service(house, scale_by="signal", replicas_min=1, replicas_max=4, signal_per_replica=100)
        )
    open_ones = CapacityRequest.objects.filter(head=head, state="queued")
    assert open_ones.count() == 1
    signal = {"acting_user": build.actor(house.lin), "request": head}
    with set_clock(T + timedelta(seconds=10)):
        service_signal(**signal, value=250)
        assert open_ones.count() == 3
    with set_clock(T + timedelta(seconds=60)):
        service_signal(**signal, value=50)
        assert open_ones.count() == 3
    with set_clock(T + timedelta(seconds=311)):
        service_signal(**signal, value=50)
        assert open_ones.count() == 1
    with set_clock(T + timedelta(seconds=400)):
        service_signal(**signal, value=10**9)
        assert open_ones.count() == 4
    before = rows()
    with pytest.raises(Invalid):
        service_signal(**signal, value=-1)
    with pytest.raises(Refused):
        service_signal(acting_user=build.actor(house.chen), request=head, value=1)
    with pytest.raises(Conflict):
        service_signal(acting_user=build.actor(house.lin), request=house.submit(array_count=2), value=1)
    assert CapacityRequest.objects.get(pk=head.pk).signal_value == 10**9
    assert rows()[0] == before[0] + 3


def test_a_review_date_is_renewed_by_its_owner_as_far_as_was_agreed(house, office):
    span = office.review_span_s
    assert span == int((datetime(2026, 9, 15, 16, tzinfo=UTC) - T).total_seconds())
    later = datetime(2026, 9, 10, tzinfo=UTC)
    with set_clock(later):
        before = rows()
        with pytest.raises(Invalid):
            service_renew(
                acting_user=build.actor(house.lin),
                request=office,
                review_at=later + timedelta(seconds=span + 600),
            )
        with pytest.raises(Refused):
            service_renew(
                acting_user=build.actor(house.chen), request=office, review_at=later + timedelta(days=9)
            )
        with pytest.raises(Conflict):
            service_renew(
                acting_user=build.actor(house.lin),
                request=members(office)[0],
                review_at=later + timedelta(days=9),
            )
        assert rows() == before
        done = service_renew(
            acting_user=build.actor(house.lin), request=office, review_at=later + timedelta(days=90)
        )
    assert done.review_at == later + timedelta(days=90)
    assert {m.review_at for m in members(office)} == {later + timedelta(days=90)}
    assert AuditEvent.objects.filter(action="request.renewed").count() == 1


def test_owners_are_told_before_the_review_date_once_and_then_it_ends(house, office):
    review = office.review_at
    for before_s, told in ((8 * 86400, 0), (7 * 86400, 1), (6 * 86400, 1), (86400, 2), (3600, 2)):
        with set_clock(review - timedelta(seconds=before_s)):
            queue_sweep()
            queue_sweep()
        assert OutboxEvent.objects.filter(topic="quotas.review_due").count() == told, before_s
    with set_clock(review):
        queue_sweep()
        office.refresh_from_db()
        assert (office.state, office.end_reason) == ("withdrawn", "review_passed")


def test_a_service_without_series_also_ends_at_its_review_date(house):
    with set_clock(T):
        single = approve(house, service(house))
    assert (single.state, single.series) == ("queued", "")
    request_allocated(request_id=single.pk)
    with set_clock(single.review_at):
        queue_sweep()
        queue_sweep()
    single.refresh_from_db()
    assert (single.let_go_cause, single.let_go_at) == ("review_passed", single.review_at)
    assert OutboxEvent.objects.filter(topic="quotas.let_go").count() == 1


def test_a_preempted_replica_keeps_its_place(house, office):
    member = members(office)[0]
    request_allocated(request_id=member.pk)
    request_requeued(request_id=member.pk, reason="preempted")
    with set_clock(T + HOUR):
        assert queue_sweep()["added"] == 0
    member.refresh_from_db()
    assert (member.state, member.queued_at) == ("queued", office.queued_at)


# -- deadlines, limits, priorities, places ---------------------------------------------------------------


def test_a_deadline_is_kept_and_told_when_it_is_lost(house):
    with set_clock(T):
        made = house.submit(duration_s=3600, deadline_at=(T + 2 * HOUR).isoformat())
        assert made.deadline_at == T + 2 * HOUR
    with set_clock(T + HOUR):
        assert queue_sweep()["deadlines_lost"] == 0
    with set_clock(T + HOUR + timedelta(seconds=1)):
        assert queue_sweep()["deadlines_lost"] == 1
        assert queue_sweep()["deadlines_lost"] == 0
    assert CapacityRequest.objects.get(pk=made.pk).state == "queued"


def test_limits_on_how_many_wait_and_run(house):
    UserLimit.objects.create(user=house.lin, waiting_at_once=3, running_at_once=1)
    first = house.submit()
    before = rows()
    with pytest.raises(Blocked) as error:
        house.submit(array_count=3)
    assert error.value.code == "queue_limit"
    assert error.value.blocking == {"level": "user", "limit": 3, "used": 1, "requested": 3}
    assert rows() == before
    second = house.submit()
    request_allocated(request_id=first.pk)
    with pytest.raises(Blocked) as error:
        request_allocated(request_id=second.pk)
    assert error.value.blocking == {"level": "user", "limit": 1, "used": 1, "requested": 1}
    assert CapacityRequest.objects.get(pk=second.pk).state == "queued"


def test_priority_is_what_the_department_allows(house):
    AskRule.objects.create(department=house.vision, priority_most=40)
    assert house.submit().priority == 40
    assert house.submit(priority=10).priority == 10
    with pytest.raises(Invalid) as error:
        house.submit(priority=41)
    assert problems(error) == {"priority": "Video allows at most 40."}
    AskRule.objects.create(department=house.video, priority_most=90)
    assert house.submit(priority=90).priority == 90


def test_places_that_no_node_has_are_told_at_once(house):
    facts = {
        "sites": {"sh": 4}, "fabrics": {"roce": 100}, "storage": ["nvme"], "levels": {"rack": 2}, "driver": "550.54",
    }  # fmt: skip
    capacity_write(
        flavour_id=house.h800.pk,
        installed_milli=192_000,
        healthy_milli=192_000,
        largest_node_gpus=8,
        facts=facts,
    )
    pool_names_write(kind="site", rows={"sh": {"name": "Shanghai"}, "bj": {"name": "Beijing"}})
    pool_names_write(
        kind="dataset", rows={"laion": {"name": "LAION"}, "own": {"department_id": house.other.pk}}
    )
    before = rows()
    refused = {
        "site_code": ({"site_code": "bj"}, "No node of H800 80GB stands at bj; they stand at sh."),
        "fabric": (
            {"fabric": "infiniband", "fabric_gbit_s": 400},
            "No node of H800 80GB has InfiniBand 400 Gbit/s. There is: RoCE 100 Gbit/s.",
        ),
        "storage": ({"storage": "parallel"}, "No node of H800 80GB has it. There is: nvme."),
        "domain_required": (
            {"nodes": 3, "domain_required": "rack"},
            "3 nodes are asked in one rack; the most of H800 80GB in one is 2.",
        ),
        "datasets": ({"datasets": ["own"]}, "There is no such data set, or you may not use it: own."),
    }
    for pointer, (changes, words) in refused.items():
        with pytest.raises(Invalid) as error:
            house.submit(**changes)
        assert problems(error)[pointer] == words
    assert rows() == before
    made = house.submit(
        nodes=3, nodes_min=2, site_code="sh", fabric="roce", fabric_gbit_s=100, storage="nvme", domain_required="rack",
        datasets=["laion"], stage_datasets=False,
    )  # fmt: skip
    assert (made.nodes_min, made.fabric, made.datasets, made.stage_datasets) == (2, "roce", ["laion"], False)
    pool_names_write(kind="dataset", rows={})
    assert not PoolName.objects.get(code="laion").active
    with pytest.raises(Invalid):
        house.submit(datasets=["laion"])


def test_an_elastic_gang_may_be_larger_than_what_could_ever_start(house):
    made = house.submit(gpus_per_node=8, nodes=4, nodes_min=2)
    assert made.charge_milli == 32_000
    with pytest.raises(Blocked):
        house.submit(gpus_per_node=8, nodes=6, nodes_min=5)  # 40 > 32, its hard cap
