"""What a holder is told: once each, with exact times, through the outbox."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from django.utils import timezone, translation

from pool.models import Allocation, Node
from pool.services import allocations
from pool.services.cycle import schedule_cycle
from pool.services.expiry import leases_sweep
from portal.kernel.clock import set_clock
from portal.notify.models import Notification
from portal.notify.texts import words_of
from portal.ops.actor import SYSTEM
from portal.ops.models import OutboxEvent
from portal.ops.services.outbox import outbox_deliver
from tests.pool import builders as pool
from tests.quotas import build

pytestmark = pytest.mark.django_db(transaction=True)
T = datetime(2026, 6, 16, 6, 0, tzinfo=UTC)


@pytest.fixture
def running():
    team, h800 = build.department("vg"), build.flavour("h800", installed=None)
    with set_clock(T):
        pool.node(h800, name="n-a")
        build.limits(team, h800, 4)
        pool.queued(team, h800, 1, duration_s=2 * 86400)
        schedule_cycle()
        allocation = Allocation.objects.get()
        pool.report_running(allocation)
        outbox_deliver()
    return allocation


def titles(kind=""):
    with set_clock(T), translation.override("en"), timezone.override(ZoneInfo("Asia/Shanghai")):
        rows = Notification.objects.filter(kind__startswith=kind).order_by("id")
        return [words_of(row).title.replace("\u00a0", " ") for row in rows]


def deliver_all_again():
    OutboxEvent.objects.update(done_at=None)
    outbox_deliver()


def test_start_and_end_are_told_once(running):
    assert titles() == [f"{running.ref} runs on n-a"]
    with set_clock(T + timedelta(hours=1)):
        pool.report_ended(running)
        pool.report_free(running)
        outbox_deliver()
        deliver_all_again()
    assert titles() == [f"{running.ref} runs on n-a", f"{running.ref} ended: Finished by itself"]
    assert Notification.objects.first().user == running.holder


def test_failure_is_told_as_such(running):
    with set_clock(T + timedelta(hours=1)):
        pool.report_ended(running, 2)
        pool.report_free(running)
        outbox_deliver()
    assert titles("pool.allocation_f") == [f"{running.ref} failed: Ended with an error"]


def test_warning_names_the_time_left_once_per_threshold(running):
    for minutes in (24 * 60 + 1, 24 * 60 + 2, 47 * 60 + 1):
        with set_clock(T + timedelta(minutes=minutes)):
            leases_sweep()
            outbox_deliver()
            deliver_all_again()
    assert titles("pool.lease_expiring") == [
        f"{running.ref} ends in less than 1 day",
        f"{running.ref} ends in less than 1 hour",
    ]


def test_notice_of_a_reclaim_and_the_way_back_in_line(running):
    with set_clock(T + timedelta(hours=1)):
        allocations.allocation_reclaim(
            acting_user=SYSTEM, allocation=running, cause="maintenance", rule="node_drain",
            grace_until=T + timedelta(hours=2), reason="new power supply",
        )  # fmt: skip
        outbox_deliver()
    assert titles("pool.allocation_reclaim") == [f"{running.ref} is taken back at 16 Jun 16:00 (UTC+8)"]
    with set_clock(T + timedelta(hours=2)):
        leases_sweep()
        Node.objects.update(schedulable="draining")
        pool.report_ended(running, None)
        pool.report_free(running)
        outbox_deliver()
    assert titles("pool.allocation_requeued") == [f"{running.request.ref} is back in line at its old place"]


def test_what_was_released_by_its_holder_needs_no_notice(running):
    with set_clock(T + timedelta(hours=1)):
        allocations.allocation_release(acting_user=build.actor(running.holder), allocation=running)
        pool.report_ended(running, None)
        pool.report_free(running)
        outbox_deliver()
    assert titles("pool.allocation_ended") == []


def test_idle_work_and_a_notice_that_was_withdrawn_are_told_once_each(running):
    from pool.services.idle import IdleFinding, idle_findings_take
    from pool.services.reclaim_rules import rules_publish

    rules_publish(acting_user=SYSTEM, values={"idle_everybody": True}, reason="also what is guaranteed")
    idle = IdleFinding(running.pk, "idle", T)
    for minutes in (61, 62, 92):
        with set_clock(T + timedelta(minutes=minutes)):
            idle_findings_take(findings=[idle])
            outbox_deliver()
            deliver_all_again()
    assert titles("pool.allocation_idle") == [f"{running.ref} counts as idle"]
    assert len(titles("pool.allocation_reclaim")) == 1
    with set_clock(T + timedelta(minutes=95)):
        idle_findings_take(findings=[IdleFinding(running.pk, "busy")])
        outbox_deliver()
        deliver_all_again()
    assert titles("pool.reclaim_withdrawn") == [f"{running.ref} keeps its GPUs"]
