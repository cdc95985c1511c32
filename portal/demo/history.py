"""The demo's second stage, behind the running site: telemetry first, then lives by the real services, then
the closed months. Stopped at any point, the next run goes on where it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import date, datetime, timedelta
from typing import Any

import structlog
from django.db import OperationalError, connection

from monitoring.models import BuiltDay, CardSpan
from monitoring.services.card_states import card_states_sweep
from monitoring.services.day_sums import days_sum
from portal.accounts.models import Department, User
from portal.demo import cast
from portal.demo.first import anchor, ask, is_seeded
from portal.demo.lives import Stage, play
from portal.demo.story import Life, story
from portal.demo.telemetry import tracks, write_hours, write_raw
from portal.demo.waste import waste
from portal.kernel.clock import now, set_clock
from portal.kernel.errors import DomainError
from portal.kernel.locks import try_advisory_lock
from portal.kernel.units import micro_from_money
from portal.ops.actor import Actor
from portal.ops.services import task_run
from quotas.engine.billing import day_start, local_day
from quotas.models import Budget, CapacityRequest, GpuFlavour, LedgerMonth
from quotas.selectors.billing_time import billing_zone, month_of, next_month, previous_month
from quotas.services.budgets import budget_set, budgets_watch
from quotas.services.ledger import ledger_accrue
from quotas.services.months import month_close
from quotas.tasks_money import reconcile_books

log = structlog.get_logger(__name__)
NAME = "demo.history"

# What runs now: person, flavour, GPUs, hours, purpose; submitted when the history begins to be written
_NOW: tuple[tuple[str, str, int, int, str], ...] = (
    ("alex.meyer", "h800-80gb", 4, 12, "Tokenizer ablation, 1B"),
    ("yang.yang", "h800-80gb", 2, 11, "指令微调，代码与数学"),
    ("liu.yang", "a100-80gb", 1, 10, "运动一致性评测"),
    ("anna.schmidt", "a100-80gb", 3, 12, "Detector on night scenes"),
    ("emma.clark", "a100-80gb", 1, 8, "Affinity model"),
    ("sofia.rossi", "h20-96gb", 3, 12, "Quantized 70B, latency test"),
    ("omar.hassan", "l40s-48gb", 2, 6, "NCCL all-reduce benchmark"),
    ("lin.yue", "l40s-48gb", 2, 9, "VAE with 8× compression"),
    ("deng.chao", "l20-48gb", 2, 12, "召回模型批量推理"),
    ("feng.yu", "l20-48gb", 3, 12, "蛋白结构预测批任务"),
    ("tang.wei", "a30-24gb", 2, 12, "多目标跟踪评测"),
    ("huang.lei", "a30-24gb", 1, 7, "排序模型增量训练"),
)


def fill(*, say: Callable[[str], Any] = print) -> bool:
    """Write what is missing; False when nothing was, or when another process is at it."""
    if not is_seeded():
        raise RuntimeError("the first stage comes first")
    with try_advisory_lock(NAME) as got:
        if not got:
            return False
        with task_run(NAME) as facts:
            return _fill(say, facts)


def _fill(say: Callable[[str], Any], facts: dict[str, Any]) -> bool:
    begun = anchor()
    lives = story(begun)
    there = set(
        CapacityRequest.objects.filter(client_token__startswith="demo-").values_list(
            "client_token", flat=True
        )
    )
    missing = [life for life in lives if life.token not in there]
    if not missing:
        return False
    if len(missing) == len(lives):
        _running_now()
    _budgets(begun)
    found = tracks(lives)
    facts["raw"] = write_raw(found, begun)
    facts["hours"] = write_hours(found, begun)
    say(f"demo: telemetry of {len(found)} cards and slices written")
    refused = _lives(missing, begun, say)
    facts["refused"] = dict(refused)
    ledger_accrue()
    _fleet_past(begun)
    _close_months(begun)
    reconcile_books()
    budgets_watch()
    waste()
    return True


def _fleet_past(begun: datetime) -> None:
    """The fleet stood there all the time: the states of its cards, and the sums of days that reports read."""
    card_states_sweep()
    zone = billing_zone()
    first = day_start(local_day(begun - timedelta(days=cast.DAYS), zone), zone)
    known = set(CardSpan.objects.filter(started_at__lte=first).values_list("gpu_id", flat=True))
    earliest: dict[int, CardSpan] = {}
    for span in CardSpan.objects.exclude(gpu_id__in=known).order_by("started_at"):
        earliest.setdefault(span.gpu_id, span)
    CardSpan.objects.bulk_create(
        CardSpan(
            gpu_id=span.gpu_id,
            state=CardSpan.State.OK,
            flavour_id=span.flavour_id,
            site_code=span.site_code,
            node_name=span.node_name,
            started_at=first,
            ended_at=span.started_at,
        )
        for span in earliest.values()
    )
    BuiltDay.objects.filter(local_day__lt=local_day(now(), zone)).delete()
    days_sum(limit=cast.DAYS + 2)


def _budgets(begun: datetime) -> None:
    """What departments may spend: months from the begin of the history to the next one, and this quarter."""
    if Budget.objects.exists():
        return
    finance = Actor(user=User.objects.get(username="sun.mei"), via="page")
    departments = {d.code: d for d in Department.objects.without_tree_fields()}
    present = month_of(begun)
    quarter = present.replace(month=3 * ((present.month - 1) // 3) + 1)
    with set_clock(begun - timedelta(days=cast.DAYS)):
        for code, (monthly, quarterly) in cast.BUDGETS.items():
            month = month_of(now())
            while month <= next_month(present):
                _budget(finance, departments[code], Budget.Period.MONTH, month, monthly)
                month = next_month(month)
            if quarterly is not None:
                _budget(finance, departments[code], Budget.Period.QUARTER, quarter, quarterly)


def _budget(finance: Actor, department: Department, period: str, starts_on: date, amount: str) -> None:
    budget_set(
        acting_user=finance,
        department=department,
        period=period,
        starts_on=starts_on,
        amount_micro=micro_from_money(amount),
        gpu_ms=None,
    )


def _running_now() -> None:
    """Requests that the scheduler places and the simulated agents run while the history is written."""
    flavours = {f.code: f for f in GpuFlavour.objects.all()}
    people = {u.username: u for u in User.objects.all()}
    for number, (person, code, gpus, hours, purpose) in enumerate(_NOW):
        token = f"demo-now-{number}"
        if CapacityRequest.objects.filter(client_token=token).exists():
            continue
        try:
            asked = ask(people[person], flavours[code], gpus, hours, purpose)
        except DomainError as error:
            log.warning("demo_request_refused", person=person, code=error.code)
            continue
        CapacityRequest.objects.filter(pk=asked.pk).update(client_token=token)


def _lives(missing: list[Life], begun: Any, say: Callable[[str], Any]) -> Counter[str]:
    stage = Stage.load(begun)
    # Whoever loses the last lives with a crash finds them missing and writes them.
    with connection.cursor() as cursor:
        cursor.execute("SET synchronous_commit = off")
    refused: Counter[str] = Counter()
    for number, life in enumerate(missing, start=1):
        code = _one(life, stage)
        if code:
            refused[code] += 1
            log.info("demo_life_refused", life=life.token, code=code)
        if number % 100 == 0:
            say(f"demo: {number} of {len(missing)} leases of the history written")
    return refused


def _one(life: Life, stage: Stage) -> str:
    for _attempt in range(3):
        try:
            return play(life, stage)
        except OperationalError:  # a deadlock with live work chose us: once more
            continue
    return "database_busy"


def _close_months(begun: Any) -> None:
    """Months before the last one are closed, as finance would have done on the fifth of the next."""
    first = month_of(begun - timedelta(days=cast.DAYS))
    last = previous_month(previous_month(month_of(now())))
    person = User.objects.get(username="sun.mei")
    month: date = first
    while month <= last:
        if not LedgerMonth.objects.filter(month=month).exclude(closed_at=None).exists():
            following = next_month(month)
            moment = now().replace(
                year=following.year, month=following.month, day=5, hour=2, minute=30, second=0, microsecond=0
            )
            try:
                with set_clock(min(moment, now())):
                    month_close(acting_user=Actor(user=person, via="page"), month=month)
            except DomainError as error:
                log.warning("demo_month_open", month=f"{month:%Y-%m}", code=error.code, **error.extra)
                return
        month = next_month(month)
