"""From reserved to ended: what executors confirm, what people ask, and that each thing happens once."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from pool.models import (
    AgentCommand,
    Allocation,
    Gpu,
    Lease,
    LeaseSpan,
    Node,
    QueueEntry,
    ReclaimCase,
    SchedulingPolicy,
)
from pool.services import allocations
from pool.services.closing import allocation_finish
from pool.services.cycle import schedule_cycle
from pool.services.execution import allocation_start, execution_reconcile
from portal.kernel.clock import set_clock
from portal.kernel.errors import Blocked, Conflict, Invalid, Refused
from portal.ops.actor import SYSTEM
from portal.ops.models import AuditEvent, Incident, OutboxEvent
from quotas.models import LedgerEntry, PriceRate, QuotaUsage, UsageSpan, UserLimit
from tests.pool import builders as pool
from tests.quotas import build

pytestmark = pytest.mark.django_db(transaction=True)
T = datetime(2026, 6, 16, 6, 0, tzinfo=UTC)
RETRYABLE = {"code": "node_storage", "detail": "no space left", "retryable": True}
NOT_FREE = {"code": "gpu_not_free", "detail": "a process is on it", "retryable": True}


def at(minutes: float) -> set_clock:
    return set_clock(T + timedelta(minutes=minutes))


@pytest.fixture
def placed():
    """Two cards of an eight-card node, ordered to start at T for an hour."""
    team, h800 = build.department("vg"), build.flavour("h800", installed=None)
    with at(0):
        pool.node(h800)
        build.limits(team, h800, 4)
        pool.queued(team, h800, 2)
        schedule_cycle()
    return Allocation.objects.get()


def used() -> int:
    return QuotaUsage.objects.get().direct


def kinds(allocation):
    return list(allocation.events.order_by("id").values_list("kind", flat=True))


def orders(kind):
    return AgentCommand.objects.filter(kind=kind).count()


def test_the_whole_life(placed):
    with at(2):
        pool.report_running(placed)
    placed.refresh_from_db()
    assert (placed.state, placed.started_at) == ("running", T + timedelta(minutes=2))
    assert placed.expires_at == T + timedelta(minutes=62)
    assert list(placed.request.events.order_by("id").values_list("kind", flat=True))[-1] == "started"
    with at(30):
        pool.report_ended(placed)
        placed.refresh_from_db()
        assert (placed.state, placed.end_reason, placed.exit_code) == ("stopping", "finished", 0)
        assert (used(), Lease.objects.filter(ended_at=None).count(), orders("check_free")) == (2000, 2, 1)
    with at(31):
        pool.report_free(placed)
    placed.refresh_from_db()
    assert (placed.state, placed.ended_at, used()) == ("ended", T + timedelta(minutes=31), 0)
    assert {(row.ended_at, row.started_at) for row in Lease.objects.all()} == {(T + timedelta(minutes=31), T)}
    assert {row.during.upper for row in LeaseSpan.objects.all()} == {T + timedelta(minutes=31)}
    placed.request.refresh_from_db()
    assert (placed.request.state, placed.request.end_reason) == ("ended", "finished")
    assert kinds(placed) == [
        "reserved",
        "member_running",
        "running",
        "member_exited",
        "stopping",
        "member_free",
        "ended",
    ]
    assert OutboxEvent.objects.filter(topic="pool.allocation_ended").count() == 1


def test_the_ledger_charges_from_the_lease_to_seen_free(placed):
    PriceRate.objects.create(
        flavour=placed.flavour, micro_per_gpu_hour=16_000_000, during=(T - timedelta(days=1), None)
    )
    with at(1):
        pool.report_running(placed)
    with at(30):
        pool.report_ended(placed)
        pool.report_free(placed)
    rows = LedgerEntry.objects.order_by("id")
    assert [(row.gpu_ms, row.amount_micro) for row in rows] == [(1_800_000, 8_000_000)] * 2


def test_reports_that_come_twice_or_late_change_nothing(placed):
    with at(1):
        pool.report_running(placed)
        pool.report_running(placed)
    with at(2):
        pool.report_ended(placed)
        pool.report_ended(placed)
        pool.report_running(placed)
    with at(3):
        pool.report_free(placed)
        pool.report_free(placed)
        assert allocation_finish(allocation_id=placed.pk) is False
    placed.refresh_from_db()
    assert (placed.state, used()) == ("ended", 0)
    assert len(kinds(placed)) == 7
    assert AuditEvent.objects.filter(action="allocation.ended").count() == 1


def test_a_task_delivered_twice_orders_one_start(placed):
    allocation_start(allocation_id=placed.pk)
    allocation_start(allocation_id=placed.pk)
    assert orders("start") == 1


def test_a_node_that_is_away_is_tried_again(placed):
    AgentCommand.objects.all().delete()
    Allocation.objects.update(state="reserved")
    Node.objects.update(last_heartbeat_at=T - timedelta(minutes=1))
    with at(0):
        assert allocation_start(allocation_id=placed.pk) is False
    placed.refresh_from_db()
    assert (placed.state, placed.error_code, placed.retry_at > T) == ("starting", "agent_away", True)
    with at(0):
        assert execution_reconcile()["starts"] == 0
    Node.objects.update(last_heartbeat_at=T + timedelta(minutes=2))
    with at(2):
        assert execution_reconcile()["starts"] == 1
    assert orders("start") == 1


def test_a_start_that_is_given_up_takes_its_reclaim_with_it(placed):
    """It was to be taken back before it ran: the ladder stands where the work stands, and ends as it ends."""
    case = ReclaimCase.objects.create(
        allocation=placed, cause="over_quota", noticed_at=T, grace_until=T + timedelta(hours=1)
    )
    with at(6):
        assert execution_reconcile()["given_up"] == 1
        case.refresh_from_db()
        assert (case.step, case.stop_sent_at, case.closed_at) == ("stopping", T + timedelta(minutes=6), None)
        pool.report_ended(placed)
        pool.report_free(placed)
    case.refresh_from_db()
    assert (case.step, case.closed_at) == ("freed", T + timedelta(minutes=6))


def test_a_start_that_nobody_confirms_goes_back_in_line(placed):
    """S146: what was held for a start that never came about is given back exactly once."""
    queued_at = placed.request.queued_at
    with at(6):
        assert execution_reconcile()["given_up"] == 1
        placed.refresh_from_db()
        assert (placed.state, placed.end_reason, placed.error_code) == (
            "stopping", "start_failed", "start_not_confirmed",
        )  # fmt: skip
        assert orders("stop") == 1
        pool.report_ended(placed)
        Node.objects.update(schedulable="cordoned")
        pool.report_free(placed)
    placed.request.refresh_from_db()
    assert (placed.request.state, placed.request.queued_at, used()) == ("queued", queued_at, 0)
    with at(7):
        pool.report_free(placed)
        assert execution_reconcile()["closed"] == 0
    assert used() == 0


def test_terminal_start_failure_ends_the_request(placed):
    AgentCommand.objects.all().delete()
    Allocation.objects.update(state="reserved")
    placed.request.__class__.objects.update(run_kind="image")
    with at(0):
        allocation_start(allocation_id=placed.pk)
    placed.refresh_from_db()
    assert (placed.state, placed.end_reason, placed.error_code) == (
        "ended",
        "start_failed",
        "image_not_supported",
    )
    placed.request.refresh_from_db()
    assert (placed.request.state, placed.request.end_reason, used()) == ("ended", "start_failed", 0)


def test_retryable_failure_of_the_node_requeues_three_times_at_most(placed):
    """S152: a place that cannot be taken is not tried for hours, and nothing is charged between the tries."""
    request = placed.request
    for attempt in range(4):
        current = Allocation.objects.exclude(state="ended").get()
        with at(attempt + 1):
            pool.report_ended(current, None, RETRYABLE, failed_start=True)
            pool.report_free(current)
            request.refresh_from_db()
            if attempt < 3:
                schedule_cycle()
    request.refresh_from_db()
    assert (request.state, request.end_reason) == ("ended", "start_failed")
    assert Allocation.objects.count() == 4
    assert used() == 0


def test_a_card_that_is_not_free_at_hand_over_is_cordoned_and_the_work_goes_elsewhere(placed):
    cards = list(Gpu.objects.filter(leases__allocation=placed).order_by("index"))
    busy = {cards[1].uuid: {"free": False, "reason": "processes", "procs": []}}
    with at(1):
        pool.report_ended(placed, None, {**NOT_FREE, "gpus": busy}, failed_start=True)
        placed.refresh_from_db()
        assert (placed.state, placed.end_reason) == ("ended", "start_failed")
        schedule_cycle()
    assert list(Gpu.objects.filter(cordoned=True).values_list("pk", flat=True)) == [cards[1].pk]
    assert Gpu.objects.get(pk=cards[1].pk).cordon_reason == "not free at hand-over: processes"
    assert Incident.objects.get(kind="gpu_not_free_at_start").subject_uid == cards[1].uid
    again = Allocation.objects.exclude(state="ended").get()
    taken = list(again.leases.order_by("gpu__index").values_list("gpu__index", flat=True))
    assert (again.request_id, taken) == (placed.request_id, [0, 2])
    assert (used(), Lease.objects.filter(ended_at=None).count()) == (2000, 2)


def test_a_start_that_was_confirmed_but_not_told_is_told_by_the_sweep(placed):
    with at(1):
        pool.report_running(placed)
        placed.request.events.filter(kind="started").delete()
    with at(2):
        assert execution_reconcile()["told"] == 1
        assert execution_reconcile()["told"] == 0
    assert placed.request.events.filter(kind="started").count() == 1


def test_failed_command_ends_with_its_code(placed):
    with at(1):
        pool.report_running(placed)
        pool.report_ended(placed, 3)
        pool.report_free(placed)
    placed.refresh_from_db()
    assert (placed.state, placed.end_reason, placed.exit_code) == ("ended", "failed", 3)


def test_busy_cards_are_not_given_on(placed):
    with at(1):
        pool.report_running(placed)
        pool.report_ended(placed)
        pool.report_free(placed, free=False)
    placed.refresh_from_db()
    assert (placed.state, used(), Lease.objects.filter(ended_at=None).count()) == ("stopping", 2000, 2)
    with at(2):
        AgentCommand.objects.filter(kind="check_free").update(acked_at=T)
        assert execution_reconcile()["looks"] == 1
        pool.report_free(placed)
    placed.refresh_from_db()
    assert placed.state == "ended"


def test_a_card_that_vanished_while_leased_does_not_hold_up_the_rest(placed):
    """Its job ended; the card is gone, so it can never be seen free: quota and request go on, the card
    stays held.
    """
    with at(1):
        pool.report_running(placed)
        pool.report_ended(placed, None)
        pool.report_free(placed, free=False)
    Gpu.objects.filter(leases__allocation=placed).update(condition="vanished")
    with at(5):
        assert execution_reconcile()["closed"] == 0
    with at(7):
        assert execution_reconcile()["closed"] == 1
    placed.refresh_from_db()
    assert (placed.state, used(), UsageSpan.objects.filter(ended_at=None).count()) == ("ended", 0, 0)
    assert {span.ended_at for span in UsageSpan.objects.all()} == {T + timedelta(minutes=1)}
    assert Lease.objects.filter(ended_at=None).count() == 2
    assert Incident.objects.get(kind="gpu_not_free").state == "open"
    with at(9):
        Gpu.objects.update(condition="ok")
        pool.report_free(placed)
    assert Lease.objects.filter(ended_at=None).count() == 0


class TestAskedByPeople:
    def test_release_by_the_holder(self, placed):
        with at(1):
            pool.report_running(placed)
        with at(5):
            allocations.allocation_release(acting_user=build.actor(placed.holder), allocation=placed)
        placed.refresh_from_db()
        assert (placed.state, placed.end_reason) == ("stopping", "released")
        stop = AgentCommand.objects.get(kind="stop")
        assert stop.payload == {"grace_s": 30, "signal": "SIGTERM"}
        case = ReclaimCase.objects.get()
        assert (case.cause, case.stop_sent_at, case.closed_at) == ("released", T + timedelta(minutes=5), None)
        with at(6):
            pool.report_ended(placed, None)
            pool.report_free(placed)
        case.refresh_from_db()
        placed.refresh_from_db()
        assert (placed.state, placed.end_reason) == ("ended", "released")
        assert (case.closed_at, case.seen_free_at) == (T + timedelta(minutes=6),) * 2

    def test_second_release_is_told_and_changes_nothing(self, placed):
        actor = build.actor(placed.holder)
        with at(1):
            allocations.allocation_release(acting_user=actor, allocation=placed)
            with pytest.raises(Conflict) as caught:
                allocations.allocation_release(acting_user=actor, allocation=placed)
        assert caught.value.code == "wrong_state"
        assert AuditEvent.objects.filter(action="allocation.stopped").count() == 1

    def test_strangers_may_not(self, placed):
        stranger = build.actor(build.user("mallory"))
        for act in (
            lambda: allocations.allocation_release(acting_user=stranger, allocation=placed),
            lambda: allocations.allocation_extend(acting_user=stranger, allocation=placed, extra_s=60),
            lambda: allocations.allocation_revoke(acting_user=stranger, allocation=placed, reason="mine now"),
        ):
            with pytest.raises(Refused):
                act()
        placed.refresh_from_db()
        assert (placed.state, placed.extensions, ReclaimCase.objects.count()) == ("starting", 0, 0)

    def test_administrator_revokes_with_a_reason(self, placed):
        admin = build.user("zhao")
        build.role(admin, "pool_admin")
        with pytest.raises(Invalid):
            allocations.allocation_revoke(acting_user=build.actor(admin), allocation=placed, reason=" ")
        allocations.allocation_revoke(acting_user=build.actor(admin), allocation=placed, reason="maintenance")
        placed.refresh_from_db()
        assert (placed.state, placed.end_reason) == ("stopping", "revoked")
        assert placed.events.get(kind="stopping").text == "maintenance"

    def test_checkpoint_gives_signal_and_grace(self, placed):
        placed.request.__class__.objects.update(checkpoint={"signal": "SIGUSR1", "seconds": 120})
        placed.refresh_from_db()
        allocations.allocation_release(acting_user=build.actor(placed.holder), allocation=placed)
        assert AgentCommand.objects.get(kind="stop").payload == {"grace_s": 120, "signal": "SIGUSR1"}

    def test_what_was_never_ordered_is_free_at_once(self, placed):
        Allocation.objects.update(state="reserved")
        AgentCommand.objects.all().delete()
        placed.refresh_from_db()
        allocations.allocation_release(acting_user=build.actor(placed.holder), allocation=placed)
        placed.refresh_from_db()
        assert (placed.state, used(), orders("stop")) == ("ended", 0, 0)

    def test_extend(self, placed):
        with at(0):
            pool.report_running(placed)
        placed.refresh_from_db()
        with at(10):
            allocations.allocation_extend(
                acting_user=build.actor(placed.holder), allocation=placed, extra_s=7200
            )
        placed.refresh_from_db()
        assert (placed.expires_at, placed.extensions) == (T + timedelta(hours=3), 1)

    @pytest.mark.parametrize("extra", [0, -1, 91 * 86400])
    def test_extend_by_nonsense(self, placed, extra):
        with pytest.raises(Invalid):
            allocations.allocation_extend(
                acting_user=build.actor(placed.holder), allocation=placed, extra_s=extra
            )

    def test_extend_past_the_longest_lease_carries_the_sum(self, placed):
        UserLimit.objects.create(user=placed.holder, longest_lease_s=7200)
        with pytest.raises(Blocked) as caught:
            allocations.allocation_extend(
                acting_user=build.actor(placed.holder), allocation=placed, extra_s=3601
            )
        assert caught.value.blocking == {"level": "user", "limit": 7200, "used": 0, "requested": 7201}

    def test_borrowed_cards_are_not_kept_while_their_owner_waits(self, placed):
        # Owners that take nothing back by themselves: then all that they have is that nobody holds on for longer.
        SchedulingPolicy.objects.create(name="no reclaim", values={"reclaim": False}, active=True)
        owner = build.department("owner")
        build.limits(placed.department, placed.flavour, 1)
        build.limits(owner, placed.flavour, 7)
        with at(1):
            pool.queued(owner, placed.flavour, 7)
            schedule_cycle()
            actor = build.actor(placed.holder)
            with pytest.raises(Conflict) as caught:
                allocations.allocation_extend(acting_user=actor, allocation=placed, extra_s=60)
            assert (caught.value.code, caught.value.extra) == ("others_wait", {"waiting": 1})
            build.limits(placed.department, placed.flavour, 2)
            allocations.allocation_extend(acting_user=actor, allocation=placed, extra_s=60)
        placed.refresh_from_db()
        assert placed.extensions == 1

    def test_extend_of_what_is_ending_is_refused(self, placed):
        allocations.allocation_release(acting_user=build.actor(placed.holder), allocation=placed)
        with pytest.raises(Conflict):
            allocations.allocation_extend(
                acting_user=build.actor(placed.holder), allocation=placed, extra_s=60
            )

    def test_suspended_people_lose_what_they_hold(self, placed):
        assert allocations.allocations_suspend(user_uid=str(placed.holder.uid), reason="left") == 1
        assert allocations.allocations_suspend(user_uid=str(placed.holder.uid)) == 0
        placed.refresh_from_db()
        assert (placed.state, placed.end_reason) == ("stopping", "suspended")


def test_a_stop_that_is_ignored_becomes_a_kill(placed):
    with at(1):
        pool.report_running(placed)
    with at(2):
        allocations.allocation_release(acting_user=build.actor(placed.holder), allocation=placed)
    with at(3):
        assert execution_reconcile()["stops"] == 0
    with at(4):
        AgentCommand.objects.filter(kind="stop").update(acked_at=T)
        assert execution_reconcile()["stops"] == 1
    stop = AgentCommand.objects.get(kind="stop")
    assert (stop.payload, stop.acked_at) == ({"grace_s": 0, "signal": "SIGKILL"}, None)
    assert ReclaimCase.objects.get().escalated_at == T + timedelta(minutes=4)


def test_reclaim_gives_notice_and_stops_after_it(placed):
    from pool.services.expiry import leases_sweep

    with at(1):
        pool.report_running(placed)
        allocations.allocation_reclaim(
            acting_user=SYSTEM, allocation=placed, cause="maintenance", rule="node_drain",
            grace_until=T + timedelta(minutes=30),
        )  # fmt: skip
    placed.refresh_from_db()
    assert placed.state == "running"
    with at(29):
        assert leases_sweep()["reclaimed"] == 0
    with at(30):
        assert leases_sweep()["reclaimed"] == 1
        assert leases_sweep()["reclaimed"] == 0
        placed.refresh_from_db()
        assert (placed.state, placed.end_reason) == ("stopping", "maintenance")
        pool.report_ended(placed, None)
        Node.objects.update(schedulable="draining")
        pool.report_free(placed)
    placed.request.refresh_from_db()
    assert placed.request.state == "queued"


def test_a_gang_ends_whole(placed):
    team, h800 = placed.department, placed.flavour
    with at(0):
        pool.node(h800)
        pool.node(h800)
        build.limits(team, h800, 30)
        pool.queued(team, h800, 8, nodes=2)
        schedule_cycle()
    gang = Allocation.objects.order_by("id").last()
    assert [member.number for member in gang.members.order_by("number")] == [0, 1]
    first, second = gang.members.select_related("node", "allocation").order_by("number")
    with at(1):
        from pool.services.member_reports import member_ended, member_running

        member_running(member=first, at=T, pid=1, account="lin")
        gang.refresh_from_db()
        assert gang.state == "starting"
        member_running(member=second, at=T + timedelta(seconds=9), pid=2, account="lin")
        gang.refresh_from_db()
        assert (gang.state, gang.started_at) == ("running", T + timedelta(seconds=9))
        member_ended(member=second, at=T, exit_code=1, signal=None, error=None, failed_start=False)
    gang.refresh_from_db()
    assert (gang.state, gang.end_reason) == ("stopping", "failed")
    assert (
        AgentCommand.objects.filter(kind="stop", allocation=gang).values_list("member", flat=True).get() == 0
    )
    with at(2):
        pool.report_ended(gang, None)
        pool.report_free(gang)
    gang.refresh_from_db()
    assert gang.state == "ended"
    assert QuotaUsage.objects.get(department=team).direct == 2000


def test_usage_and_entries_after_everything_ended(placed):
    with at(1):
        pool.report_running(placed)
        pool.report_ended(placed)
        pool.report_free(placed)
    assert UsageSpan.objects.filter(ended_at=None).count() == 0
    assert QueueEntry.objects.count() == 0
