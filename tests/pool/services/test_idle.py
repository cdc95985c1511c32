"""Idle work: two signals, a warning first, still needed a few times, the ladder; unknown is never idle."""

from __future__ import annotations

from datetime import timedelta

import pytest

from monitoring.models import GpuState
from monitoring.services.idleness import idle_judge
from pool.models import IdleWatch, ReclaimAdvice, ReclaimCase
from pool.services.idle import still_needed
from pool.services.modes import mode_set
from pool.services.reclaim_rules import rules_active, rules_publish
from portal.kernel.clock import now
from portal.kernel.errors import Conflict, Invalid, Refused
from portal.ops.actor import SYSTEM
from portal.ops.models import OutboxEvent
from tests.pool import builders as pool
from tests.pool.reclaim import at, case_of, gone, moment, running, sweep
from tests.quotas import build

pytestmark = pytest.mark.django_db(transaction=True)
NOTHING = {"warned": 0, "begun": 0, "advised": 0, "withdrawn": 0}


@pytest.fixture
def held():
    """A department with a guarantee of two holds four cards in two leases from T on: two are borrowed."""
    with at(0):
        team, h800 = build.department("vg"), build.flavour("h800", installed=None)
        pool.node(h800, 8)
        build.limits(team, h800, 2)
        first = running(team, h800, 2, duration_s=10 * 86400)
        second = running(team, h800, 2, duration_s=10 * 86400)
    return team, first, second


def seen(allocation, quiet_since=None, age_s=5, **values):
    """The last samples of its cards: quiet since then (None: busy)."""
    for lease in allocation.leases.filter(ended_at=None):
        GpuState.objects.update_or_create(
            gpu_id=lease.gpu_id,
            slot=0,
            defaults={
                "at": now() - timedelta(seconds=age_s), "quiet_since": quiet_since,
                "util_pm": 0 if quiet_since else 900, "processes": [], **values,
            },
        )  # fmt: skip


def look(seconds, *idle, busy=(), **values):
    """Samples and a judgement so many seconds after T."""
    with at(seconds):
        for allocation in idle:
            seen(allocation, moment(100), **values)
        for allocation in busy:
            seen(allocation)
        return idle_judge()


def test_warned_first_then_noticed_then_stopped_and_not_put_back_in_line(held):
    _team, first, second = held
    assert look(3600, first, busy=[second]) == NOTHING
    assert look(3700, first, busy=[second]) == {**NOTHING, "warned": 1}
    assert look(3760, first, busy=[second]) == NOTHING
    told = OutboxEvent.objects.get(topic="pool.allocation_idle")
    assert told.payload["taken_at"] == moment(3700 + 1800 + 600).isoformat()
    assert look(3700 + 1800, first, busy=[second]) == {**NOTHING, "begun": 1}
    case = case_of(first)
    assert (case.cause, case.rule, case.requeue, case.grace_until) == (
        "idle", "idle_window", False, moment(3700 + 1800 + 600),
    )  # fmt: skip
    assert case.figures["idle_since"] == moment(100).isoformat()
    with at(3700 + 2400):
        assert sweep()["stopped"] == 1
        gone(first)
    first.request.refresh_from_db()
    assert (first.end_reason, first.request.state, first.request.end_reason) == ("idle", "ended", "idle")


def test_only_what_is_borrowed_is_taken_longest_idle_first(held):
    _team, first, second = held
    with at(3700):
        seen(first, moment(90))
        seen(second, moment(50))
        assert idle_judge()["warned"] == 1
    assert IdleWatch.objects.get(warned_at__isnull=False).allocation_id == second.pk
    rules_publish(acting_user=SYSTEM, values={"idle_everybody": True}, reason="also what is guaranteed")
    with at(3740):
        assert idle_judge()["warned"] == 1
    assert IdleWatch.objects.filter(warned_at__isnull=False).count() == 2


