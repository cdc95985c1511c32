"""Decisions on record: replayed from what was kept, whole or as differences; damaged and forgotten ones say so; the
policy from draft to roll-back.
"""

from __future__ import annotations

import json
import zlib
from datetime import UTC, datetime, timedelta
from io import StringIO

import pytest
from django.core.management import CommandError, call_command

from pool.engine.canonical import snapshot_hash
from pool.models import Allocation, SchedulerCycle, SchedulerSnapshot, SchedulingPolicy
from pool.services.cycle import planner_reset, schedule_cycle
from pool.services.decisions import decision_replay
from pool.services.policies import (
    policy_change,
    policy_discard,
    policy_draft,
    policy_preview,
    policy_publish,
    policy_roll_back,
)
from pool.services.snapshot_store import snapshot_stored, snapshots_tidy
from portal.kernel.clock import set_clock
from portal.kernel.errors import Conflict, Invalid, Refused
from portal.ops.actor import system
from portal.ops.models import AuditEvent
from tests.pool import builders as pool
from tests.quotas import build

pytestmark = pytest.mark.django_db(transaction=True)
T = datetime(2026, 6, 16, 6, 0, tzinfo=UTC)
ADMIN = system("administrator")


@pytest.fixture(autouse=True)
def clock():
    planner_reset()
    with set_clock(T):
        yield
    planner_reset()


def decided(team, h800) -> list[SchedulerCycle]:
    """Three decisions: one about everybody, two about new requests."""
    pool.node(h800)
    pool.node(h800)
    build.limits(team, h800, 16)
    for number in range(3):
        pool.queued(team, h800, 2, queued_at=T + timedelta(seconds=number))
        schedule_cycle()
    return list(SchedulerCycle.objects.order_by("id"))


def test_every_decision_comes_out_the_same_again(team, h800):
    cycles = decided(team, h800)
    assert [cycle.only is None for cycle in cycles] == [True, False, False]
    assert [cycle.snapshot.depth for cycle in cycles] == [0, 1, 2]
    assert cycles[2].snapshot.raw_bytes < cycles[0].snapshot.raw_bytes
    for cycle in cycles:
        assert snapshot_hash(snapshot_stored(cycle.snapshot)) == cycle.snapshot_hash
        found = decision_replay(cycle=cycle)
        assert (found.identical, found.plan_hash, found.differing) == (True, cycle.plan_hash, ())
    out = StringIO()
    call_command("decision_replay", str(cycles[1].pk), stdout=out)
    assert json.loads(out.getvalue())["identical"] is True


def test_a_changed_record_is_told_apart_from_the_truth(team, h800):
    cycle = decided(team, h800)[0]
    SchedulerCycle.objects.filter(pk=cycle.pk).update(plan_hash="0" * 64, ops=[])
    cycle.refresh_from_db()
    found = decision_replay(cycle=cycle)
    assert not found.identical
    assert [(one["only_in"], one["op"]) for one in found.differing] == [("replay", "place")]
    with pytest.raises(CommandError):
        call_command("decision_replay", str(cycle.pk), stdout=StringIO())
    raw = zlib.decompress(bytes(cycle.snapshot.data)).replace(b"h800", b"h900")
    SchedulerSnapshot.objects.filter(pk=cycle.snapshot_id).update(data=zlib.compress(raw))
    with pytest.raises(Conflict) as error:
        decision_replay(cycle=SchedulerCycle.objects.get(pk=cycle.pk))
    assert error.value.code == "snapshot_damaged"


def test_snapshots_past_their_retention_go_and_the_decision_stays_readable(team, h800, settings):
    cycles = decided(team, h800)
    settings.GPUPOOL_DECISIONS_DAYS = 7
    assert snapshots_tidy() == 0
    with set_clock(T + timedelta(days=8)):
        assert snapshots_tidy() == 3
        cycle = SchedulerCycle.objects.get(pk=cycles[0].pk)
        assert (cycle.snapshot, cycle.snapshot_hash, cycle.placed) == (None, cycles[0].snapshot_hash, 1)
        with pytest.raises(Conflict) as error:
            decision_replay(cycle=cycle)
        assert error.value.code == "decision_not_kept"
        pool.queued(team, h800, 1)
        schedule_cycle()  # its chain is gone: it begins a new one
        assert SchedulerSnapshot.objects.get().parent is None


