"""Thousands of random events through the real services, and what must hold after each of them.

GPUPOOL_MACHINE_EVENTS says how many (300 by default), GPUPOOL_MACHINE_SEED which other ones than by default. The
world is small on purpose, so that everybody is in everybody's way: twelve cards, four departments, one flavour.
"""

from __future__ import annotations

import logging
import os
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from unittest import mock

import pytest
from django.core.management import call_command
from django.db.models import Sum
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from pool import subscriptions
from pool.models import (
    Allocation,
    AllocationMember,
    KeptPlace,
    KeptSpan,
    Lease,
    LeaseSpan,
    MaintenanceWindow,
    Node,
    QueueEntry,
    ReclaimCase,
)
from pool.services import allocations
from pool.services.closing import allocation_finish
from pool.services.cycle import planner_reset, schedule_cycle
from pool.services.execution import allocation_start, execution_reconcile
from pool.services.expiry import leases_sweep
from pool.services.idle import IdleFinding, idle_findings_take, still_needed
from pool.services.keeps import keeps_settle
from pool.services.ladder import case_step, checkpoint_reported, ladder_sweep
from pool.services.maintenance import window_cancel, window_plan, windows_sweep
from pool.services.member_reports import member_ended, member_free, member_running
from pool.services.modes import mode_set
from pool.services.node_watch import nodes_sweep
from pool.services.surplus import departments_over, surplus_reclaim, surplus_settle
from portal.accounts.models import Department
from portal.kernel.clock import set_clock
from portal.kernel.errors import DomainError
from portal.ops.actor import SYSTEM
from portal.ops.models import OutboxEvent
from portal.ops.services.outbox import outbox_deliver
from quotas.models import CapacityRequest, QuotaUsage
from quotas.services.requests import request_withdraw
from quotas.services.usage import usage_recompute
from tests.pool import builders as pool
from tests.pool.reclaim import T
from tests.quotas import build

pytestmark = pytest.mark.django_db(transaction=True)
EVENTS = int(os.environ.get("GPUPOOL_MACHINE_EVENTS", "300"))
SEED = os.environ.get("GPUPOOL_MACHINE_SEED")
SHOW = "GPUPOOL_MACHINE_SHOW" in os.environ
STEPS = 150
ANY = range(10**6)
LIVE = ("reserved", "starting", "running")
BACK_OFF = timedelta(hours=1)
CHECKPOINTS: tuple[dict[str, Any], ...] = (
    {}, {}, {"signal": "SIGUSR1", "seconds": 60}, {"command": "save", "seconds": 120},
)  # fmt: skip


class Errors(logging.Handler):
    """What was only logged: a callback after commit that failed."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record.getMessage())


@dataclass(frozen=True)
class Event:
    """Something that may happen: how often among all, and what it may be called with."""

    weight: int
    function: Callable[..., None]
    choices: dict[str, Sequence[Any]]


HAPPENINGS: list[Event] = []


def event(weight: int = 2, **choices: Sequence[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register what may happen."""

    def made(function: Callable[..., None]) -> Callable[..., None]:
        HAPPENINGS.append(Event(weight, function, choices))
        return function

    return made


