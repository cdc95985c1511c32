"""The reclaim ladder: each step once, stamped, told; hooks; withdrawing; what ends in the middle of it."""

from __future__ import annotations

import pytest

from pool.executors.base import TerminalFailure
from pool.models import AgentCommand, ReclaimCase
from pool.services import allocations
from pool.services.execution import execution_reconcile
from pool.services.hooks import hooks_repeat
from pool.services.ladder import case_begin, case_step, case_withdraw, checkpoint_reported
from portal.kernel.clock import now
from portal.kernel.errors import Conflict
from portal.ops.actor import SYSTEM
from portal.ops.models import AuditEvent, OutboxEvent
from quotas.models import QuotaUsage
from tests.pool import builders as pool
from tests.pool.reclaim import T, at, case_of, gone, kinds, moment, running, sweep
from tests.quotas import build

pytestmark = pytest.mark.django_db(transaction=True)
COMMAND = {"command": "save.sh", "seconds": 120}
SIGNAL = {"signal": "SIGUSR1", "seconds": 300}


@pytest.fixture
def team():
    with at(0):
        made = build.department("vg")
        h800 = build.flavour("h800", installed=None)
        pool.node(h800)
        build.limits(made, h800, 8)
        made.h800 = h800
    return made


def begun(team, grace_s=600, cause="preempted", **values):
    """Running work with a case of ten minutes' notice that begins at T."""
    with at(0):
        victim = running(team, team.h800, 2, **values)
        case_begin(
            acting_user=SYSTEM, allocation_id=victim.pk, cause=cause, rule="a_rule", grace_s=grace_s,
            figures={"over": 2000},
        )  # fmt: skip
    return victim


def told(topic):
    return OutboxEvent.objects.filter(topic=topic).count()


def orders(kind):
    return list(AgentCommand.objects.filter(kind=kind).order_by("id"))


def test_notice_grace_stop_seen_free_each_stamped_and_told_once(team):
    victim = begun(team)
    case = case_of(victim)
    assert (case.step, case.noticed_at, case.grace_until) == ("notice", T, moment(600))
    assert (case.rule, case.figures, case.requeue) == ("a_rule", {"over": 2000}, True)
    with at(599):
        assert sweep() == {"hooks": 0, "stopped": 0, "withdrawn": 0}
        victim.refresh_from_db()
        assert victim.state == "running"
    with at(600):
        assert sweep()["stopped"] == 1
        assert sweep()["stopped"] == 0
        assert case_step(case_id=case.pk) == ""
    victim.refresh_from_db()
    case.refresh_from_db()
    assert (victim.state, victim.end_reason, case.step, case.stop_sent_at) == (
        "stopping", "preempted", "stopping", moment(600),
    )  # fmt: skip
    assert QuotaUsage.objects.get().direct == 2000
    with at(640):
        gone(victim)
    case.refresh_from_db()
    assert (case.step, case.stopped_at, case.seen_free_at, case.closed_at) == (
        "freed", moment(640), moment(640), moment(640),
    )  # fmt: skip
    assert QuotaUsage.objects.get().direct == 0
    victim.request.refresh_from_db()
    assert (victim.request.state, victim.request.queued_at) == ("queued", T)
    assert [kind for kind in kinds(victim) if kind in ("reclaim_notice", "stopping", "ended")] == [
        "reclaim_notice", "stopping", "ended",
    ]  # fmt: skip
    assert (told("pool.allocation_reclaim"), told("pool.allocation_stopping"), told("pool.allocation_ended")) == (
        1, 1, 1,
    )  # fmt: skip


