"""A worker that is killed (kill -9) between or inside steps of the ladder: the next one goes on where it stood.

Real processes on the test's own PostgreSQL: what was not committed never was, what was is found by the sweep.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import connection

from pool.models import AgentCommand, ReclaimCase
from pool.services.closing import allocation_finish
from pool.services.execution import execution_reconcile
from pool.services.hooks import hooks_repeat
from pool.services.ladder import case_begin, case_step, case_withdraw, ladder_sweep
from portal.kernel.clock import now
from portal.ops.actor import SYSTEM
from portal.ops.models import AuditEvent, OutboxEvent
from quotas.models import QuotaUsage
from tests.database import database_url
from tests.pool import builders as pool
from tests.pool.reclaim import T, at, case_of, gone, kinds, moment, running, sweep
from tests.quotas import build

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.serial]
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def victim():
    """Two cards with a case of ten minutes and a command hook of two."""
    with at(0):
        team, h800 = build.department("vg"), build.flavour("h800", installed=None)
        pool.node(h800)
        build.limits(team, h800, 8)
        made = running(team, h800, 2, checkpoint={"command": "save.sh", "seconds": 120})
        case_begin(acting_user=SYSTEM, allocation_id=made.pk, cause="preempted", rule="r", grace_s=600)
    return made


def killed_at(place: str, number: int, seconds: float) -> None:
    """Let a worker of its own begin, and see it die at that place."""
    environment = dict(
        os.environ, DATABASE_URL=database_url(), DJANGO_SETTINGS_MODULE="portal.settings", GPUPOOL_ENV="test"
    )
    done = subprocess.run(
        [sys.executable, "-m", "tests.pool.ladder_worker", place, str(number), moment(seconds).isoformat()],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]


def orders(kind: str) -> int:
    return AgentCommand.objects.filter(kind=kind).count()


def test_killed_inside_a_step_nothing_of_it_was(victim: Any) -> None:
    case = case_of(victim)
    killed_at("in_step", case.pk, 480)
    case.refresh_from_db()
    assert (case.step, case.checkpoint_at, orders("checkpoint"), kinds(victim).count("checkpoint_asked")) == (
        "notice", None, 0, 0,
    )  # fmt: skip
    with at(485):
        assert sweep()["hooks"] == 1
    case.refresh_from_db()
    assert (case.step, case.checkpoint_at, orders("checkpoint")) == ("checkpoint", moment(485), 1)
    assert kinds(victim).count("checkpoint_asked") == 1


def test_killed_between_the_step_and_its_order_the_order_is_made_up_for(victim: Any) -> None:
    case = case_of(victim)
    killed_at("after_step", case.pk, 480)
    case.refresh_from_db()
    assert (case.step, orders("checkpoint")) == ("checkpoint", 0)
    with at(490):
        sweep()
        assert (hooks_repeat(now()), orders("checkpoint")) == (1, 1)
    with at(600):
        assert sweep()["stopped"] == 1
    assert OutboxEvent.objects.filter(topic="pool.reclaim_step").count() == 1


def test_killed_inside_and_right_after_the_stop(victim: Any) -> None:
    case = case_of(victim)
    with at(480):
        sweep()
    killed_at("in_stop", case.pk, 600)
    victim.refresh_from_db()
    assert (victim.state, case_of(victim).step, orders("stop")) == ("running", "checkpoint", 0)
    killed_at("after_stop", case.pk, 601)
    victim.refresh_from_db()
    assert (victim.state, case_of(victim).step, orders("stop")) == ("stopping", "stopping", 0)
    with at(605):
        assert execution_reconcile()["stops"] == 1
        gone(victim)
    assert (case_of(victim).step, orders("stop"), AuditEvent.objects.filter(action="allocation.stopped").count()) == (
        "freed", 1, 1,
    )  # fmt: skip


def test_p006_killed_while_it_closes_the_quota_is_released_exactly_once(victim: Any) -> None:
    """Behaviour P006: the quota of what was taken back is released once within one reconcile period."""
    with at(600):
        sweep()
    with at(720):
        sweep()
        victim.members.update(state="free", ended_at=now(), seen_free_at=now())
        pool.Node.objects.update(schedulable="cordoned")
    killed_at("in_finish", victim.pk, 730)
    victim.refresh_from_db()
    assert (victim.state, QuotaUsage.objects.get().direct, case_of(victim).step) == (
        "stopping",
        2000,
        "stopping",
    )
    with at(740):
        assert execution_reconcile()["closed"] == 1
        assert allocation_finish(allocation_id=victim.pk) is False
    victim.refresh_from_db()
    victim.request.refresh_from_db()
    assert (victim.state, QuotaUsage.objects.get().direct, case_of(victim).step) == ("ended", 0, "freed")
    assert victim.request.state == "queued"


def test_many_workers_step_withdraw_and_sweep_at_once_and_each_thing_happens_once(victim: Any) -> None:
    case = case_of(victim)
    barrier, answers = threading.Barrier(9), list[Any]()

    def work(index: int) -> None:
        from portal.kernel.clock import set_clock

        try:
            barrier.wait(30)
            with set_clock(T + timedelta(seconds=480)):
                if index % 3 == 0:
                    answers.append(
                        ("withdraw", case_withdraw(acting_user=SYSTEM, case_id=case.pk, why="test"))
                    )
                elif index % 3 == 1:
                    answers.append(("step", case_step(case_id=case.pk)))
                else:
                    answers.append(("sweep", ladder_sweep()["hooks"]))
        finally:
            connection.close()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(answers) == 9
    assert sum(1 for what, answer in answers if what == "withdraw" and answer) == 1
    hooks = sum(1 for what, answer in answers if what != "withdraw" and answer in ("hook", 1))
    assert hooks == kinds(victim).count("checkpoint_asked") <= 1
    assert ReclaimCase.objects.get().step == "withdrawn"
    assert OutboxEvent.objects.filter(topic="pool.reclaim_withdrawn").count() == 1
    victim.refresh_from_db()
    assert (victim.state, orders("stop")) == ("running", 0)
