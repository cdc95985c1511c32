"""What every executor must do, whatever carries the work: one suite over all of them.

An executor's tests subclass ``Conformance`` and give a fixture ``rig``: a cluster with at least one node of two free
cards, and the hands to break it. A fault that a system cannot have is named in ``Rig.cannot``: its test is left out,
openly. Nothing here sleeps: ``Rig.settle`` drives the outside system and the installation's looks until something
holds, or fails at a deadline.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from pool.executors.base import Executor, RetryableFailure, TerminalFailure, polled_executor
from pool.models import Allocation, AllocationEvent, AllocationMember, Cluster, Lease
from pool.services import stopping
from pool.services.execution import allocation_start, execution_reconcile
from pool.services.polling import cluster_poll
from portal.ops.actor import system

M = AllocationMember.State
A = Allocation.State
TESTER = system("test")


class Rig:
    """One outside system with a cluster in the database, and what can be done to it."""

    cluster: Cluster
    executor: Executor
    deadline_s: float = 120.0

    def member(self, command: str = "sleep 600", gpus: int = 1) -> AllocationMember:
        """A placed allocation of one member in state reserved, its request allocated, quota debited or not needed."""
        raise NotImplementedError

    def copies(self, member: AllocationMember) -> int:
        """How many runs of this member the outside system has now that are not over, asked past the executor."""
        raise NotImplementedError

    def finish(self, member: AllocationMember, code: int = 0) -> None:
        """Make the member's running work end by itself with this exit code."""
        raise NotImplementedError

    def lose_answer(self) -> None:
        """The next start is done there, but its answer never comes: the call raises ``RetryableFailure``."""
        raise NotImplementedError

    def refuse(self) -> None:
        """The next start is refused for good."""
        raise NotImplementedError

    def away(self) -> None:
        """The outside system does not answer until ``back``."""
        raise NotImplementedError

    def back(self) -> None:
        """It answers again."""
        raise NotImplementedError

    def slow(self) -> None:
        """It takes what it is sent, and answers later than anybody here waits, until ``fast``."""
        raise NotImplementedError

    def fast(self) -> None:
        """It answers in time again; what it took meanwhile it may still do."""
        raise NotImplementedError

    def restart(self) -> None:
        """Its control part is killed and started again; work that runs goes on."""
        raise NotImplementedError

    def forget(self, member: AllocationMember) -> None:
        """It loses the member's work without a trace, and the work ends."""
        raise NotImplementedError

    def drive(self) -> None:
        """One step of whatever must be turned by hand (a stand-in kubelet, a simulated agent)."""

    def look(self) -> None:
        """One look of the installation."""
        self.drive()
        if polled_executor(self.cluster) is not None:
            cluster_poll(cluster_id=self.cluster.pk, nodes=True)

    def settle(self, holds: Callable[[], bool]) -> None:
        """Look until it holds."""
        until = time.monotonic() + self.deadline_s
        while not holds():
            if time.monotonic() > until:
                pytest.fail("it did not come to hold in time")
            self.look()
            time.sleep(0.05)

    def start(self, member: AllocationMember) -> bool:
        """Order the start as the scheduler's task does."""
        return allocation_start(allocation_id=member.allocation_id)


def state(member: AllocationMember) -> str:
    """The member's state now."""
    return str(AllocationMember.objects.values_list("state", flat=True).get(pk=member.pk))


def allocation(member: AllocationMember) -> Allocation:
    """Its allocation now."""
    return Allocation.objects.get(pk=member.allocation_id)


