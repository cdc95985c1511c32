"""The end of leases: always, once, with each warning said once, also after a night without sweeps."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from pool.models import AgentCommand, Allocation
from pool.services import allocations
from pool.services.cycle import schedule_cycle
from pool.services.expiry import leases_sweep, thresholds_for
from portal.kernel.clock import set_clock
from portal.ops.models import AuditEvent, OutboxEvent
from tests.pool import builders as pool
from tests.quotas import build

pytestmark = pytest.mark.django_db(transaction=True)
T = datetime(2026, 6, 16, 6, 0, tzinfo=UTC)


def at(hours: float) -> set_clock:
    return set_clock(T + timedelta(hours=hours))


@pytest.fixture
def lease():
    """One card, running from T for ten days."""
    team, h800 = build.department("vg"), build.flavour("h800", installed=None)
    with at(0):
        pool.node(h800)
        build.limits(team, h800, 4)
        pool.queued(team, h800, 1, duration_s=10 * 86400)
        schedule_cycle()
        allocation = Allocation.objects.get()
        pool.report_running(allocation)
    allocation.refresh_from_db()
    return allocation


def warnings():
    rows = OutboxEvent.objects.filter(topic="pool.lease_expiring").order_by("id")
    return [row.payload["threshold_s"] for row in rows]


def test_each_threshold_is_told_once(lease):
    for hours in (100, 168, 168.1, 170, 216, 217, 239, 239.5, 239.9, 239.95):
        with at(hours):
            leases_sweep()
            leases_sweep()
    assert warnings() == [3 * 86400, 86400, 3600, 600]


def test_after_a_missed_night_only_the_last_threshold_is_told(lease):
    with at(239.5):
        assert leases_sweep() == {"expired": 0, "reclaimed": 0, "warned": 1}
        assert leases_sweep()["warned"] == 0
    assert warnings() == [3600]
    with at(239.95):
        leases_sweep()
    assert warnings() == [3600, 600]


def test_an_extension_warns_anew(lease):
    with at(239.5):
        leases_sweep()
        allocations.allocation_extend(acting_user=build.actor(lease.holder), allocation=lease, extra_s=36000)
        leases_sweep()
    assert warnings() == [3600, 86400]


def test_expiry_run_twice_stops_once(lease):
    with at(240):
        assert leases_sweep()["expired"] == 1
        assert leases_sweep()["expired"] == 0
    lease.refresh_from_db()
    assert (lease.state, lease.end_reason) == ("stopping", "expired")
    assert AgentCommand.objects.filter(kind="stop").count() == 1
    assert AuditEvent.objects.filter(action="allocation.stopped").count() == 1


def test_expiry_after_a_missed_night_stops_without_a_late_warning(lease):
    with at(260):
        assert leases_sweep() == {"expired": 1, "reclaimed": 0, "warned": 0}
    assert warnings() == []


def test_a_sweep_over_many_leases_costs_a_fixed_number_of_queries(lease, django_assert_max_num_queries):
    with at(0):
        for _ in range(3):
            pool.queued(lease.department, lease.flavour, 1, duration_s=10 * 86400)
        schedule_cycle()
    with at(239):
        assert leases_sweep()["warned"] == 4
        with django_assert_max_num_queries(5):
            assert leases_sweep()["warned"] == 0


def test_short_leases_are_not_warned_days_ahead(lease):
    lease.started_at = T
    for hours, expected in ((0.2, []), (0.5, [600]), (3, [3600, 600]), (100, [86400, 3600, 600])):
        lease.expires_at = T + timedelta(hours=hours)
        assert thresholds_for(lease) == expected


def test_a_service_without_an_end_never_expires(lease):
    Allocation.objects.update(expires_at=None)
    with at(24 * 400):
        assert leases_sweep() == {"expired": 0, "reclaimed": 0, "warned": 0}
