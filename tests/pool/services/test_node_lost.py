"""A node that falls silent: its work goes back to its place after fencing, its cards only after they were
seen free.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from django.db import transaction

from pool.models import AgentCommand, Allocation, Lease, Node
from pool.services.agent_inbox import node_heard
from pool.services.cycle import schedule_cycle
from pool.services.execution import execution_reconcile
from pool.services.node_watch import listening_since, nodes_sweep
from portal.kernel.clock import now, set_clock
from portal.ops.models import Incident
from quotas.models import FlavourCapacity, QuotaUsage, UsageSpan
from tests.pool import builders as pool
from tests.quotas import build

pytestmark = pytest.mark.django_db(transaction=True)
T = datetime(2026, 6, 16, 6, 0, tzinfo=UTC)


def after(seconds: float) -> set_clock:
    return set_clock(T + timedelta(seconds=seconds))


@pytest.fixture
def lost():
    """One card of a one-card node, running, its node last heard of at T."""
    team, h800 = build.department("vg"), build.flavour("h800", installed=None)
    with after(0):
        pool.node(h800, 1, name="n-lost")
        build.limits(team, h800, 4)
        pool.queued(team, h800, 1)
        schedule_cycle()
        allocation = Allocation.objects.get()
        pool.report_running(allocation)
    return allocation


def heard():
    """The node's agent gives a sign of life now."""
    with transaction.atomic():
        node_heard(node=Node.objects.select_for_update().get(), at=now())


def health():
    return Node.objects.get(name="n-lost").health


def test_the_steps_of_silence(lost):
    for seconds, expected in (
        (14, "ok"),
        (15, "late"),
        (44, "late"),
        (45, "suspect"),
        (119, "suspect"),
        (120, "lost"),
    ):
        with after(seconds):
            nodes_sweep()
            assert health() == expected
    lost.refresh_from_db()
    assert (lost.state, lost.end_reason) == ("stopping", "node_lost")
    assert lost.members.get().state == "lost"
    assert Incident.objects.filter(kind="node_lost").count() == 1
    assert FlavourCapacity.objects.get().healthy_milli == 0


def test_a_heartbeat_before_lost_undoes_it(lost):
    with after(50):
        nodes_sweep()
        heard()
    assert health() == "ok"
    lost.refresh_from_db()
    assert lost.state == "running"


def test_sweep_twice_loses_once(lost):
    with after(200):
        assert nodes_sweep() == {"changed": 1, "lost": 1, "fenced": 0}
        assert nodes_sweep() == {"changed": 0, "lost": 0, "fenced": 0}
    assert list(lost.events.filter(kind="member_lost").values_list("facts", flat=True)) == [
        {"node": "n-lost"}
    ]


def test_after_fencing_the_work_starts_elsewhere_at_its_old_place(lost):
    queued_at = lost.request.queued_at
    with after(200):
        nodes_sweep()
    with after(499):
        assert nodes_sweep()["fenced"] == 0
    lost.request.refresh_from_db()
    assert (lost.request.state, QuotaUsage.objects.get().direct) == ("allocated", 1000)
    with after(500):
        assert nodes_sweep()["fenced"] == 1
        lost.refresh_from_db()
        lost.request.refresh_from_db()
        assert (lost.state, lost.request.state, lost.request.queued_at) == ("ended", "queued", queued_at)
        assert QuotaUsage.objects.get().direct == 0
        assert UsageSpan.objects.get().ended_at == T
        pool.node(lost.flavour, 1, name="n-new")
        schedule_cycle()
    again = Allocation.objects.exclude(state="ended").get()
    assert again.members.get().node.name == "n-new"


def test_cards_of_a_fenced_node_stay_held_until_seen_free(lost):
    with after(200):
        nodes_sweep()
    with after(500):
        nodes_sweep()
    lease = Lease.objects.get()
    assert lease.ended_at is None
    with after(600):
        heard()
        assert health() == "ok"
        assert schedule_cycle().placed == ()
        AgentCommand.objects.filter(kind="check_free").delete()
        assert execution_reconcile()["looks"] == 1
        member = lost.members.get()
        assert member.state == "lost"
        pool.report_free(lost, free=False)
        assert schedule_cycle().placed == ()
    with after(610):
        pool.report_free(lost)
    lease.refresh_from_db()
    assert lease.ended_at == T + timedelta(seconds=610)
    with after(611):
        assert execution_reconcile()["looks"] == 0
        schedule_cycle()
    assert Allocation.objects.exclude(state="ended").get().members.get().node.name == "n-lost"