def test_a_policy_is_drafted_tried_published_and_rolled_back(team, h800):
    pool.node(h800)
    build.limits(team, h800, 16)
    pool.queued(team, h800, 4, duration_s=7200)
    pool.queued(team, h800, 8, queued_at=T + timedelta(seconds=1))
    small = pool.queued(team, h800, 1, queued_at=T + timedelta(seconds=2))
    schedule_cycle()
    assert Allocation.objects.filter(request=small).exists()
    strict = policy_draft(acting_user=ADMIN, name="Strict", values={"queueing": "strict", "nodes_told": 8})
    assert strict.values == {"queueing": "strict"}
    assert not strict.active
    preview = policy_preview(policy_id=strict.pk)
    assert preview["decisions"] == 2
    assert preview["rows"][0]["number"] is None
    past = preview["rows"][1]
    assert (past["places"], past["starts_not"], past["starts_too"]) == ([2, 1], [small.ref], [])
    assert not past["same"]
    published = policy_publish(acting_user=ADMIN, policy=strict, reason="fairness")
    assert (published.active, published.published_at) == (True, T)
    waiting = pool.queued(team, h800, 1, duration_s=60, queued_at=T + timedelta(seconds=3))
    assert schedule_cycle().placed == ()
    assert not Allocation.objects.filter(request=waiting).exists()
    with pytest.raises(Conflict) as error:
        policy_change(acting_user=ADMIN, policy=published, values={}, version=published.version)
    assert error.value.code == "policy_published"
    with pytest.raises(Conflict) as nothing:
        policy_roll_back(acting_user=ADMIN, reason="oops")
    assert nothing.value.code == "nothing_to_roll_back"
    with set_clock(T + timedelta(minutes=1)):
        best = policy_draft(acting_user=ADMIN, name="Best", values={}, based_on=published)
        policy_publish(acting_user=ADMIN, policy=best, reason="back")
        assert policy_roll_back(acting_user=ADMIN, reason="no").pk == strict.pk
    assert SchedulingPolicy.objects.get(active=True).pk == strict.pk
    assert AuditEvent.objects.filter(action="policy.published").count() == 3
    past_cycle = SchedulerCycle.objects.order_by("id")[0]
    assert decision_replay(cycle=past_cycle).identical


@pytest.mark.parametrize(
    ("values", "pointer", "code"),
    [
        ({"sorcery": 1}, "sorcery", "policy_unknown_switch"),
        ({"max_reservations": -1}, "max_reservations", "policy_out_of_bounds"),
        ({"max_reservations": "5"}, "max_reservations", "policy_not_a_number"),
        ({"max_reservations": True}, "max_reservations", "policy_not_a_number"),
        ({"reclaim": 1}, "reclaim", "policy_not_a_flag"),
        ({"queueing": "loud"}, "queueing", "policy_not_a_choice"),
        ({"class_weights": {"magic": 2}}, "class_weights", "policy_not_weights"),
        ({"class_weights": {"training": 101}}, "class_weights", "policy_out_of_bounds"),
    ],
)
def test_a_wrong_switch_is_refused_by_its_name_and_nothing_is_written(values, pointer, code):
    with pytest.raises(Invalid) as error:
        policy_draft(acting_user=ADMIN, name="x", values=values)
    assert (error.value.code, error.value.errors[0]["pointer"]) == (code, pointer)
    assert SchedulingPolicy.objects.count() == 0


def test_only_administrators_change_the_policy(team):
    from portal.ops.actor import Actor

    who = Actor(user=build.user(home=team))
    with pytest.raises(Refused):
        policy_draft(acting_user=who, name="x", values={})
    draft = policy_draft(acting_user=ADMIN, name="x", values={})
    for call in (
        lambda: policy_publish(acting_user=who, policy=draft, reason="r"),
        lambda: policy_discard(acting_user=who, policy=draft),
        lambda: policy_change(acting_user=who, policy=draft, values={}, version=1),
    ):
        with pytest.raises(Refused):
            call()
    assert not SchedulingPolicy.objects.get().active
    policy_discard(acting_user=ADMIN, policy=draft)
    assert SchedulingPolicy.objects.count() == 0
