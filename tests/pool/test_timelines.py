"""The `timeline` cases of the case files through the running services, each named by its id: an owner, a victim, the
real cycle, the ladder, and what executors report.
"""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from monitoring.models import GpuState
from monitoring.services.idleness import idle_judge
from pool.models import Allocation, IdleWatch, KeptPlace, ReclaimCase, SchedulingPolicy
from pool.services.cycle import schedule_cycle
from pool.services.reclaim_rules import rules_publish
from portal.accounts.policy import policy_of
from portal.kernel.clock import now
from portal.ops.actor import SYSTEM
from portal.ops.services.outbox import outbox_deliver
from quotas.models import QuotaUsage
from quotas.services.requests import request_withdraw
from tests.pool import builders as pool
from tests.pool.reclaim import at, case_of, running, sweep
from tests.quotas import build

pytestmark = pytest.mark.django_db(transaction=True)
CASES = Path(__file__).resolve().parents[1] / "data" / "cases" / "cases_preemption.json"


def expected(case_id: str) -> dict[str, Any]:
    """What the case file expects."""
    cases = json.loads(CASES.read_text(encoding="utf-8"))["cases"]
    found: dict[str, Any] = next(case for case in cases if case["id"] == case_id)["expected"]
    return found


def policy(**values: Any) -> None:
    SchedulingPolicy.objects.update(active=False)
    SchedulingPolicy.objects.create(name="test", values=values, active=True)


@pytest.fixture
def borrowed():
    """Four cards: a department without a guarantee holds them all, their owner (guarantee 4) does not ask yet."""
    with at(0):
        borrower, owner = build.department("borrower"), build.department("owner")
        h800 = build.flavour("h800", installed=None)
        pool.node(h800, 4)
        build.limits(borrower, h800, 0)
        build.limits(owner, h800, 4)
        rules_publish(acting_user=SYSTEM, values={"grace_preempted_s": 300}, reason="as in the cases")
    return borrower, owner, h800


def ask(owner: Any, h800: Any) -> Any:
    request = pool.queued(owner, h800, 4)
    schedule_cycle()
    return request


def used(department: Any) -> int:
    return int(QuotaUsage.objects.get(department=department).direct)


def test_pr_174_the_devices_are_free_only_when_the_victim_has_really_stopped(borrowed):
    borrower, owner, h800 = borrowed
    facts = expected("pr-174")
    with at(0):
        victim = running(borrower, h800, 4, checkpoint={"signal": "SIGUSR1", "seconds": 300})
        waiting = ask(owner, h800)
    with at(60):
        sweep()
        schedule_cycle()
        case = case_of(victim)
        assert (case.step, case.for_request_id) == ("checkpoint", waiting.pk)
        assert facts["V_state_at_60"] == "terminating"
        assert Allocation.objects.filter(request=waiting).count() == facts["free_for_owner_at_60"]
        assert (used(borrower), used(owner)) == (4000, 0)
    with at(facts["owner_starts_at"]):
        pool.report_ended(victim, 0)
        assert used(borrower) == 4000
        pool.report_free(victim)
        schedule_cycle()
    started = Allocation.objects.get(request=waiting)
    victim.refresh_from_db()
    victim.request.refresh_from_db()
    assert started.reserved_at == now_at(facts["V_quota_charged_until"]) == victim.quota_released_at
    assert (used(borrower), used(owner)) == (0, 4000)
    assert (victim.request.state == "queued") is facts["V_requeued"]
    assert victim.end_reason == "preempted"


def now_at(seconds: float) -> Any:
    with at(seconds):
        return now()


def test_pr_176_an_owner_that_leaves_in_the_grace_takes_the_eviction_along(borrowed):
    borrower, owner, h800 = borrowed
    facts = expected("pr-176")
    with at(0):
        victim = running(borrower, h800, 4, checkpoint={"signal": "SIGUSR1", "seconds": 10})
        waiting = ask(owner, h800)
        assert case_of(victim).for_request_id == waiting.pk
    with at(30):
        request_withdraw(
            acting_user=build.actor(waiting.requester), policy=policy_of(waiting.requester), request=waiting
        )
        outbox_deliver()
    with at(31):
        victim.refresh_from_db()
        assert victim.state == facts["V_state_at_31"]
    with at(1000):
        sweep()
        schedule_cycle()
    victim.refresh_from_db()
    assert (victim.state != "running") is facts["V_evicted"]
    assert (case_of(victim).step, ReclaimCase.objects.count()) == ("withdrawn", 1)
    assert KeptPlace.objects.get().end_reason == "left"


def test_pr_178_minimum_run_time_counts_from_the_last_start_and_again_after_a_requeue(borrowed):
    borrower, owner, h800 = borrowed
    facts = expected("pr-178")
    policy(min_run_reclaim_ms=600_000)
    with at(0):
        submitted = pool.queued(
            borrower, h800, 4, duration_s=86_400, start_at=now() + timedelta(seconds=1000)
        )
        schedule_cycle()
        assert not Allocation.objects.exists()
    with at(1000):
        schedule_cycle()
        victim = Allocation.objects.get(request=submitted)
        pool.report_running(victim)
    with at(1300):
        waiting = ask(owner, h800)
        assert (ReclaimCase.objects.count() == 0) is (facts["reclaim_at_1300"] == "refused")
    with at(1601):
        schedule_cycle()
        assert (ReclaimCase.objects.count() == 1) is (facts["reclaim_at_1601"] == "allowed")
    with at(1901):
        sweep()
        pool.report_ended(victim)
        pool.report_free(victim)
        schedule_cycle()
        first = Allocation.objects.get(request=waiting)
        pool.report_running(first)
    with at(2000):
        pool.report_ended(first)
        pool.report_free(first)
        schedule_cycle()
        again = Allocation.objects.get(request=submitted, state__in=["reserved", "starting"])
        pool.report_running(again)
    with at(2300):
        ask(owner, h800)
        assert ReclaimCase.objects.filter(allocation=again).count() == 0
    with at(2601):
        schedule_cycle()
        assert ReclaimCase.objects.filter(allocation=again).count() == 1


def test_pr_180_idleness_is_judged_by_devices_and_kernels_alone(borrowed):
    """Nobody looks at a browser: a batch cell keeps the device busy, whatever is closed."""
    borrower, _owner, h800 = borrowed
    facts = expected("pr-180")
    rules_publish(
        acting_user=SYSTEM, values={"idle_window_s": 900, "idle_warn_s": 60}, reason="as in the case"
    )
    with at(0):
        session = running(borrower, h800, 4, run_kind="hold", command="", duration_s=86_400)
    for seconds in range(10, 5001, 998):
        with at(seconds):
            for lease in session.leases.all():
                GpuState.objects.update_or_create(
                    gpu_id=lease.gpu_id, slot=0,
                    defaults={"at": now(), "quiet_since": None, "util_pm": 970, "processes": [{"pid": 7}]},
                )  # fmt: skip
            idle_judge()
            sweep()
    session.refresh_from_db()
    assert ReclaimCase.objects.exists() is facts["idle_reclaimed"]
    assert (session.state, IdleWatch.objects.get().state) == ("running", "busy")