def test_back_before_fencing_its_work_is_stopped_seen_free_and_requeued(lost):
    with after(200):
        nodes_sweep()
    stop = AgentCommand.objects.filter(kind="stop")
    with after(260):
        heard()
        execution_reconcile()
        assert stop.count() == 1
        pool.report_ended(lost, None)
        Node.objects.update(schedulable="cordoned")
        pool.report_free(lost)
    lost.refresh_from_db()
    lost.request.refresh_from_db()
    assert (lost.state, lost.end_reason, lost.request.state) == ("ended", "node_lost", "queued")
    assert Lease.objects.get().ended_at == T + timedelta(seconds=260)


def test_a_gang_with_one_lost_node_stops_whole(lost):
    team, h800 = lost.department, lost.flavour
    with after(0):
        build.limits(team, h800, 30)
        for name in ("n-a", "n-b"):
            pool.node(h800, 8, name=name)
        pool.queued(team, h800, 8, nodes=2)
        schedule_cycle()
        gang = Allocation.objects.order_by("id").last()
        pool.report_running(gang)
    Node.objects.exclude(name="n-a").update(last_heartbeat_at=T + timedelta(seconds=199))
    with after(200):
        nodes_sweep()
    gang.refresh_from_db()
    assert (gang.state, gang.end_reason) == ("stopping", "node_lost")
    states = dict(gang.members.values_list("node__name", "state"))
    assert states == {"n-a": "lost", "n-b": "running"}
    assert AgentCommand.objects.filter(kind="stop", allocation=gang, node__name="n-b").count() == 1
    lost.refresh_from_db()
    assert lost.state == "running"


def watch(seconds: float) -> str:
    """A sweep as the task does it, at that moment; the node's health after it."""
    with after(seconds):
        nodes_sweep(listening=listening_since())
    return health()


def test_an_hour_in_which_nobody_listened_loses_nobody(lost):
    assert [watch(s) for s in (0, 5, 10)] == ["ok"] * 3
    assert watch(3610) == "ok"  # the installation is back: the node had no chance yet
    assert watch(3610 + 14) == "ok" and watch(3610 + 15) == "late"
    with after(3630):
        heard()
    assert (watch(3630), Allocation.objects.get().state) == ("ok", "running")


def test_a_node_that_stays_away_is_lost_two_minutes_after_the_installation_is_back(lost):
    watch(0)
    steps = [watch(seconds) for seconds in range(3600, 3725, 5)]
    assert (steps[0], steps[23], steps[24]) == ("ok", "suspect", "lost")
    assert Allocation.objects.get().state == "stopping"


def test_late_workers_are_no_deafness(lost):
    """The web process hears other agents meanwhile, and says so: this node's silence is its own."""
    watch(0)
    for seconds in range(10, 130, 10):
        with after(seconds):
            listening_since()
    assert watch(130) == "lost"


def test_the_first_agent_that_is_back_makes_no_other_lost(lost):
    """It connects before the first sweep: that it is heard now does not mean that others could have been before."""
    with after(0):
        pool.node(None, 0, name="n-other")
    watch(0)
    Node.objects.filter(name="n-other").update(last_heartbeat_at=T + timedelta(seconds=3600))
    with after(3600):
        listening_since()
    steps = [watch(seconds) for seconds in range(3605, 3726, 5)]
    assert (steps[0], steps[22], steps[23]) == ("ok", "suspect", "lost")


def test_a_start_that_nobody_could_confirm_is_not_given_up_for_it():
    """The installation went away between order and answer: the node has its five minutes after the return."""
    team, h800 = build.department("vg"), build.flavour("h800", installed=None)
    with after(0):
        pool.node(h800, 1, name="n-lost")
        build.limits(team, h800, 4)
        pool.queued(team, h800, 1)
        schedule_cycle()
        listening_since()
    assert Allocation.objects.get().state in ("reserved", "starting")
    with after(3600):
        assert execution_reconcile(listening=listening_since())["given_up"] == 0
    for seconds in range(3610, 3901, 10):
        with after(seconds):
            given_up = execution_reconcile(listening=listening_since())["given_up"]
            assert given_up == (seconds == 3900), seconds
    assert Allocation.objects.get().error_code == "start_not_confirmed"
