"""Evictions as plans name them: whole or not at all, one preemptor per victim, kept places, modes, moves, layouts."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import IntegrityError, connection, transaction
from django.test.utils import CaptureQueriesContext

from pool.engine.model import WHOLE, Evict, Kept, Layout, Member, MinimumRun, Move, Plan, Take
from pool.models import (
    Allocation,
    DepartmentMode,
    Gpu,
    KeptPlace,
    KeptSpan,
    LayoutTask,
    Node,
    ReclaimAdvice,
    ReclaimCase,
    SchedulingPolicy,
)
from pool.selectors.reclaim import (
    Modes,
    ending_allocations,
    evictions_by_request,
    kept_places,
    promised_allocations,
    spared_departments,
)
from pool.services.cycle import schedule_cycle
from pool.services.keeps import keep_place, keeps_settle
from pool.services.layouts import layouts_settle
from pool.services.modes import consent_set, mode_set
from pool.services.reclaim import Group, evictions_apply, groups_apply, plan_reclaim_apply
from pool.services.snapshot import snapshot_load
from portal.accounts.policy import policy_of
from portal.kernel.errors import Invalid, Refused
from portal.kernel.units import to_ms
from portal.ops.actor import SYSTEM
from portal.ops.models import AuditEvent, Incident
from portal.ops.services.outbox import outbox_deliver
from quotas.models import CapacityRequest, QuotaUsage
from quotas.services.requests import request_withdraw
from tests.pool import builders as pool
from tests.pool.reclaim import at, case_of, evict, gone, kinds, members_of, moment, running, sweep
from tests.quotas import build

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def two():
    """Eight cards: the borrower holds them all in two allocations, the owner of four waits for four."""
    with at(0):
        borrower, owner = build.department("borrower"), build.department("owner")
        h800 = build.flavour("h800", installed=None)
        pool.node(h800, 8)
        build.limits(borrower, h800, 4)
        build.limits(owner, h800, 4)
        first = running(borrower, h800, 4)
        second = running(borrower, h800, 4)
        ask = pool.queued(owner, h800, 4)
    return borrower, owner, h800, first, second, ask


def test_an_eviction_names_its_request_and_keeps_the_place_for_it(two):
    *_rest, second, ask = two
    with at(0):
        answer = evict(second, owner=ask)
        assert (answer.refusal, [case.allocation_id for case in answer.cases]) == ("", [second.pk])
        case = case_of(second)
        assert (case.cause, case.rule, case.for_request_id, case.grace_until) == (
            "preempted", "owner_below_guarantee", ask.pk, moment(60),
        )  # fmt: skip
        assert case.figures == {"kind": "reclaim", "guarantee": 4000}
        (kept,) = kept_places()
        assert (kept.request_id, kept.members, kept.until) == (
            ask.pk, members_of(second), to_ms(moment(900)),
        )  # fmt: skip
        assert ending_allocations() == {second.pk: to_ms(moment(60))}
        assert promised_allocations() == {second.pk: ask.pk}
    assert KeptSpan.objects.filter(ended_at=None).count() == 4


def test_the_preemptor_starts_on_its_kept_places_and_the_keep_ends(two):
    borrower, _owner, h800, _first, second, ask = two
    # Who is hungry shall not be helped by displacing others: only the kept places are looked at here.
    SchedulingPolicy.objects.create(name="no preemption", values={"preempt": False}, active=True)
    with at(0):
        evict(second, owner=ask)
        hungry = pool.queued(borrower, h800, 1, priority=100)
    with at(60):
        sweep()
        gone(second, open_nodes=True)
        schedule_cycle()
    ask.refresh_from_db()
    hungry.refresh_from_db()
    assert (ask.state, hungry.state) == ("allocated", "queued")
    with at(61):
        outbox_deliver()
        keeps_settle()
        assert kept_places() == ()
    kept = KeptPlace.objects.get()
    assert (kept.end_reason, KeptSpan.objects.filter(ended_at=None).count()) == ("started", 0)
    second.request.refresh_from_db()
    assert (second.end_reason, second.request.state) == ("preempted", "queued")


def test_one_preemptor_per_victim(two):
    _borrower, owner, h800, _first, second, ask = two
    with at(0):
        other = pool.queued(owner, h800, 4)
        evict(second, owner=ask)
        answer = evict(second, owner=other)
    assert (answer.refusal, answer.cases) == ("promised_already", ())
    assert ReclaimCase.objects.count() == 1
    assert KeptPlace.objects.get().request_id == ask.pk


def test_the_same_eviction_twice_is_one(two):
    *_rest, second, ask = two
    with at(0):
        evict(second, owner=ask)
        again = evict(second, owner=ask)
    assert (again.refusal, len(again.cases)) == ("", 1)
    assert (
        ReclaimCase.objects.count(),
        KeptPlace.objects.count(),
        kinds(second).count("reclaim_notice"),
    ) == (1, 1, 1)


def test_all_victims_or_none(two):
    _borrower, _owner, _h800, first, second, ask = two
    with at(0):
        Allocation.objects.filter(pk=second.pk).update(interruptible=False)
        answer = evict(first, second, owner=ask)
    assert answer.refusal == "not_interruptible"
    assert (ReclaimCase.objects.count(), KeptPlace.objects.count(), kinds(first).count("reclaim_notice")) == (
        0,
        0,
        0,
    )


def test_a_place_that_is_kept_for_another_is_not_kept_twice(two):
    _borrower, owner, h800, first, second, ask = two
    with at(0):
        other = pool.queued(owner, h800, 4)
        evict(second, owner=ask)
        kept = Kept(other.pk, members_of(second), to_ms(moment(900)))
        answer = evictions_apply(evicts=[Evict(first.pk, other.pk, "reclaim", "r", {})], keep=kept)
        assert answer.refusal == "kept_span_never_twice"
        with pytest.raises(IntegrityError), transaction.atomic():
            keep_place(keep=kept)
    assert ReclaimCase.objects.filter(allocation=first).count() == 0


def test_many_requests_take_back_at_once_and_one_that_cannot_takes_nobody_along(two):
    _borrower, owner, h800, first, second, ask = two
    with at(0):
        other, gone_, third = (pool.queued(owner, h800, 4) for _ in range(3))
        CapacityRequest.objects.filter(pk=gone_.pk).update(state="withdrawn")
        groups = [
            Group([Evict(victim.pk, one.pk, "reclaim", "r", {})], Kept(one.pk, members_of(victim), to_ms(moment(900))))
            for one, victim in ((ask, first), (gone_, second), (other, second), (third, second))
        ]  # fmt: skip
        with CaptureQueriesContext(connection) as told:
            answers = groups_apply(groups=groups)
    assert [(one.request_id, one.refusal) for one in answers] == [
        (ask.pk, ""), (gone_.pk, "requester_left"), (other.pk, ""), (third.pk, "promised_already"),
    ]  # fmt: skip
    assert {(case_of(victim).for_request_id, kinds(victim).count("reclaim_notice")) for victim in (first, second)} == {
        (ask.pk, 1), (other.pk, 1),
    }  # fmt: skip
    assert set(KeptPlace.objects.values_list("request_id", flat=True)) == {ask.pk, other.pk}
    assert KeptSpan.objects.filter(ended_at=None).count() == 8
    made = [one["sql"].split()[2] for one in told if one["sql"].startswith("INSERT")]
    assert [made.count(f'"pool_{name}"') for name in ("reclaimcase", "keptplace", "keptspan")] == [1, 1, 1]


def test_where_the_database_refuses_one_the_others_still_take_back(two):
    _borrower, owner, h800, first, second, ask = two
    with at(0):
        other = pool.queued(owner, h800, 4)
        same = members_of(first)
        groups = [
            Group([Evict(victim.pk, one.pk, "reclaim", "r", {})], Kept(one.pk, same, to_ms(moment(900))))
            for one, victim in ((ask, first), (other, second))
        ]
        answers = groups_apply(groups=groups)
    assert [one.refusal for one in answers] == ["", "kept_span_never_twice"]
    assert ReclaimCase.objects.get().allocation_id == first.pk
    assert KeptPlace.objects.get().request_id == ask.pk


def test_a_keep_lasts_longer_than_the_longest_grace_of_its_victims(two):
    *_rest, second, ask = two
    with at(0):
        second.request.__class__.objects.filter(pk=second.request_id).update(
            checkpoint={"command": "save.sh", "seconds": 3600}
        )
        evict(second, owner=ask)
    assert KeptPlace.objects.get().until == moment(3600) + timedelta(minutes=5)


def test_a_keep_times_out_and_its_cards_are_anybodys(two):
    *_rest, second, ask = two
    with at(0):
        evict(second, owner=ask)
    with at(900):
        assert kept_places() == ()
        assert keeps_settle() == 1
        assert keeps_settle() == 0
    assert KeptPlace.objects.get().end_reason == "timed_out"


def test_who_leaves_in_the_grace_takes_the_eviction_and_the_keep_along(two):
    *_rest, second, ask = two
    with at(0):
        evict(second, owner=ask)
    with at(30):
        request_withdraw(acting_user=build.actor(ask.requester), policy=policy_of(ask.requester), request=ask)
        outbox_deliver()
    second.refresh_from_db()
    case = case_of(second)
    assert (second.state, case.step, case.withdrawn_why) == ("running", "withdrawn", "requester_left")
    assert KeptPlace.objects.get().end_reason == "left"


def test_a_lost_event_is_made_up_for_by_the_sweep(two):
    *_rest, second, ask = two
    with at(0):
        evict(second, owner=ask)
    with at(30):
        ask.__class__.objects.filter(pk=ask.pk).update(state="withdrawn")
        assert sweep()["withdrawn"] == 1
        assert keeps_settle() == 1
    assert case_of(second).step == "withdrawn"


def test_who_waits_no_more_evicts_nobody(two):
    *_rest, second, ask = two
    with at(0):
        ask.__class__.objects.filter(pk=ask.pk).update(state="withdrawn")
        assert evict(second, owner=ask).refusal == "requester_left"
    assert (ReclaimCase.objects.count(), KeptPlace.objects.count()) == (0, 0)


def test_three_displacements_of_one_request_alert_once(two):
    *_rest, second, ask = two
    for number in range(4):
        with at(number):
            evict(second, owner=ask, keep=False)
            ReclaimCase.objects.filter(closed_at=None).update(step="freed", closed_at=moment(number))
    with at(10):
        (displaced,) = evictions_by_request([second.request_id]).values()
    assert (displaced.times, displaced.last_at, displaced.by) == (4, moment(3), (ask.department_id,))
    incident = Incident.objects.get(kind="reclaim_thrashing")
    assert (incident.occurrences, incident.subject_uid) == (2, second.request.uid)
    with at(86_500):
        assert evictions_by_request() == {}


# -- modes ---------------------------------------------------------------------------------------------------


def test_modes_are_inherited_over_the_tree_and_the_nearest_wins():
    root = build.department("root")
    child = build.department("child", root)
    leaf = build.department("leaf", child)
    admin = build.user("zhao")
    build.role(admin, "pool_admin")
    assert Modes.load().mode_of(leaf.pk) == "enforce"
    assert spared_departments() == frozenset()
    mode_set(acting_user=build.actor(admin), department=None, mode="pilot", reason="first weeks")
    mode_set(
        acting_user=build.actor(admin), department=child, mode="rollout", willing=True, reason="they agreed"
    )
    modes = Modes.load()
    assert [modes.mode_of(one.pk) for one in (root, child, leaf)] == ["pilot", "rollout", "rollout"]
    assert spared_departments() == {root.pk}
    mode_set(acting_user=build.actor(admin), department=child, mode=None, reason="as all others")
    assert spared_departments() == {root.pk, child.pk, leaf.pk}
    assert AuditEvent.objects.filter(action="reclaim_mode.set").count() == 3
    with pytest.raises(Refused):
        mode_set(acting_user=build.actor(build.user("lin")), department=root, mode="enforce", reason="mine")
    with pytest.raises(Invalid):
        mode_set(acting_user=build.actor(admin), department=root, mode="enforce", reason=" ")
    assert DepartmentMode.objects.count() == 1
    assert policy_of(admin).administers_pool


def test_work_is_left_alone_for_its_departments_minimum_run_time():
    with at(0):
        branch, owner = build.department("branch"), build.department("owner")
        borrower = build.department("borrower", branch)
        h800 = build.flavour("h800", installed=None)
        pool.node(h800, 8)
        build.limits(branch, h800, 4)
        build.limits(owner, h800, 4)
        mode_set(
            acting_user=SYSTEM, department=branch, mode=None, minimum_s=(None, 3600), reason="long warm-up"
        )
        running(borrower, h800, 8)
        ask = pool.queued(owner, h800, 4)
        schedule_cycle()
        assert ReclaimCase.objects.count() == 0
        assert Modes.load().mode_of(borrower.pk) == "enforce"
    with at(3000):
        schedule_cycle()
        assert ReclaimCase.objects.count() == 0
        assert snapshot_load().snapshot.minimum_run == {branch.pk: MinimumRun(None, 3_600_000)}
    with at(7200):
        schedule_cycle()
        assert ReclaimCase.objects.get().for_request_id == ask.pk
    with pytest.raises(Invalid):
        mode_set(acting_user=SYSTEM, department=None, mode="enforce", minimum_s=(60, None), reason="all")
    mode_set(acting_user=SYSTEM, department=branch, mode=None, minimum_s=(None, None), reason="as all others")
    assert DepartmentMode.objects.count() == 0


def test_pilot_advises_and_counts_and_takes_nothing(two):
    borrower, *_rest, second, ask = two
    with at(0):
        mode_set(acting_user=SYSTEM, department=borrower, mode="pilot", reason="first weeks")
        for _ in range(3):
            assert evict(second, owner=ask).refusal == "spared"
    advice = ReclaimAdvice.objects.get(allocation=second)  # a cycle meanwhile may have told of the other one
    assert (advice.allocation_id, advice.mode, advice.times, advice.for_request_id) == (
        second.pk,
        "pilot",
        3,
        ask.pk,
    )
    assert (ReclaimCase.objects.count(), KeptPlace.objects.count()) == (0, 0)


def test_roll_out_acts_on_the_willing(two):
    borrower, *_rest, second, ask = two
    with at(0):
        mode_set(acting_user=SYSTEM, department=borrower, mode="rollout", reason="second month")
        assert evict(second, owner=ask).refusal == "spared"
        with pytest.raises(Refused):
            consent_set(acting_user=build.actor(build.user("other")), request=second.request, willing=True)
        mine = build.actor(second.holder)
        assert consent_set(acting_user=mine, request=second.request, willing=True) is True
        assert consent_set(acting_user=mine, request=second.request, willing=True) is False
        assert evict(second, owner=ask).refusal == ""
        assert consent_set(acting_user=mine, request=second.request, willing=False) is True
    assert ReclaimCase.objects.get().allocation_id == second.pk


def test_what_a_plan_spared_is_advice(two):
    borrower, *_rest, second, ask = two
    with at(0):
        mode_set(acting_user=SYSTEM, department=borrower, mode="pilot", reason="first weeks")
        spared = Evict(second.pk, ask.pk, "reclaim", "owner_below_guarantee", {"guarantee": 4000})
        plan_reclaim_apply(plan=Plan((), (), (), spared=(spared,)))
    advice = ReclaimAdvice.objects.get(allocation=second)  # a cycle meanwhile may have told of the other one
    assert (advice.rule, advice.mode, advice.figures) == (
        "owner_below_guarantee", "pilot", {"kind": "reclaim", "guarantee": 4000},
    )  # fmt: skip


# -- moves and layouts ---------------------------------------------------------------------------------------


def test_a_move_keeps_the_new_place_for_the_moved_work(two):
    borrower, _owner, h800, first, second, ask = two
    with at(0):
        other = pool.node(h800, 4, schedulable="cordoned")
        takes = tuple(Take(gpu.pk, (WHOLE,), 1000, 0) for gpu in other.gpus.order_by("index"))
        move = Move(second.pk, ask.pk, (Member(0, other.pk, 0, 0, takes),))
        (answer,) = plan_reclaim_apply(
            plan=Plan(
                (), (), (), moves=(move,), keeps=(Kept(ask.pk, members_of(second), to_ms(moment(900))),)
            )
        )
        assert (answer.refusal, case_of(second).rule) == ("", "consolidate")
        assert {kept.request_id for kept in kept_places()} == {ask.pk, second.request_id}
    with at(60):
        sweep()
        Node.objects.update(schedulable="open")
        gone(second, open_nodes=True)
        schedule_cycle()
    again = Allocation.objects.get(request=second.request, state__in=["reserved", "starting", "running"])
    assert set(again.members.values_list("node_id", flat=True)) == {other.pk}
    ask.refresh_from_db()
    assert ask.state == "allocated"


def test_a_new_layout_is_a_task_with_its_commands_until_the_card_has_it(two):
    *_rest, ask = two
    with at(0):
        card = Gpu.objects.order_by("id").first()
        layout = Layout(card.pk, ask.pk, (("3g.40gb", 0), ("4g.40gb", 4)))
        plan_reclaim_apply(plan=Plan((), (), (), layouts=(layout,)))
        plan_reclaim_apply(plan=Plan((), (), (), layouts=(layout,)))
        task = LayoutTask.objects.get()
        incident = Incident.objects.get(kind="mig_layout_wanted")
        assert incident.facts["commands"][-1] == f"nvidia-smi mig -i {card.uuid} -cgi 3g.40gb:0,4g.40gb:4 -C"
        assert layouts_settle() == 0
        pool.slices(card, ("3g.40gb", 0, 4, 3), ("4g.40gb", 4, 4, 4))
        assert layouts_settle() == 1
    task.refresh_from_db()
    incident.refresh_from_db()
    assert (task.state, incident.state) == ("done", "closed")


def test_part_of_an_elastic_gang_is_taken_and_the_rest_goes_on(two):
    borrower, owner, h800, *_rest, ask = two
    with at(0):
        CapacityRequest.objects.filter(pk=ask.pk).update(state="draft")
        pool.node(h800, 8)
        pool.node(h800, 8)
        build.limits(borrower, h800, 24)
        gang = running(borrower, h800, 8, nodes=2)
        CapacityRequest.objects.filter(pk=ask.pk).update(state="queued")
        before = QuotaUsage.objects.get(department=borrower).direct
        victim = Evict(gang.pk, ask.pk, "reclaim", "owner_below_guarantee", {}, members=(1,))
        assert evictions_apply(evicts=[victim], keep=None).refusal == ""
    with at(60):
        sweep()
        second = gang.members.select_related("node", "allocation").get(number=1)
        from pool.services.member_reports import member_ended, member_free

        member_ended(member=second, at=moment(60), exit_code=None, signal=15, error=None, failed_start=False)
        gang.refresh_from_db()
        assert (gang.state, QuotaUsage.objects.get(department=borrower).direct) == ("running", before)
        second.refresh_from_db()
        found = {
            lease.gpu.uuid: {"free": True, "reason": None, "procs": []}
            for lease in gang.leases.filter(member=1).select_related("gpu")
        }
        member_free(member=second, at=moment(61), found=found)
    gang.refresh_from_db()
    assert (gang.state, gang.charge_milli, QuotaUsage.objects.get(department=borrower).direct) == (
        "running", 8000, before - 8000,
    )  # fmt: skip
    assert gang.leases.filter(ended_at=None).count() == 8
    assert (case_of(gang).step, case_of(gang).members) == ("freed", [1])
    with at(70):
        gone(gang, 0)
    assert (gang.state, gang.end_reason) == ("ended", "finished")
    assert QuotaUsage.objects.get(department=borrower).direct == before - 16_000