class World(RuleBasedStateMachine):
    """The pool, its people, and everything that may happen to it."""

    events: Counter[str] = Counter()
    refused: Counter[str] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.now, self.silent, self.step = T, set[int](), 0
        self.errors = Errors()
        logging.getLogger("django.db.backends.base").addHandler(self.errors)
        self.asked_reasons = False
        self.seen_cases: set[int] = set()
        call_command("flush", verbosity=0, interactive=False)
        planner_reset()
        # News make the planner look, as one worker would: once for many, and not always before the next event.
        self.news = False
        self.tasks = mock.patch.object(subscriptions.schedule_cycle, "apply_async", self._plan_later)
        self.tasks.start()
        with set_clock(self.now):
            left, right = build.department("left"), build.department("right")
            self.departments = [left, right, build.department("a", left), build.department("b", left)]
            self.h800 = build.flavour("h800", installed=None)
            self.nodes = [pool.node(self.h800, 4) for _ in range(3)]
            for where, guaranteed in zip(self.departments, (6, 6, 3, 2), strict=True):
                build.limits(where, self.h800, guaranteed)
            usage_recompute(flavour_id=self.h800.pk)

    def _plan_later(self, *_args: Any, **_kwargs: Any) -> None:
        self.news = True

    def teardown(self) -> None:
        self.tasks.stop()
        logging.getLogger("django.db.backends.base").removeHandler(self.errors)
        if SHOW:
            print(f"{sum(World.events.values())} events held")

    @rule(number=st.integers(0, 2**62))
    def something_happens(self, number: int) -> None:
        """One event, chosen by its weight; a service's refusal is an answer, not a failure."""
        self.step += 1
        luck = random.Random(f"{number} {self.step}")
        (happening,) = luck.choices(HAPPENINGS, [one.weight for one in HAPPENINGS])
        World.events[happening.function.__name__] += 1
        with set_clock(self.now):
            try:
                happening.function(
                    self, **{name: luck.choice(among) for name, among in happening.choices.items()}
                )
            except DomainError as error:
                World.refused[error.code] += 1
            if self.news and luck.random() < 0.5:
                self.news = False
                schedule_cycle()

    # -- choosing ----------------------------------------------------------------------------------------------

    def one(self, rows: Any, number: int) -> Any:
        """One of the rows, or None."""
        keys = list(rows.order_by("pk").values_list("pk", flat=True))
        return rows.get(pk=keys[number % len(keys)]) if keys else None

    def live(self, *states: str) -> Any:
        found = Allocation.objects.filter(flavour=self.h800, state__in=states or LIVE)
        return found.select_related("request", "holder")

    def members(self, *states: str) -> Any:
        found = AllocationMember.objects.filter(allocation__flavour=self.h800, state__in=states)
        return found.select_related("node", "allocation")

    # -- people ------------------------------------------------------------------------------------------------

    @event(
        12, where=ANY, gpus=[1, 1, 2, 4], nodes=[1, 1, 1, 2], priority=ANY,
        soft=range(5), hook=ANY, hours=[1, 4, 48],
    )  # fmt: skip
    def somebody_asks(self, where, gpus, nodes, priority, soft, hook, hours):
        if CapacityRequest.objects.filter(flavour=self.h800, state="queued").count() < 12:
            pool.queued(
                self.departments[1:][where % 3], self.h800, gpus, nodes=nodes, priority=priority % 3 * 25,
                interruptible=soft > 0, checkpoint=CHECKPOINTS[hook % len(CHECKPOINTS)], duration_s=hours * 3600,
            )  # fmt: skip

    @event(3, which=ANY)
    def who_waits_leaves(self, which):
        request = self.one(CapacityRequest.objects.filter(flavour=self.h800, state="queued"), which)
        if request is not None:
            policy = build.policy(request.requester)
            request_withdraw(acting_user=build.actor(request.requester), policy=policy, request=request)

    @event(which=ANY)
    def a_holder_gives_back(self, which):
        row = self.one(self.live(), which)
        if row is not None:
            allocations.allocation_release(acting_user=build.actor(row.holder), allocation=row)

    @event(which=ANY)
    def a_holder_still_needs_it(self, which):
        row = self.one(self.live("running"), which)
        if row is not None:
            still_needed(acting_user=build.actor(row.holder), allocation=row)

    @event(which=ANY, hours=range(1, 9))
    def a_holder_extends(self, which, hours):
        row = self.one(self.live("running"), which)
        if row is not None:
            allocations.allocation_extend(
                acting_user=build.actor(row.holder), allocation=row, extra_s=hours * 3600
            )

    # -- nodes -------------------------------------------------------------------------------------------------

    @event(14, which=ANY)
    def it_runs(self, which):
        for member in AllocationMember.objects.filter(
            allocation=self.one(self.live("starting", "reserved"), which), state__in=["reserved", "starting"]
        ).select_related("node", "allocation"):
            member_running(member=member, at=self.now, pid=1, account="lin")

    @event(3, which=ANY, code=[0, 0, 1, None])
    def it_ends(self, which, code):
        member = self.one(self.members("running", "starting"), which)
        if member is not None:
            member_ended(
                member=member, at=self.now, exit_code=code, signal=None, error=None, failed_start=False
            )

    @event(10, which=ANY)
    def what_was_stopped_ends(self, which):
        found = self.members("running", "starting", "reserved").filter(allocation__state="stopping")
        member = self.one(found, which)
        if member is not None:
            member_ended(
                member=member, at=self.now, exit_code=None, signal=15, error=None, failed_start=False
            )

    @event(12, which=ANY, free=range(4))
    def cards_are_looked_at(self, which, free):
        member = self.one(self.members("exited", "lost"), which)
        if member is not None and member.node_id not in self.silent:
            leases = Lease.objects.filter(allocation=member.allocation_id, member=member.number)
            found = {
                lease.gpu.uuid: {"free": free > 0, "reason": None if free else "processes", "procs": []}
                for lease in leases.select_related("gpu")
            }
            member_free(member=member, at=self.now, found=found)

    @event(5, which=ANY, ok=(True, False))
    def a_checkpoint_is_told(self, which, ok):
        case = self.one(ReclaimCase.objects.filter(step="checkpoint"), which)
        if case is not None:
            checkpoint_reported(case_id=case.pk, member=0, ok=ok)

    @event(which=ANY)
    def a_node_falls_silent(self, which):
        if len(self.silent) < 2:
            self.silent.add(self.nodes[which % 3].pk)

    @event(4)
    def silent_nodes_are_back(self):
        self.silent.clear()
        self._hearts()
        Node.objects.filter(pk__in=[node.pk for node in self.nodes]).update(health="ok")

    @event(which=ANY, to=["cordoned", "open", "open"])
    def a_node_is_cordoned_or_opened(self, which, to):
        Node.objects.filter(pk=self.nodes[which % 3].pk).exclude(schedulable="maintenance").update(
            schedulable=to
        )

    # -- administrators ----------------------------------------------------------------------------------------

    @event(where=ANY, guaranteed=range(9), cap=[None, None, 2, 6])
    def a_quota_changes(self, where, guaranteed, cap):
        build.limits(self.departments[where % 4], self.h800, guaranteed, hard_cap=cap)
        usage_recompute(flavour_id=self.h800.pk)
        surplus_settle()

    @event(where=ANY)
    def a_quota_is_removed(self, where):
        QuotaUsage.objects.filter(department=self.departments[where % 4], flavour=self.h800).update(
            guaranteed=0, hard_cap=None, granted=False
        )
        usage_recompute(flavour_id=self.h800.pk)

    @event(where=ANY)
    def a_department_moves(self, where):
        left, right, *below = self.departments
        child = below[where % 2]
        child.refresh_from_db()
        to = right if child.parent_id == left.pk else left
        Department.objects.filter(pk=child.pk).update(parent=to)
        usage_recompute(flavour_id=self.h800.pk)

    @event(where=ANY, mode=["pilot", "rollout", "enforce", "enforce", None])
    def a_mode_changes(self, where, mode):
        mode_set(acting_user=SYSTEM, department=self.departments[where % 4], mode=mode, reason="test")

    @event(hours=range(7), length=range(1, 5), which=ANY, notice=range(5))
    def maintenance_is_planned(self, hours, length, which, notice):
        if MaintenanceWindow.objects.filter(state__in=["planned", "announced", "running"]).count() < 2:
            start = self.now + timedelta(hours=hours)
            window_plan(
                acting_user=SYSTEM, title="t", reason="r", starts_at=start, ends_at=start + timedelta(hours=length),
                notice_s=notice * 3600, nodes=[self.nodes[which % 3]],
            )  # fmt: skip

    @event(which=ANY)
    def maintenance_is_called_off(self, which):
        window = self.one(
            MaintenanceWindow.objects.filter(state__in=["planned", "announced", "running"]), which
        )
        if window is not None:
            window_cancel(acting_user=SYSTEM, window=window, reason="r")

    @event(notice=[0, 600, 86_400])
    def a_surplus_is_taken_back(self, notice):
        for over in departments_over()[:1]:
            surplus_reclaim(
                acting_user=SYSTEM,
                department=over.department,
                flavour=over.flavour,
                reason="r",
                notice_s=notice,
            )

    @event(4, which=ANY, state=["idle", "idle", "busy", "unknown"])
    def monitoring_tells(self, which, state):
        row = self.one(self.live("running"), which)
        if row is not None:
            since = self.now - timedelta(hours=3) if state == "idle" else None
            idle_findings_take(findings=[IdleFinding(row.pk, state, since)])

    # -- time and workers --------------------------------------------------------------------------------------

    @event(12, seconds=[1, 10, 30, 60, 60, 300, 1800, 3700])
    def time_passes(self, seconds):
        self._clock(self.now + timedelta(seconds=seconds))

    @event(1, seconds=[-3600, -30, 3600, 86_400])
    def the_clock_jumps(self, seconds):
        self._clock(self.now + timedelta(seconds=seconds))

    def _clock(self, to: datetime) -> None:
        self.now = to
        with set_clock(to):
            self._hearts()
            self._sweeps()

    def _hearts(self) -> None:
        heard = [node.pk for node in self.nodes if node.pk not in self.silent]
        Node.objects.filter(pk__in=heard).update(last_heartbeat_at=self.now)

    def _sweeps(self) -> None:
        nodes_sweep()
        leases_sweep()
        windows_sweep()
        keeps_settle()
        surplus_settle()
        execution_reconcile()
        outbox_deliver()

    @event()
    def workers_sweep_twice(self):
        self._sweeps()
        self._sweeps()
        assert ladder_sweep() == {"hooks": 0, "stopped": 0, "withdrawn": 0}

    @event(which=ANY)
    def tasks_come_twice(self, which):
        row = self.one(Allocation.objects.filter(flavour=self.h800), which)
        case = self.one(ReclaimCase.objects.all(), which)
        for _ in range(2):
            if row is not None:
                allocation_start(allocation_id=row.pk)
                allocation_finish(allocation_id=row.pk)
            if case is not None:
                case_step(case_id=case.pk)

    @event(8)
    def the_scheduler_plans(self):
        outbox_deliver()
        self.news = False
        schedule_cycle()
        self.asked_reasons = True

    @event()
    def the_scheduler_restarts(self):
        planner_reset()
        schedule_cycle()

    # -- what must hold ----------------------------------------------------------------------------------------

    @invariant()
    def nothing_failed_unseen(self):
        assert self.errors.seen == []
        assert not OutboxEvent.objects.exclude(last_error="").exists()

    @invariant()
    def used_is_what_open_leases_say(self):
        booked: Counter[int] = Counter()
        rows = Allocation.objects.filter(flavour=self.h800, quota_debited=True, quota_released_at=None)
        charges = dict(
            Lease.objects.filter(allocation__in=rows, ended_at=None)
            .values_list("allocation")
            .annotate(n=Sum("charge"))
        )
        for row in rows:
            assert row.charge_milli == charges.get(row.pk, 0), row
            booked[row.department_id] += row.charge_milli
        for usage in QuotaUsage.objects.filter(flavour=self.h800):
            assert usage.direct == booked[usage.department_id], usage

    @invariant()
    def no_card_is_given_twice(self):
        charges = Counter[int]()
        for gpu_id, charge in Lease.objects.filter(ended_at=None).values_list("gpu_id", "charge"):
            charges[gpu_id] += charge
        assert all(charge <= 1000 for charge in charges.values())
        taken: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for gpu_id, span in LeaseSpan.objects.filter(during__upper_inf=True).values_list("gpu_id", "span"):
            taken[gpu_id].append((span.lower, span.upper))
        for spans in taken.values():
            spans.sort()
            assert all(before[1] <= after[0] for before, after in zip(spans, spans[1:], strict=False))

    @invariant()
    def what_is_kept_is_kept_for_one_that_waits(self):
        held: dict[int, int] = Counter()
        for gpu_id in KeptSpan.objects.filter(ended_at=None).values_list("gpu_id", flat=True):
            held[gpu_id] += 1
        assert all(count == 1 for count in held.values())
        for kept in KeptPlace.objects.filter(ended_at=None):
            assert kept.spans.filter(ended_at=None).exists()

    @invariant()
    def cases_and_allocations_agree(self):
        for case in ReclaimCase.objects.filter(allocation__flavour=self.h800).select_related("allocation"):
            state = case.allocation.state
            if case.closed_at is None:
                assert state != "ended", case
                assert (case.step == "stopping") == (state == "stopping") or bool(case.members), case
                if case.step == "stopping" and case.stop_sent_at is not None and case.noticed_at is not None:
                    assert case.requeue == (case.allocation.end_rule == "requeue"), case
            elif case.step == "withdrawn":
                assert case.stop_sent_at is None and case.withdrawn_why, case
        ended = Allocation.objects.filter(flavour=self.h800, state="ended")
        assert (
            not Lease.objects.filter(allocation__in=ended, ended_at=None, allocation__members__state="free")
            .exclude(allocation__members__fenced_at__isnull=False)
            .exists()
        )

    @invariant()
    def owners_lose_nothing_they_are_guaranteed(self):
        """Whoever is taken from for an owner was above its guarantee when that was decided."""
        fresh = (
            ReclaimCase.objects.filter(cause="preempted", allocation__flavour=self.h800, closed_at=None)
            .exclude(pk__in=self.seen_cases)
            .select_related("allocation")
        )
        for case in fresh:
            self.seen_cases.add(case.pk)
            if case.figures.get("kind") != "reclaim" or case.noticed_at != self.now:
                continue
            usage = QuotaUsage.objects.get(department=case.allocation.department_id, flavour=self.h800)
            assert usage.total > usage.guaranteed, (case, usage.total, usage.guaranteed)

    @invariant()
    def who_waits_is_told_why(self):
        if self.asked_reasons:
            self.asked_reasons = False
            waiting = CapacityRequest.objects.filter(flavour=self.h800, state="queued")
            told = QueueEntry.objects.filter(request__in=waiting).exclude(reason="")
            assert set(waiting.values_list("pk", flat=True)) == set(told.values_list("request_id", flat=True))

    @invariant()
    def nobody_plays_ping_pong(self):
        """After three displacements a request is left alone for an hour."""
        moments: dict[int, list[datetime]] = defaultdict(list)
        rows = ReclaimCase.objects.filter(cause="preempted", allocation__flavour=self.h800)
        for request_id, at in (
            rows.exclude(step="withdrawn").order_by("id").values_list("allocation__request_id", "noticed_at")
        ):
            moments[request_id].append(at)
        for times in moments.values():
            for third, fourth in zip(times[2:], times[3:], strict=False):
                assert abs(fourth - third) >= BACK_OFF, times


def test_whatever_happens_the_sums_hold():
    """So many random events as asked for, in worlds of 150 events each."""
    World.events, World.refused = Counter(), Counter()
    if SEED is not None:
        seed(int(SEED))(World)
    run_state_machine_as_test(
        World,
        settings=settings(
            max_examples=-(-EVENTS // STEPS),
            stateful_step_count=STEPS,
            deadline=None,
            phases=[Phase.generate],
            derandomize=SEED is None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert sum(World.events.values()) >= EVENTS * 9 // 10  # a world may end a little sooner
    if SHOW:
        print(dict(World.events), dict(World.refused))
