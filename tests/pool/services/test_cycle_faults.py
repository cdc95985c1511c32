"""Cycles under faults: what was decided is judged again when it is written, a killed planner leaves nothing half done,
and two planners place nothing twice.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from unittest.mock import patch

import pytest
from django.db import IntegrityError, connection

from pool.models import Allocation, Lease, LeaseSpan, Node, QueueEntry, SchedulerCycle
from pool.services import cycle as cycles
from pool.services import plan_batch
from pool.services.cycle import planner_reset, schedule_cycle
from pool.services.stopping import stop
from portal.accounts.models import Department
from portal.kernel.clock import set_clock
from portal.ops.actor import system
from quotas.models import CapacityRequest, QuotaUsage, UsageSpan
from quotas.services.usage import usage_recompute
from tests.database import database_url
from tests.pool import builders as pool
from tests.quotas import build

pytestmark = pytest.mark.django_db(transaction=True)
T = datetime(2026, 6, 16, 6, 0, tzinfo=UTC)

KILLED = """
import os, signal, sys
import django
django.setup()
from pool.services import cycle, plan_batch
def die(*args, **values):
    os.kill(os.getpid(), signal.SIGKILL)
module, name = {"plan": (cycle, "places_apply"), "debit": (plan_batch, "leases_write")}[sys.argv[1]]
setattr(module, name, die)
cycle.schedule_cycle(cause="killed")
"""


@pytest.fixture(autouse=True)
def fresh():
    planner_reset()
    yield
    planner_reset()


def before_writing(monkeypatch, act) -> None:
    """``act`` happens after the decision and before it is written, once."""
    real, done = cycles.places_apply, []

    def apply(**values):
        if not done:
            done.append(True)
            act()
        return real(**values)

    monkeypatch.setattr(cycles, "places_apply", apply)


def nothing_written(request: CapacityRequest) -> bool:
    request.refresh_from_db()
    rows = (Allocation.objects.filter(request=request), Lease.objects.filter(allocation__request=request),
            UsageSpan.objects.filter(request=request), request.events.all())  # fmt: skip
    return request.state == "queued" and not any(found.exists() for found in rows)


@pytest.mark.parametrize(("where", "recorded"), [("plan", 1), ("debit", 1)])
def test_a_killed_planner_leaves_nothing_half_done_and_its_lock_frees_itself(team, h800, where, recorded):
    pool.node(h800)
    build.limits(team, h800, 8)
    request = pool.queued(team, h800, 2)
    environment = os.environ | {
        "DATABASE_URL": database_url(), "DJANGO_SETTINGS_MODULE": "tests.settings", "GPUPOOL_ENV": "test",
    }  # fmt: skip
    found = subprocess.run(
        [sys.executable, "-c", KILLED, where], env=environment, capture_output=True, timeout=120, check=False
    )
    assert found.returncode == -9, found.stderr[-2000:]
    assert nothing_written(request)
    assert QuotaUsage.objects.get(department=team).direct == 0
    assert SchedulerCycle.objects.filter(cause="killed", placed=0).count() == recorded
    assert len(schedule_cycle().placed) == 1
    assert QuotaUsage.objects.get(department=team).direct == 2000
    assert schedule_cycle().placed == ()
    assert Lease.objects.count() == 2


def test_two_planners_at_once_place_everything_once(team, h800):
    for _ in range(2):
        pool.node(h800)
    build.limits(team, h800, 16)
    for number in range(12):
        pool.queued(team, h800, 1, queued_at=T + timedelta(seconds=number))
    barrier, results = threading.Barrier(3), []

    def plan() -> None:
        barrier.wait()
        results.append(schedule_cycle())
        connection.close()

    threads = [threading.Thread(target=plan) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(len(result.placed) for result in results) == 12
    assert Allocation.objects.count() == Lease.objects.count() == 12
    assert QuotaUsage.objects.get(department=team).direct == 12_000


def test_a_quota_lowered_after_the_decision_refuses_just_what_passes_it(team, h800, monkeypatch):
    other = build.department("og")
    pool.node(h800)
    build.limits(team, h800, 8)
    build.limits(other, h800, 8)
    refused = pool.queued(team, h800, 2)
    fits = pool.queued(other, h800, 2)
    before_writing(monkeypatch, lambda: QuotaUsage.objects.filter(department=team).update(hard_cap=1000))
    result = schedule_cycle()
    assert (len(result.placed), result.refused) == (1, 1)
    assert Allocation.objects.get().request_id == fits.pk
    assert nothing_written(refused)
    assert QuotaUsage.objects.get(department=team).direct == 0
    cycle = SchedulerCycle.objects.get()
    assert (cycle.refused_on_apply, cycle.refusals) == (1, [{"request": refused.pk, "code": "quota_blocked"}])
    assert QueueEntry.objects.get(request=refused).reason == "quota_blocked"  # judged again in the same cycle


def test_a_department_moved_after_the_decision_is_judged_where_it_is_now(team, h800, monkeypatch):
    full = build.department("full")
    pool.node(h800)
    build.limits(team, h800, 8)
    build.limits(full, h800, 8, hard_cap=1)
    request = pool.queued(team, h800, 2)

    def move() -> None:
        Department.objects.filter(pk=team.pk).update(parent=full)
        usage_recompute(flavour_id=h800.pk)

    before_writing(monkeypatch, move)
    result = schedule_cycle()
    assert (result.placed, result.refused) == ((), 1)
    assert nothing_written(request)
    assert QueueEntry.objects.get(request=request).figures["level"] == full.name


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda node: Node.objects.filter(pk=node.pk).update(health="lost"), "place_lost"),
        (lambda node: node.gpus.update(cordoned=True), "place_cordoned"),
        (lambda node: node.gpus.update(mig_enabled=True), "place_gpu_layout_changed"),
        (lambda node: CapacityRequest.objects.update(state="withdrawn"), "wrong_state"),
    ],
)
def test_what_changed_after_the_decision_is_left_out(team, h800, monkeypatch, change, code):
    node = pool.node(h800)
    build.limits(team, h800, 8)
    pool.queued(team, h800, 2)
    before_writing(monkeypatch, lambda: change(node))
    result = schedule_cycle()
    assert (result.placed, result.refused) == ((), 1)
    assert SchedulerCycle.objects.get().refusals[0]["code"] == code
    assert (Allocation.objects.count(), QuotaUsage.objects.get(department=team).direct) == (0, 0)


def test_a_batch_that_the_database_refuses_is_tried_one_by_one(team, h800, monkeypatch):
    pool.node(h800)
    build.limits(team, h800, 8)
    requests = [pool.queued(team, h800, 1, queued_at=T + timedelta(seconds=number)) for number in range(3)]
    real = plan_batch._write

    def write(batch):
        real(batch)
        raise IntegrityError("somebody was faster")

    monkeypatch.setattr(plan_batch, "_write", write)
    assert len(schedule_cycle().placed) == 3
    assert set(Allocation.objects.values_list("request_id", flat=True)) == {one.pk for one in requests}
    assert QuotaUsage.objects.get(department=team).direct == 3000
    assert Lease.objects.count() == UsageSpan.objects.count() == 3


def test_what_the_database_refuses_of_a_batch_is_a_refusal_by_its_name(team, h800):
    """A span is open on a card though its lease ended: the COPY of a batch runs into it, and nothing is written."""
    pool.node(h800, 1)
    build.limits(team, h800, 8)
    pool.queued(team, h800, 1, queued_at=T)
    with patch("pool.tasks.start_allocation.apply_async"):
        schedule_cycle()
    Lease.objects.update(ended_at=T)
    Allocation.objects.update(state="ended")
    CapacityRequest.objects.update(state="ended")
    QuotaUsage.objects.update(direct=0)
    usage_recompute(flavour_id=h800.pk)
    planner_reset()
    asked = pool.queued(team, h800, 1, queued_at=T)
    result = schedule_cycle()
    assert (result.placed, result.refused > 0, result.waiting) == ((), True, 1)
    refusals = [one for row in SchedulerCycle.objects.order_by("id") for one in row.refusals]
    assert {(one["request"], one["code"]) for one in refusals} == {(asked.pk, "lease_span_never_twice")}
    assert nothing_written(asked)
    assert Lease.objects.filter(ended_at=None).count() == 0


def test_a_card_whose_last_lease_ended_in_the_future_is_held_from_then_on(team, h800):
    """The clock was an hour ahead when a lease ended there and was put back since: one batch places all the same."""
    node = pool.node(h800, 2)
    build.limits(team, h800, 8)
    first = pool.queued(team, h800, 1, queued_at=T)
    with set_clock(T + timedelta(hours=1)), patch("pool.tasks.start_allocation.apply_async"):
        assert len(schedule_cycle().placed) == 1
    then = T + timedelta(hours=2)
    with set_clock(then):
        stop(acting_user=system("test"), allocation_id=Allocation.objects.get().pk, cause="released")
    assert (Allocation.objects.get().state, Lease.objects.get().ended_at) == ("ended", then)
    used = Lease.objects.get().gpu_id
    again = pool.queued(team, h800, 2, queued_at=T)
    with set_clock(T):
        result = schedule_cycle()
    assert (len(result.placed), result.refused) == (1, 0)
    began = dict(Lease.objects.filter(ended_at=None).values_list("gpu_id", "started_at"))
    assert began == {card.pk: then if card.pk == used else T for card in node.gpus.all()}
    assert {one.key: one.started_at for one in UsageSpan.objects.filter(request=again)} == {
        one.uid: one.started_at for one in Lease.objects.filter(ended_at=None)
    }
    first.refresh_from_db()
    assert first.state == "ended"


def test_a_share_of_a_card_has_nothing_to_do_with_what_ended_on_its_other_half(team, h800):
    """Only the half that was held into the future begins later: the other half of the card begins now."""
    card = pool.node(h800, 1).gpus.get()
    build.limits(team, h800, 8)
    half = {"shape": "fraction", "fraction_milli": 500, "fraction_mib": 20_000}
    pool.queued(team, h800, 1, queued_at=T, **half)
    with set_clock(T + timedelta(hours=1)), patch("pool.tasks.start_allocation.apply_async"):
        assert len(schedule_cycle().placed) == 1
    then = T + timedelta(hours=2)
    with set_clock(then):
        stop(acting_user=system("test"), allocation_id=Allocation.objects.get().pk, cause="released")
    held = LeaseSpan.objects.get().span
    for _one in range(2):
        pool.queued(team, h800, 1, queued_at=T, **half)
    with set_clock(T):
        assert len(schedule_cycle().placed) == 2
    found = LeaseSpan.objects.filter(gpu=card, lease__ended_at=None).values_list("span", "lease__started_at")
    assert {span.lower: began for span, began in found} == {held.lower: then, 500 - held.lower: T}


def test_a_clock_that_jumps_neither_stops_nor_doubles_anything(team, h800):
    pool.node(h800)
    build.limits(team, h800, 8)
    pool.queued(team, h800, 1, queued_at=T)
    with set_clock(T):
        assert len(schedule_cycle().placed) == 1
    pool.queued(team, h800, 1, queued_at=T)
    with set_clock(T - timedelta(days=2)):
        assert len(schedule_cycle().placed) == 1
    pool.queued(team, h800, 1, queued_at=T)
    with set_clock(T + timedelta(days=400)):
        assert len(schedule_cycle().placed) == 1
        assert schedule_cycle().placed == ()
    assert Lease.objects.filter(ended_at=None).count() == 3
