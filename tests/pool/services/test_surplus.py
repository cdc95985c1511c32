"""A quota below use: nothing is killed; the administrator lets it run out, or takes back with notice."""

from __future__ import annotations

import pytest

from pool.models import ReclaimCase
from pool.services.surplus import departments_over, surplus_reclaim, surplus_settle
from portal.kernel.errors import Conflict, Invalid, Refused
from portal.ops.actor import SYSTEM
from quotas.models import QuotaUsage
from quotas.services.usage import usage_recompute
from tests.pool import builders as pool
from tests.pool.reclaim import at, case_of, gone, moment, running, sweep
from tests.quotas import build

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def lowered():
    """Eight cards in use by a department in 4 + 2 + 2 (least important last), its cap lowered to six."""
    with at(0):
        team, h800 = build.department("vg"), build.flavour("h800", installed=None)
        pool.node(h800, 8)
        build.limits(team, h800, 8)
        big = running(team, h800, 4, priority=80)
        middle = running(team, h800, 2, priority=50)
        small = running(team, h800, 2, priority=20)
        cap(team, h800, 6)
    return team, h800, big, middle, small


def cap(team, h800, gpus):
    build.limits(team, h800, gpus, hard_cap=gpus)
    usage_recompute(flavour_id=h800.pk)


def test_lowering_kills_nothing_and_says_over_by_how_much(lowered):
    team, h800, *_rest = lowered
    with at(10):
        sweep()
        (over,) = departments_over()
        assert (over.department, over.flavour, over.used_milli, over.over_milli) == (team, h800, 8000, 2000)
        assert ReclaimCase.objects.count() == 0
        waiting = pool.queued(team, h800, 1)
        from pool.services.cycle import schedule_cycle

        assert schedule_cycle().placed == ()
    waiting.refresh_from_db()
    assert waiting.state == "queued"


def test_taken_back_with_notice_least_important_first_and_put_back_in_line(lowered):
    team, h800, big, middle, small = lowered
    with at(10):
        with pytest.raises(Refused):
            surplus_reclaim(
                acting_user=build.actor(build.user("x")), department=team, flavour=h800, reason="r"
            )
        with pytest.raises(Invalid):
            surplus_reclaim(acting_user=SYSTEM, department=team, flavour=h800, reason=" ")
        (case,) = surplus_reclaim(
            acting_user=SYSTEM, department=team, flavour=h800, reason="quota cut in June", notice_s=7200
        )
        assert (case.allocation_id, case.cause, case.rule, case.grace_until) == (
            small.pk, "over_quota", "over_quota", moment(7210),
        )  # fmt: skip
        assert (case.figures["over_milli"], case.text) == (2000, "quota cut in June")
        with pytest.raises(Conflict) as twice:
            surplus_reclaim(acting_user=SYSTEM, department=team, flavour=h800, reason="again")
        assert twice.value.code == "not_over"
    with at(7210):
        assert sweep()["stopped"] == 1
        gone(small, open_nodes=True)
    small.request.refresh_from_db()
    assert (small.end_reason, small.request.state, QuotaUsage.objects.get().direct) == (
        "over_quota",
        "queued",
        6000,
    )
    for other in (big, middle):
        other.refresh_from_db()
        assert other.state == "running"


def test_a_raised_quota_or_another_end_withdraws_what_is_not_needed(lowered):
    team, h800, _big, middle, small = lowered
    with at(10):
        surplus_reclaim(acting_user=SYSTEM, department=team, flavour=h800, reason="cut", notice_s=7200)
        assert surplus_settle() == 0
        cap(team, h800, 8)
        assert surplus_settle() == 1
    assert case_of(small).withdrawn_why == "within_quota"
    with at(20):
        cap(team, h800, 6)
        surplus_reclaim(acting_user=SYSTEM, department=team, flavour=h800, reason="cut", notice_s=7200)
    with at(30):
        gone(middle, 0)
        assert surplus_settle() == 1
    small.refresh_from_db()
    assert (small.state, case_of(small).step) == ("running", "withdrawn")


def test_what_may_not_be_interrupted_is_left_to_run_out(lowered):
    team, h800, big, middle, small = lowered
    with at(10):
        for one in (big, middle, small):
            one.__class__.objects.filter(pk=one.pk).update(interruptible=False)
        assert surplus_reclaim(acting_user=SYSTEM, department=team, flavour=h800, reason="cut") == []
    assert ReclaimCase.objects.count() == 0
