"""Behaviours drawn from public bug reports that touch taking back, each named by its id (behaviours.json)."""

from __future__ import annotations

from typing import Any

import pytest

from pool.models import Allocation, KeptPlace, ReclaimCase
from pool.services.closing import allocation_finish
from pool.services.cycle import planner_reset, schedule_cycle
from pool.services.execution import execution_reconcile
from pool.services.expiry import leases_sweep
from pool.services.idle import IdleFinding, idle_findings_take
from pool.services.reclaim_rules import rules_publish
from pool.services.surplus import departments_over
from portal.ops.actor import SYSTEM
from portal.ops.models import AuditEvent, Incident, OutboxEvent
from quotas.models import QuotaUsage
from quotas.services.usage import usage_recompute
from tests.pool import builders as pool
from tests.pool.reclaim import at, case_of, evict, gone, kinds, moment, running, sweep
from tests.quotas import build

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def eight():
    """Eight cards: a borrower without a guarantee, and an owner of four."""
    with at(0):
        borrower, owner = build.department("borrower"), build.department("owner")
        h800 = build.flavour("h800", installed=None)
        pool.node(h800, 8)
        build.limits(borrower, h800, 0)
        build.limits(owner, h800, 4)
    return borrower, owner, h800


def used(department: Any) -> int:
    return int(QuotaUsage.objects.get(department=department).direct)


def test_p010_the_release_delivered_twice_decreases_the_use_once(eight):
    borrower, _owner, h800 = eight
    with at(0):
        victim = running(borrower, h800, 2)
        other = running(borrower, h800, 2)
        evict(victim, owner=pool.queued(_owner, h800, 2), keep=False)
    with at(60):
        sweep()
        gone(victim)
        assert allocation_finish(allocation_id=victim.pk) is False
        assert allocation_finish(allocation_id=victim.pk) is False
    assert (used(borrower), other.pk > 0) == (2000, True)
    assert AuditEvent.objects.filter(action="allocation.ended").count() == 1


def test_p040_expiry_that_runs_twice_ends_each_lease_once_and_only_those_that_are_over(eight):
    borrower, _owner, h800 = eight
    with at(0):
        over = running(borrower, h800, 1, duration_s=3600)
        still = running(borrower, h800, 1, duration_s=7200)
    with at(3605):
        leases_sweep()
    with at(3910):
        leases_sweep()
    over.refresh_from_db()
    still.refresh_from_db()
    assert (over.state, over.end_reason, still.state) == ("stopping", "expired", "running")
    assert OutboxEvent.objects.filter(topic="pool.allocation_stopping").count() == 1


@pytest.mark.parametrize(
    ("cause", "rule", "reason"),
    [("expired", "lease_end", "expired"), ("idle", "idle_window", "idle"), ("over_quota", "over_quota", "over_quota"),
     ("revoked", "administrator", "revoked"), ("released", "", "released"),
     ("maintenance", "maintenance_window", "maintenance"), ("preempted", "owner_below_guarantee", "preempted"),
     ("suspended", "user_suspended", "suspended")],
)  # fmt: skip
def test_p042_each_way_to_end_has_its_own_reason_and_rule(eight, cause, rule, reason):
    from pool.services.ladder import case_begin

    borrower, _owner, h800 = eight
    with at(0):
        one = running(borrower, h800, 1)
        case_begin(acting_user=SYSTEM, allocation_id=one.pk, cause=cause, rule=rule)
        gone(one)
    case = case_of(one)
    assert (one.end_reason, case.cause, case.rule, case.step) == (reason, cause, rule, "freed")
    assert one.get_end_reason_display() != ""


def test_p045_p063_missing_samples_are_unknown_and_no_window_is_shorter_than_some_samples(eight):
    from portal.kernel.errors import Invalid

    borrower, _owner, h800 = eight
    with pytest.raises(Invalid):
        rules_publish(acting_user=SYSTEM, values={"idle_window_s": 5}, reason="sooner")
    with at(0):
        one = running(borrower, h800, 1, duration_s=86_400)
    for seconds in (4000, 8000, 12_000):
        with at(seconds):
            idle_findings_take(findings=[IdleFinding(one.pk, "unknown")])
    assert (ReclaimCase.objects.count(), one.idle_watch.state) == (0, "unknown")


def test_p081_still_in_use_after_the_grace_it_is_not_granted_again_and_people_are_told(eight):
    borrower, owner, h800 = eight
    rules_publish(acting_user=SYSTEM, values={"grace_preempted_s": 600}, reason="ten minutes")
    with at(0):
        first = running(borrower, h800, 4)
        second = running(borrower, h800, 4)
        waiting = pool.queued(owner, h800, 4)
        schedule_cycle()
    case = ReclaimCase.objects.get()
    victim = case.allocation
    assert victim.pk in (first.pk, second.pk)
    with at(600):
        sweep()
    with at(720):
        pool.report_ended(victim)
        pool.report_free(victim, free=False)
        schedule_cycle()
        assert not Allocation.objects.filter(request=waiting).exists()
    with at(1100):
        execution_reconcile()
        schedule_cycle()
    assert Incident.objects.filter(kind="gpu_not_free").count() == 1
    assert not Allocation.objects.filter(request=waiting).exists()
    with at(1200):
        pool.report_free(victim)
        schedule_cycle()
    case.refresh_from_db()
    stamps = (case.noticed_at, case.grace_until, case.stop_sent_at, case.stopped_at, case.seen_free_at)
    assert stamps == (moment(0), moment(600), moment(600), moment(720), moment(1200))
    assert Allocation.objects.get(request=waiting).reserved_at == moment(1200)