class Conformance:
    """The suite. Subclasses give ``rig``; the tests need a database that commits
    (``django_db(transaction=True)``)."""

    @pytest.fixture
    def rig(self) -> Rig:
        raise NotImplementedError

    def __init_subclass__(cls, cannot: frozenset[str] = frozenset()) -> None:
        """``cannot``: faults by name that this system cannot have (lost_answer, refuses, away, slow, restarts,
        forgets): they are no tests of it."""
        for name, test in vars(Conformance).items():
            if any(
                mark.name == "fault" and mark.args[0] in cannot for mark in getattr(test, "pytestmark", ())
            ):
                setattr(cls, name, None)

    def running(self, rig: Rig, command: str = "sleep 600") -> AllocationMember:
        member = rig.member(command)
        assert rig.start(member)
        rig.settle(lambda: state(member) == M.RUNNING)
        return member

    def ended(self, rig: Rig, member: AllocationMember) -> Allocation:
        rig.settle(lambda: allocation(member).state == A.ENDED)
        row = allocation(member)
        assert state(member) == M.FREE
        assert not Lease.objects.filter(allocation=row, ended_at=None).exists()
        assert rig.copies(member) == 0
        return row

    def test_a_sound_cluster_passes_its_check_and_shows_its_nodes(self, rig: Rig) -> None:
        assert [item for item in rig.executor.check(cluster=rig.cluster).findings if not item[1]] == []
        names = {found.name for found in rig.executor.discover(cluster=rig.cluster)}
        assert set(rig.cluster.nodes.values_list("name", flat=True)) <= names

    def test_runs_is_confirmed_ends_and_is_seen_free(self, rig: Rig) -> None:
        member = self.running(rig)
        assert allocation(member).state == A.RUNNING
        assert allocation(member).started_at is not None
        rig.finish(member, 0)
        row = self.ended(rig, member)
        assert (row.end_reason, row.exit_code) == (Allocation.EndReason.FINISHED, 0)

    def test_an_exit_code_is_kept(self, rig: Rig) -> None:
        member = self.running(rig)
        rig.finish(member, 3)
        row = self.ended(rig, member)
        assert (row.end_reason, row.exit_code) == (Allocation.EndReason.FAILED, 3)

    def test_started_twice_runs_once(self, rig: Rig) -> None:
        member = rig.member()
        rig.start(member)
        rig.start(member)
        rig.settle(lambda: state(member) == M.RUNNING)
        rig.start(member)
        rig.look()
        assert rig.copies(member) == 1

    @pytest.mark.fault("lost_answer")
    def test_an_answer_lost_after_success_starts_nothing_twice(self, rig: Rig) -> None:
        member = rig.member()
        rig.lose_answer()
        assert rig.start(member) is False
        assert allocation(member).state == A.STARTING
        assert rig.start(member)
        rig.settle(lambda: state(member) == M.RUNNING)
        assert rig.copies(member) == 1

    @pytest.mark.fault("refuses")
    def test_a_refusal_ends_it_with_its_code_and_frees_the_cards(self, rig: Rig) -> None:
        member = rig.member()
        rig.refuse()
        with pytest.raises(TerminalFailure) as refused:
            self.order(rig, member)
        rig.refuse()
        assert rig.start(member) is False
        row = self.ended(rig, member)
        assert (row.end_reason, row.error_code) == (Allocation.EndReason.START_FAILED, refused.value.code)

    @pytest.mark.fault("away")
    def test_away_is_retryable_concludes_nothing_and_goes_on_after(self, rig: Rig) -> None:
        runs = self.running(rig)
        waits = rig.member()
        rig.away()
        try:
            with pytest.raises(RetryableFailure):
                self.order(rig, waits)
            assert rig.start(waits) is False
            rig.look()
            assert (state(runs), allocation(runs).state) == (M.RUNNING, A.RUNNING)
            assert (state(waits), allocation(waits).state) == (M.RESERVED, A.STARTING)
        finally:
            rig.back()
        rig.settle(lambda: bool(rig.start(waits) or state(waits) == M.RUNNING) and state(waits) == M.RUNNING)
        assert (rig.copies(runs), rig.copies(waits)) == (1, 1)

    @pytest.mark.fault("slow")
    def test_answers_that_come_too_late_conclude_nothing_and_double_nothing(self, rig: Rig) -> None:
        runs = self.running(rig)
        waits = rig.member()
        rig.slow()
        try:
            assert rig.start(waits) is False
            rig.look()
            assert (state(runs), allocation(runs).state) == (M.RUNNING, A.RUNNING)
            assert (state(waits), allocation(waits).state) == (M.RESERVED, A.STARTING)
        finally:
            rig.fast()
        rig.settle(lambda: bool(rig.start(waits) or state(waits) == M.RUNNING) and state(waits) == M.RUNNING)
        # An order that came through late beside its repetition is taken back by the looks.
        rig.settle(lambda: (rig.copies(runs), rig.copies(waits)) == (1, 1))

    def test_a_stop_ends_it_and_a_second_one_changes_nothing(self, rig: Rig) -> None:
        member = self.running(rig)
        stopping.stop(acting_user=TESTER, allocation_id=member.allocation_id, cause="released", grace_s=5)
        fresh = AllocationMember.objects.select_related("node__cluster", "allocation__request").get(
            pk=member.pk
        )
        rig.executor.stop(member=fresh, grace_s=5)
        row = self.ended(rig, member)
        assert row.end_reason == Allocation.EndReason.RELEASED
        rig.executor.stop(member=fresh, grace_s=0, signal="SIGKILL")
        rig.look()
        assert allocation(member).version == row.version

    def test_work_that_ignores_the_signal_is_killed_after_its_grace(self, rig: Rig) -> None:
        member = self.running(rig, "trap '' TERM; while :; do sleep 0.2; done")
        stopping.stop(acting_user=TESTER, allocation_id=member.allocation_id, cause="revoked", grace_s=1)
        row = self.ended(rig, member)
        assert row.end_reason == Allocation.EndReason.REVOKED

    def test_stopped_before_it_was_ordered_nothing_ever_runs(self, rig: Rig) -> None:
        member = rig.member()
        stopping.stop(acting_user=TESTER, allocation_id=member.allocation_id, cause="released")
        assert rig.start(member) is False
        self.ended(rig, member)

    def test_stopped_right_after_it_was_ordered(self, rig: Rig) -> None:
        member = rig.member()
        rig.start(member)
        stopping.stop(acting_user=TESTER, allocation_id=member.allocation_id, cause="released", grace_s=1)
        row = self.ended(rig, member)
        assert row.end_reason == Allocation.EndReason.RELEASED

    @pytest.mark.fault("forgets")
    def test_work_that_vanished_goes_back_in_line(self, rig: Rig) -> None:
        member = self.running(rig)
        rig.forget(member)
        row = self.ended(rig, member)
        assert row.end_rule == "requeue"
        # In line at its old place, or placed again already.
        assert row.request.state in ("queued", "allocated")

    @pytest.mark.fault("restarts")
    def test_a_restart_over_there_changes_nothing(self, rig: Rig) -> None:
        member = self.running(rig)
        rig.restart()
        rig.settle(lambda: rig.executor.check(cluster=rig.cluster).ok)
        rig.look()
        assert (state(member), rig.copies(member)) == (M.RUNNING, 1)

    def test_reports_that_come_twice_change_nothing(self, rig: Rig) -> None:
        member = self.running(rig)
        events = AllocationEvent.objects.filter(allocation=member.allocation_id).count()
        before = allocation(member).version
        for _ in range(3):
            rig.look()
            execution_reconcile()
        assert AllocationEvent.objects.filter(allocation=member.allocation_id).count() == events
        assert allocation(member).version == before

    def order(self, rig: Rig, member: AllocationMember) -> None:
        """The bare order to the executor, past the services."""
        fresh = AllocationMember.objects.select_related(
            "node__cluster", "allocation__request", "allocation__holder", "allocation__department"
        ).get(pk=member.pk)
        executor = polled_executor(rig.cluster)
        if executor is not None and "whole" in executor.can:
            executor.start_whole(members=[fresh])
        else:
            rig.executor.start(member=fresh)