def test_a_command_hook_is_called_as_late_as_the_grace_allows_and_its_end_brings_the_stop(team):
    victim = begun(team, checkpoint=COMMAND)
    case = case_of(victim)
    assert (case.hook, case.hook_at, case.grace_until) == ("command", moment(480), moment(600))
    with at(479):
        assert sweep()["hooks"] == 0
    with at(480):
        assert sweep() == {"hooks": 1, "stopped": 0, "withdrawn": 0}
        assert sweep() == {"hooks": 0, "stopped": 0, "withdrawn": 0}
    (order,) = orders("checkpoint")
    case.refresh_from_db()
    assert (case.step, case.checkpoint_at) == ("checkpoint", moment(480))
    assert order.payload == {
        "case": str(case.uid), "kind": "command", "signal": "SIGUSR1", "run": "save.sh", "seconds": 120.0,
    }  # fmt: skip
    with at(500):
        assert checkpoint_reported(case_id=case.pk, member=0, ok=True, exit_code=0) is True
        assert checkpoint_reported(case_id=case.pk, member=0, ok=True, exit_code=0) is False
    case.refresh_from_db()
    victim.refresh_from_db()
    assert (case.step, case.checkpoint_done_at, case.stop_sent_at) == ("stopping", moment(500), moment(500))
    assert [stop.payload for stop in orders("stop")] == [{"grace_s": 30, "signal": "SIGTERM"}]
    assert kinds(victim).count("checkpoint_asked") == kinds(victim).count("checkpoint_done") == 1


def test_a_hook_that_never_answers_delays_nothing(team):
    victim = begun(team, checkpoint=COMMAND)
    with at(480):
        sweep()
    with at(599):
        assert sweep()["stopped"] == 0
    with at(600):
        assert sweep()["stopped"] == 1
    victim.refresh_from_db()
    assert victim.state == "stopping"


def test_a_short_grace_is_never_shorter_than_the_checkpoint(team):
    victim = begun(team, grace_s=10, checkpoint=SIGNAL)
    case = case_of(victim)
    assert (case.step, case.grace_until, len(orders("checkpoint"))) == ("checkpoint", moment(300), 1)


def test_a_hook_that_is_late_still_gets_all_its_seconds(team):
    """The clock jumped, or no worker was there: work that nobody asked to save itself is not stopped."""
    victim = begun(team, checkpoint=COMMAND)
    with at(90_000):
        assert sweep() == {"hooks": 1, "stopped": 0, "withdrawn": 0}
        case = case_of(victim)
        assert case.grace_until == moment(90_120)
    with at(90_120):
        assert sweep()["stopped"] == 1


def test_the_clock_that_jumps_back_undoes_and_repeats_nothing(team):
    victim = begun(team, checkpoint=COMMAND)
    with at(480):
        sweep()
    with at(-3600):
        assert sweep() == {"hooks": 0, "stopped": 0, "withdrawn": 0}
        assert hooks_repeat(now()) == 0
    assert len(orders("checkpoint")) == 1
    assert case_of(victim).step == "checkpoint"


def refusing(monkeypatch, detail="not offered there"):
    """Executors that cannot call hooks, as those of outside systems."""

    def refuse(self, *, member, order):
        raise TerminalFailure("checkpoint_not_possible", detail)

    monkeypatch.setattr("pool.executors.agent.executor.AgentExecutor.checkpoint", refuse)


def test_where_no_command_can_be_run_that_is_said_and_the_grace_runs_on(team, monkeypatch):
    refusing(monkeypatch)
    victim = begun(team, checkpoint=COMMAND)
    with at(480):
        sweep()
    case = case_of(victim)
    assert (case.step, case.checkpoint_done_at) == ("checkpoint", None)
    (event,) = victim.events.filter(kind="checkpoint_failed")
    assert event.facts["detail"] == "not offered there"
    with at(490):
        assert hooks_repeat(now()) == 0
    assert victim.events.filter(kind="checkpoint_failed").count() == 1
    with at(600):
        assert sweep()["stopped"] == 1


def test_a_signal_that_only_the_stop_can_carry_goes_out_with_it_and_all_its_seconds(team, monkeypatch):
    refusing(monkeypatch)
    victim = begun(team, checkpoint=SIGNAL)  # 300 s of the ten minutes are its
    with at(300):
        sweep()
    case = case_of(victim)
    victim.refresh_from_db()
    assert (case.step, victim.state) == ("stopping", "stopping")
    assert victim.grace_until == moment(600)
    (order,) = orders("stop")
    assert (order.payload["signal"], order.payload["grace_s"]) == ("SIGUSR1", 300)
    assert kinds(victim).count("checkpoint_with_stop") == 1
    assert "checkpoint_failed" not in kinds(victim)


