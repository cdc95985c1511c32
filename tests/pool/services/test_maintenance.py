"""Maintenance windows: planned, told, begun, ended, cancelled; who is in the way; twice, late, and overlapping."""

from __future__ import annotations

import pytest

from pool.models import MaintenanceWindow, Node, ReclaimCase
from pool.selectors.reclaim import closed_windows
from pool.services import allocations
from pool.services.maintenance import window_cancel, window_plan, windows_sweep
from portal.kernel.errors import Conflict, Invalid, Refused
from portal.kernel.units import to_ms
from portal.ops.actor import SYSTEM
from portal.ops.models import AuditEvent
from quotas.models import FlavourCapacity
from tests.pool import builders as pool
from tests.pool.reclaim import at, case_of, gone, moment, running, sweep
from tests.quotas import build

pytestmark = pytest.mark.django_db(transaction=True)
HOUR = 3600


@pytest.fixture
def here():
    """Two nodes of four cards; two leases on the first fill it: one ends after an hour, one after ten."""
    with at(0):
        team, h800 = build.department("vg"), build.flavour("h800", installed=None)
        first = pool.node(h800, 4, name="n-1")
        build.limits(team, h800, 16)
        short = running(team, h800, 2, duration_s=HOUR)
        long = running(team, h800, 2, duration_s=10 * HOUR)
        second = pool.node(h800, 4, name="n-2")
    return team, h800, first, second, short, long


def plan(first, starts=4 * HOUR, ends=6 * HOUR, notice=2 * HOUR, **values):
    return window_plan(
        acting_user=SYSTEM, title="New power supply", reason="rack 4 gets a new supply", starts_at=moment(starts),
        ends_at=moment(ends), notice_s=notice, **({"nodes": [first]} | values),
    )  # fmt: skip


def schedulable():
    return dict(Node.objects.order_by("name").values_list("name", "schedulable"))


def test_the_whole_way_of_a_window(here):
    team, _h800, first, _second, short, long = here
    with at(0):
        window = plan(first)
        assert (window.state, ReclaimCase.objects.count()) == ("planned", 0)
        assert closed_windows() == {first.pk: ((to_ms(moment(4 * HOUR)), to_ms(moment(6 * HOUR))),)}
    with at(HOUR):
        gone(short, 0, open_nodes=True)
    with at(2 * HOUR):
        assert windows_sweep() == {"announced": 1, "began": 0, "ended": 0, "told": 1}
        assert windows_sweep() == {"announced": 0, "began": 0, "ended": 0, "told": 0}
    case = case_of(long)
    assert (case.cause, case.rule, case.window_id, case.grace_until, case.text) == (
        "maintenance", "maintenance_window", window.pk, moment(4 * HOUR - 30), "rack 4 gets a new supply",
    )  # fmt: skip
    assert case.figures["window"] == window.ref
    with at(4 * HOUR - 30):
        assert sweep()["stopped"] == 1
        gone(long)
        Node.objects.update(schedulable="open")
    long.request.refresh_from_db()
    assert (long.end_reason, long.request.state, long.request.queued_at) == (
        "maintenance",
        "queued",
        moment(0),
    )
    with at(4 * HOUR):
        assert windows_sweep()["began"] == 1
        assert windows_sweep()["began"] == 0
        assert schedulable() == {"n-1": "maintenance", "n-2": "open"}
        assert FlavourCapacity.objects.get().healthy_milli == 4000
    first.refresh_from_db()
    assert first.maintenance_until == moment(6 * HOUR)
    with at(6 * HOUR):
        assert windows_sweep()["ended"] == 1
        assert windows_sweep() == {"announced": 0, "began": 0, "ended": 0, "told": 0}
    window.refresh_from_db()
    assert (window.state, window.ended_at, schedulable()) == (
        "ended", moment(6 * HOUR), {"n-1": "open", "n-2": "open"},
    )  # fmt: skip
    assert closed_windows() == {}


def test_cancelled_in_the_notice_everybody_goes_on(here):
    *_rest, first, _second, short, long = here
    with at(0):
        window = plan(first, notice=4 * HOUR)
        assert window.state == "announced"
        assert ReclaimCase.objects.get().allocation_id == long.pk
    with at(HOUR / 2):
        with pytest.raises(Invalid):
            window_cancel(acting_user=SYSTEM, window=window, reason=" ")
        window_cancel(acting_user=SYSTEM, window=window, reason="the supply did not come")
        with pytest.raises(Conflict):
            window_cancel(acting_user=SYSTEM, window=window, reason="again")
    window.refresh_from_db()
    long.refresh_from_db()
    assert (window.state, long.state, case_of(long).withdrawn_why) == ("cancelled", "running", "window_over")
    assert closed_windows() == {}
    with at(5 * HOUR):
        windows_sweep()
        assert schedulable() == {"n-1": "open", "n-2": "open"}
    assert AuditEvent.objects.filter(action="maintenance.cancelled").count() == 1
    assert short.pk