def test_s129_a_victim_is_charged_until_it_really_stopped(eight):
    borrower, owner, h800 = eight
    with at(0):
        victim = running(borrower, h800, 8)
        waiting = pool.queued(owner, h800, 4)
        schedule_cycle()
        assert (used(borrower), used(owner)) == (8000, 0)
    with at(60):
        sweep()
        assert used(borrower) == 8000
        gone(victim, open_nodes=True)
        schedule_cycle()
    assert Allocation.objects.get(request=waiting).charge_milli == used(owner) == 4000


def test_s131_a_limit_lowered_below_the_use_and_a_restart_drop_nothing(eight):
    borrower, _owner, h800 = eight
    with at(0):
        running(borrower, h800, 4)
        running(borrower, h800, 2)
        build.limits(borrower, h800, 0, hard_cap=2)
        usage_recompute(flavour_id=h800.pk)
        planner_reset()
        waiting = pool.queued(borrower, h800, 1)
        assert schedule_cycle().placed == ()
    assert Allocation.objects.filter(state="running").count() == 2
    assert [over.over_milli for over in departments_over()] == [4000]
    waiting.refresh_from_db()
    assert (waiting.state, used(borrower)) == ("queued", 6000)


def test_s136_devices_that_come_free_one_by_one_stay_kept_for_whom_they_were_freed(eight):
    borrower, owner, h800 = eight
    with at(0):
        victims = [running(borrower, h800, 2) for _ in range(4)]
        waiting = pool.queued(owner, h800, 4)
        schedule_cycle()
        cases = list(ReclaimCase.objects.order_by("id"))
        assert {case.for_request_id for case in cases} == {waiting.pk}
        assert len(cases) == 2
        hungry = [pool.queued(borrower, h800, 1) for _ in range(4)]
    taken = [victim for victim in victims if victim.pk in {case.allocation_id for case in cases}]
    with at(60):
        sweep()
        gone(taken[0], open_nodes=True)
        schedule_cycle()
    assert not Allocation.objects.filter(request__in=[*hungry, waiting]).exists()
    with at(90):
        gone(taken[1], open_nodes=True)
        schedule_cycle()
    waiting.refresh_from_db()
    assert waiting.state == "allocated"
    assert set(KeptPlace.objects.values_list("request_id", flat=True)) == {waiting.pk}


def test_s137_s158_the_owner_gets_its_whole_guarantee_within_grace_and_overhead(eight):
    borrower, owner, h800 = eight
    with at(0):
        for _ in range(4):
            running(borrower, h800, 2)
        asked = [pool.queued(owner, h800, 1) for _ in range(4)]
        schedule_cycle()
    with at(60):
        sweep()
        for case in ReclaimCase.objects.select_related("allocation"):
            gone(case.allocation, open_nodes=True)
        schedule_cycle()
    assert used(owner) == 4000
    assert all(Allocation.objects.filter(request=one, reserved_at__lte=moment(60)).exists() for one in asked)


def test_s141_each_waiting_owner_gets_its_own_victim_in_one_pass(eight):
    borrower, owner, h800 = eight
    with at(0):
        for _ in range(4):
            running(borrower, h800, 2)
        first, second = (pool.queued(owner, h800, 2) for _ in range(2))
        schedule_cycle()
    promised = dict(ReclaimCase.objects.values_list("for_request_id", "allocation_id"))
    assert set(promised) == {first.pk, second.pk}
    assert len(set(promised.values())) == 2


def test_s159_only_the_final_list_of_victims_is_evicted(eight):
    """One card is wanted: the smallest that suffices goes, whatever was looked at before."""
    borrower, owner, h800 = eight
    with at(0):
        one = running(borrower, h800, 1)
        running(borrower, h800, 4)
        running(borrower, h800, 3)
        pool.queued(owner, h800, 1)
        schedule_cycle()
    assert list(ReclaimCase.objects.values_list("allocation_id", flat=True)) == [one.pk]


def test_s162_a_busy_kernel_keeps_a_session_whatever_else_is_closed(eight):
    borrower, _owner, h800 = eight
    with at(0):
        session = running(borrower, h800, 1, run_kind="hold", command="", duration_s=86_400)
    with at(18_000):
        idle_findings_take(findings=[IdleFinding(session.pk, "busy")])
    assert "idle_warning" not in kinds(session)


def test_s127_a_victim_that_just_started_is_in_one_state_and_nobody_waits_for_what_cannot_be(eight):
    """Two decisions at once about one allocation: its own start, and its eviction."""
    borrower, owner, h800 = eight
    with at(0):
        request = pool.queued(borrower, h800, 8)
        schedule_cycle()
        victim = request.allocations.get()
        waiting = pool.queued(owner, h800, 4)
        evict(victim, owner=waiting, keep=False)
        pool.report_running(victim)
    victim.refresh_from_db()
    assert (victim.state, case_of(victim).step) == ("stopping", "stopping")
    with at(10):
        gone(victim, open_nodes=True)
        schedule_cycle()
    waiting.refresh_from_db()
    assert (waiting.state, used(owner)) == ("allocated", 4000)