def test_missing_and_stale_data_are_unknown_and_end_the_warning(held):
    _team, first, second = held
    look(3700, first, busy=[second])
    with at(3760):
        seen(first, moment(100), age_s=120)
        assert idle_judge() == NOTHING
    watch = IdleWatch.objects.get(allocation=first)
    assert (watch.state, watch.warned_at, watch.evidence) == (
        "unknown",
        None,
        {"cards": 2, "without_data": 2},
    )
    with at(9000):
        GpuState.objects.all().delete()
        assert idle_judge() == NOTHING
    assert ReclaimCase.objects.count() == 0


def test_use_during_the_notice_withdraws_it(held):
    _team, first, second = held
    look(3700, first, busy=[second])
    look(5500, first, busy=[second])
    assert case_of(first).step == "notice"
    assert look(5600, busy=[first, second]) == {**NOTHING, "withdrawn": 1}
    case = case_of(first)
    assert (case.step, case.withdrawn_why) == ("withdrawn", "idle_busy")
    with at(9000):
        assert sweep()["stopped"] == 0


def test_still_needed_is_one_click_a_few_times_and_its_holders_alone(held):
    _team, first, second = held
    who = build.actor(first.holder)
    look(3000, first, busy=[second])
    with at(3000), pytest.raises(Conflict) as early:
        still_needed(acting_user=build.actor(second.holder), allocation=second)
    assert early.value.code == "not_idle"
    time = 3700
    for number in (1, 2, 3):
        assert look(time, first, busy=[second])["warned"] == 1
        with at(time + 60):
            with pytest.raises(Refused):
                still_needed(acting_user=build.actor(second.holder), allocation=first)
            watch = still_needed(acting_user=who, allocation=first)
        assert (watch.excuses, watch.excused_until) == (number, moment(time + 60 + 14_400))
        assert look(time + 7200, first, busy=[second]) == NOTHING
        time += 60 + 14_400
    assert look(time, first, busy=[second])["warned"] == 1
    with at(time + 60), pytest.raises(Conflict) as refused:
        still_needed(acting_user=who, allocation=first)
    assert (refused.value.code, refused.value.extra) == ("still_needed_used_up", {"times": 3, "limit": 3})
    assert IdleWatch.objects.get(allocation=first).excuses == 3


def test_still_needed_withdraws_a_notice(held):
    _team, first, second = held
    look(3700, first, busy=[second])
    look(5500, first, busy=[second])
    with at(5600):
        still_needed(acting_user=build.actor(first.holder), allocation=first)
    assert (case_of(first).step, case_of(first).withdrawn_why) == ("withdrawn", "still_needed")


def test_pilot_warns_nobody_and_counts(held):
    team, first, second = held
    mode_set(acting_user=SYSTEM, department=team, mode="pilot", reason="first weeks")
    for time in (3700, 3760, 3820):
        assert look(time, first, busy=[second]) == {**NOTHING, "advised": 1}
    advice = ReclaimAdvice.objects.get()
    assert (advice.cause, advice.times, advice.for_request) == ("idle", 3, None)
    assert not OutboxEvent.objects.filter(topic="pool.allocation_idle").exists()


def test_rules_are_versions_with_bounds_and_one_editor_wins(held):
    with pytest.raises(Invalid) as refused:
        rules_publish(acting_user=SYSTEM, values={"idle_window_s": 5}, reason="sooner")
    assert refused.value.errors[0]["pointer"] == "idle_window_s"
    first = rules_publish(acting_user=SYSTEM, values={"idle_window_s": 600}, reason="sooner", seen_version=0)
    with pytest.raises(Conflict):
        rules_publish(acting_user=SYSTEM, values={"idle_window_s": 900}, reason="later", seen_version=0)
    rules_publish(acting_user=SYSTEM, values={"grace_idle_s": 60}, reason="shorter", seen_version=first.pk)
    row, rules = rules_active()
    assert (row.pk > first.pk, rules.idle_window_s, rules.grace_idle_s) == (True, 600, 60)
    with pytest.raises(Refused):
        rules_publish(acting_user=build.actor(build.user("lin")), values={}, reason="mine")