def test_a_hook_whose_order_was_lost_is_called_again(team):
    victim = begun(team, checkpoint=COMMAND)
    with at(480):
        sweep()
        AgentCommand.objects.filter(kind="checkpoint").delete()
    with at(484):
        assert hooks_repeat(now()) == 0
    with at(486):
        assert hooks_repeat(now()) == 1
        assert hooks_repeat(now()) == 0
    assert [order.payload["seconds"] for order in orders("checkpoint")] == [114.0]
    assert case_of(victim).step == "checkpoint"


def test_an_end_after_the_checkpoint_signal_goes_back_in_line_whatever_its_exit_code(team):
    victim = begun(team, checkpoint=SIGNAL, grace_s=0)
    with at(100):
        gone(victim, 0)
    victim.request.refresh_from_db()
    assert (victim.state, victim.end_reason, victim.request.state) == ("ended", "preempted", "queued")
    assert case_of(victim).stop_sent_at is None


def test_work_that_finishes_during_the_notice_is_finished(team):
    victim = begun(team)
    with at(100):
        gone(victim, 0)
    victim.request.refresh_from_db()
    assert (victim.end_reason, victim.request.state, case_of(victim).step) == ("finished", "ended", "freed")


def test_work_that_finishes_while_its_command_hook_runs_is_finished(team):
    victim = begun(team, checkpoint=COMMAND, grace_s=0)
    with at(50):
        gone(victim, 0)
    victim.request.refresh_from_db()
    assert (victim.end_reason, victim.request.state) == ("finished", "ended")


def test_withdrawn_during_the_notice_it_goes_on_as_if_nothing_had_been(team):
    victim = begun(team)
    case = case_of(victim)
    with at(30):
        assert case_withdraw(acting_user=SYSTEM, case_id=case.pk, why="not_needed") is True
        assert case_withdraw(acting_user=SYSTEM, case_id=case.pk, why="not_needed") is False
    with at(700):
        assert sweep() == {"hooks": 0, "stopped": 0, "withdrawn": 0}
    case.refresh_from_db()
    victim.refresh_from_db()
    assert (case.step, case.withdrawn_why, case.closed_at) == ("withdrawn", "not_needed", moment(30))
    assert (victim.state, len(orders("stop")), told("pool.reclaim_withdrawn")) == ("running", 0, 1)


def test_withdrawn_during_the_checkpoint_its_order_is_cancelled(team):
    victim = begun(team, checkpoint=COMMAND, grace_s=0)
    case = case_of(victim)
    with at(10):
        assert case_withdraw(acting_user=SYSTEM, case_id=case.pk, why="not_needed") is True
        assert checkpoint_reported(case_id=case.pk, member=0, ok=True) is False
    (order,) = orders("checkpoint")
    assert order.cancelled_at == moment(10)
    with at(500):
        sweep()
    victim.refresh_from_db()
    assert victim.state == "running"


def test_what_is_being_stopped_cannot_be_withdrawn(team):
    victim = begun(team, grace_s=0)
    case = case_of(victim)
    assert case.step == "stopping"
    with at(1):
        assert case_withdraw(acting_user=SYSTEM, case_id=case.pk, why="not_needed") is False
    case.refresh_from_db()
    assert (case.step, case.closed_at) == ("stopping", None)


def test_the_earlier_stop_wins_with_its_cause(team):
    victim = begun(team, cause="idle")
    with at(10):
        later = case_begin(
            acting_user=SYSTEM, allocation_id=victim.pk, cause="maintenance", rule="w", grace_s=3600
        )
        assert (later.cause, later.grace_until) == ("idle", moment(600))
        sooner = case_begin(
            acting_user=SYSTEM, allocation_id=victim.pk, cause="maintenance", rule="w", grace_s=60
        )
    assert (sooner.pk, sooner.cause, sooner.rule, sooner.grace_until, sooner.requeue) == (
        later.pk, "maintenance", "w", moment(70), True,
    )  # fmt: skip
    assert ReclaimCase.objects.count() == 1
    assert told("pool.allocation_reclaim") == 2


def test_its_holder_may_give_it_back_during_the_notice(team):
    victim = begun(team)
    with at(100):
        allocations.allocation_release(acting_user=build.actor(victim.holder), allocation=victim)
        gone(victim)
    victim.request.refresh_from_db()
    case = case_of(victim)
    assert (victim.end_reason, victim.request.state) == ("released", "ended")
    assert (case.step, case.requeue, case.stop_sent_at) == ("freed", False, moment(100))