def test_a_window_that_began_is_ended_early_and_its_nodes_open_again(here):
    *_rest, first, second, _short, _long = here
    with at(0):
        window = plan(second, starts=0, ends=2 * HOUR, notice=0)
        assert (window.state, schedulable()["n-2"]) == ("running", "maintenance")
    with at(HOUR):
        window_cancel(acting_user=SYSTEM, window=window, reason="done sooner")
    window.refresh_from_db()
    assert (window.state, schedulable()["n-2"], first.pk > 0) == ("ended", "open", True)


def test_a_node_that_people_closed_stays_closed_and_two_windows_do_not_open_each_others_nodes(here):
    *_rest, first, second, _short, _long = here
    with at(0):
        Node.objects.filter(pk=second.pk).update(schedulable="cordoned")
        mine = plan(second, starts=0, ends=HOUR, notice=0)
        assert schedulable()["n-2"] == "cordoned"
    with at(HOUR):
        windows_sweep()
        assert schedulable()["n-2"] == "cordoned"
    mine.refresh_from_db()
    assert mine.state == "ended"
    with at(HOUR):
        Node.objects.filter(pk=second.pk).update(schedulable="open")
        plan(second, starts=HOUR, ends=2 * HOUR, notice=0)
        plan(second, starts=HOUR, ends=3 * HOUR, notice=0)
    with at(2 * HOUR):
        windows_sweep()
    # The first closed it, the second found it closed: it is the first's to open, but not before both are over.
    with at(3 * HOUR):
        windows_sweep()
        assert schedulable()["n-2"] == "open"
    assert first.pk


def test_a_site_takes_all_its_nodes_also_new_ones(here):
    _team, h800, first, second, _short, _long = here
    with at(0):
        site = first.cluster.site
        window = plan(first, nodes=(), site=site)
        third = pool.node(h800, 1, name="n-3")
        assert set(closed_windows()) == {first.pk, second.pk, third.pk}
    with at(4 * HOUR):
        windows_sweep()
    assert schedulable() == {"n-1": "maintenance", "n-2": "maintenance", "n-3": "maintenance"}
    assert window.node_rows.count() == 3


def test_a_window_that_nobody_swept_in_time_passes_through_its_states(here):
    *_rest, first, _second, _short, _long = here
    with at(0):
        window = plan(first)
    with at(5 * HOUR):
        done = windows_sweep()
        assert (done["announced"], done["began"], done["told"]) == (1, 1, 1)
    with at(9 * HOUR):
        windows_sweep()
    window.refresh_from_db()
    assert window.state == "ended"
    with at(0):
        missed = plan(first, starts=10 * HOUR, ends=11 * HOUR)
    with at(20 * HOUR):
        assert windows_sweep()["ended"] == 1
    missed.refresh_from_db()
    assert (missed.state, missed.began_at) == ("ended", None)


def test_nothing_is_extended_into_a_window(here):
    *_rest, first, _second, short, _long = here
    with at(0):
        plan(first)
        who = build.actor(short.holder)
        allocations.allocation_extend(acting_user=who, allocation=short, extra_s=HOUR)
        with pytest.raises(Conflict) as refused:
            allocations.allocation_extend(acting_user=who, allocation=short, extra_s=3 * HOUR)
    assert refused.value.code == "maintenance_ahead"
    short.refresh_from_db()
    assert short.expires_at == moment(2 * HOUR)


def test_what_makes_no_sense_is_refused_field_by_field(here):
    *_rest, first, _second, _short, _long = here
    with at(0):
        with pytest.raises(Invalid) as refused:
            window_plan(
                acting_user=SYSTEM, title=" ", reason="", starts_at=moment(10), ends_at=moment(5), notice_s=-1
            )  # fmt: skip
        assert [problem["pointer"] for problem in refused.value.errors] == [
            "title", "reason", "ends_at", "notice_s", "nodes",
        ]  # fmt: skip
        with pytest.raises(Invalid):
            plan(first, starts=-HOUR, ends=-60)
        with pytest.raises(Refused):
            window_plan(
                acting_user=build.actor(build.user("lin")), title="t", reason="r", starts_at=moment(10),
                ends_at=moment(50), notice_s=0, nodes=[first],
            )  # fmt: skip
    assert MaintenanceWindow.objects.count() == 0


def test_a_drain_that_is_called_off_lets_everybody_go_on_who_is_not_stopped(here):
    from pool.services.nodes import node_drain, node_uncordon

    *_rest, first, _second, short, long = here
    with at(0):
        node_drain(acting_user=SYSTEM, node=first, reason="smells odd", grace_s=600)
        assert {case.allocation_id for case in ReclaimCase.objects.all()} == {short.pk, long.pk}
    with at(60):
        allocations.allocation_release(acting_user=build.actor(short.holder), allocation=short)
        first.refresh_from_db()
        node_uncordon(acting_user=SYSTEM, node=first, reason="it was the neighbour")
    with at(700):
        assert sweep()["stopped"] == 0
    long.refresh_from_db()
    short.refresh_from_db()
    assert (long.state, case_of(long).withdrawn_why, short.state) == (
        "running",
        "node_open_again",
        "stopping",
    )
