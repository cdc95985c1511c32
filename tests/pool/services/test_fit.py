"""The what-if beside the form: place, quota, line, in one answer, with nothing written."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from pool.models import Allocation, QueueEntry
from pool.selectors import fit
from pool.selectors.fit import fit_check
from pool.services.cycle import schedule_cycle
from portal.kernel.clock import set_clock
from quotas.models import CapacityRequest
from tests.pool import builders as pool
from tests.quotas import build

pytestmark = pytest.mark.django_db(transaction=True)
T = datetime(2026, 6, 16, 6, 0, tzinfo=UTC)


@pytest.fixture(autouse=True)
def clock():
    with set_clock(T):
        yield


@pytest.fixture
def team():
    return build.department("vg")


@pytest.fixture
def h800(team):
    made = build.flavour("h800", installed=None)
    pool.node(made, name="n-a")
    build.limits(team, made, 8, hard_cap=8)
    return made


def wish(team, what, gpus, **values):
    return CapacityRequest(
        department=team, flavour=what, gpus_per_node=gpus, requester_id=1, duration_s=3600, **values
    )


def test_it_would_start_now(team, h800):
    found = fit_check(wish(team, h800, 4), max_age_s=0)
    assert (found.free_now, found.starts_now, found.reason, found.nodes) == (True, True, "", ("n-a",))
    assert (found.flavour, found.charge_milli) == ("h800", {"h800": 4000})
    assert (Allocation.objects.count(), CapacityRequest.objects.count(), QueueEntry.objects.count()) == (
        0,
        0,
        0,
    )


def test_the_level_that_blocks_is_named(team, h800):
    found = fit_check(wish(team, h800, 9), max_age_s=0)
    assert (found.free_now, found.starts_now, found.reason) == (False, False, "quota_blocked")
    assert (found.figures["level"], found.figures["limit"], found.figures["requested"]) == ("Vg", 8000, 9000)


def test_no_place_gives_the_range(team, h800):
    pool.queued(team, h800, 3, duration_s=7200)
    schedule_cycle()
    build.limits(team, h800, 16, hard_cap=None)
    found = fit_check(wish(team, h800, 6), max_age_s=0)
    assert (found.free_now, found.reason, found.position, found.of) == (False, "no_node_fits", 1, 1)
    assert (found.start_from, found.start_to) == (T + timedelta(hours=2), T + timedelta(hours=2, minutes=30))


def test_a_request_in_line_is_judged_at_its_own_place(team, h800):
    pool.queued(team, h800, 8)
    schedule_cycle()
    build.limits(team, h800, 16, hard_cap=None)
    mine = pool.queued(team, h800, 2)
    found = fit_check(mine, max_age_s=0)
    assert (found.reason, found.position, found.of) == ("waiting_for_release", 1, 1)


def test_without_the_line_only_place_and_quota_count(team, h800):
    found = fit_check(wish(team, h800, 8), in_line=False, max_age_s=0)
    assert (found.free_now, found.position) == (True, None)


def test_behind_a_long_line_only_the_wish_is_decided_about_and_told_the_same(team, h800, monkeypatch):
    build.limits(team, h800, 16, hard_cap=None)
    pool.queued(team, h800, 6, duration_s=7200)
    schedule_cycle()
    pool.queued(team, h800, 8, duration_s=7200)
    with set_clock(T + timedelta(minutes=2)):
        schedule_cycle()
        told = set()
        for gpus, seconds in ((2, 3600), (2, 9 * 3600), (4, 3600), (8, 3600), (9, 3600)):
            ask = wish(team, h800, gpus)
            ask.duration_s = seconds
            monkeypatch.setattr(fit, "LONG_LINE", 1000)
            whole = fit_check(ask, max_age_s=0)
            monkeypatch.setattr(fit, "LONG_LINE", 0)
            assert fit_check(ask, max_age_s=0) == whole
            told.add(whole.reason)
        assert {"", "behind", "no_node_fits"} <= told


def test_a_process_follows_what_changed_since_it_looked(team, h800):
    ask = wish(team, h800, 4)
    assert fit_check(ask, max_age_s=0).starts_now
    loads = fit._watcher.planner.memory.loads
    pool.queued(team, h800, 5)
    schedule_cycle()
    assert not fit_check(ask, max_age_s=0).starts_now
    assert fit_check(ask).reason == "quota_blocked"
    build.limits(team, h800, 16, hard_cap=None)
    assert fit_check(ask).reason == "quota_blocked"  # as of some moments ago
    assert fit_check(ask, max_age_s=0).reason == "no_node_fits"
    assert fit._watcher.planner.memory.loads == loads