def test_a_release_calls_a_command_hook_first_and_a_second_one_stops_at_once(team):
    with at(0):
        mine = running(team, team.h800, 1, checkpoint=COMMAND)
        who = build.actor(mine.holder)
        allocations.allocation_release(acting_user=who, allocation=mine)
    mine.refresh_from_db()
    assert (mine.state, case_of(mine).step, told("pool.allocation_reclaim")) == ("running", "checkpoint", 0)
    with at(5):
        allocations.allocation_release(acting_user=who, allocation=mine)
        with pytest.raises(Conflict) as refused:
            allocations.allocation_release(acting_user=who, allocation=mine)
    mine.refresh_from_db()
    assert (mine.state, mine.end_reason, refused.value.code) == ("stopping", "released", "wrong_state")


def test_expiry_calls_the_hook_and_stops_when_it_is_through(team):
    from pool.services.expiry import leases_sweep

    with at(0):
        mine = running(team, team.h800, 1, checkpoint=COMMAND, duration_s=3600)
    with at(3600):
        assert leases_sweep()["expired"] == 1
        assert leases_sweep() == {"expired": 0, "reclaimed": 0, "warned": 0}
    mine.refresh_from_db()
    assert (mine.state, case_of(mine).cause, case_of(mine).step) == ("running", "expired", "checkpoint")
    with at(3720):
        assert leases_sweep()["reclaimed"] == 1
    mine.refresh_from_db()
    assert (mine.state, mine.end_reason) == ("stopping", "expired")


def test_work_that_did_not_begin_yet_is_not_waited_for(team):
    with at(0):
        request = pool.queued(team, team.h800, 1, checkpoint=COMMAND)
        from pool.services.cycle import schedule_cycle

        schedule_cycle()
        starting = request.allocations.get()
        case_begin(acting_user=SYSTEM, allocation_id=starting.pk, cause="preempted", rule="r", grace_s=600)
    starting.refresh_from_db()
    assert (starting.state, len(orders("checkpoint"))) == ("stopping", 0)


def test_a_member_lost_in_the_middle_of_a_start_that_is_taken_back(team):
    """The node of work that starts is lost while it is under notice: lost wins, it goes back in line."""
    from pool.services.node_watch import node_lost_stop

    victim = begun(team)
    node = victim.members.select_related("node").get().node
    with at(60):
        node_lost_stop(node=node, allocation_id=victim.pk, at=now())
    victim.refresh_from_db()
    case = case_of(victim)
    assert (victim.state, victim.end_reason, case.step, case.requeue) == (
        "stopping",
        "node_lost",
        "stopping",
        True,
    )
    assert ReclaimCase.objects.count() == 1


def test_a_fenced_case_says_that_it_was_not_seen_free(team):
    from datetime import timedelta

    from pool.models import Node
    from pool.services.node_watch import FENCE_AFTER, nodes_sweep

    victim = begun(team)
    Node.objects.update(last_heartbeat_at=T)
    with at(130):
        nodes_sweep()
    with at(130 + FENCE_AFTER / timedelta(seconds=1) + 1):
        nodes_sweep()
    victim.refresh_from_db()
    case = case_of(victim)
    assert (victim.state, case.step, case.seen_free_at) == ("ended", "fenced", None)
    victim.request.refresh_from_db()
    assert (victim.request.state, victim.request.queued_at, QuotaUsage.objects.get().direct) == (
        "queued",
        T,
        0,
    )


def test_a_stop_that_is_ignored_is_escalated_on_its_case(team):
    victim = begun(team, grace_s=0)
    with at(200):
        AgentCommand.objects.filter(kind="stop").update(acked_at=T)
        assert execution_reconcile()["stops"] == 1
    assert case_of(victim).escalated_at == moment(200)


def test_every_step_is_in_the_audit(team):
    victim = begun(team)
    with at(600):
        sweep()
        gone(victim)
    actions = list(
        AuditEvent.objects.filter(action__startswith="allocation.")
        .order_by("id")
        .values_list("action", flat=True)
    )
    assert actions == [
        "allocation.reserved", "allocation.reclaim_noticed", "allocation.stopped", "allocation.ended",
    ]  # fmt: skip
