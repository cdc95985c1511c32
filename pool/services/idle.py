"""What follows from idleness: a warning first, “still needed” in one click, then the ladder.

Monitoring finds out whether work is idle, busy, or not known (``monitoring.services.idleness``) and gives its
findings here. Missing data is unknown, never idle: it ends a warning as work does. By default only what a
department borrows is taken, longest idle first; modes decide whether it is taken or only advised.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from django.db import transaction
from django.db.models import F
from django.utils.translation import gettext_lazy as _

from pool.engine.ladder import Holder, Rules, idle_within_borrowed
from pool.locks import allocation_lock
from pool.models import Allocation, AllocationEvent, IdleWatch, ReclaimCase
from pool.selectors.reclaim import Modes
from pool.services.ladder import case_begin, case_withdraw
from pool.services.modes import advice_note
from pool.services.reclaim_rules import rules_active
from portal.kernel.clock import now
from portal.kernel.errors import Conflict, Refused
from portal.kernel.units import to_ms
from portal.ops.actor import Actor, system
from portal.ops.outbox import outbox_add
from portal.ops.services import audit_record
from quotas.engine.available import borrowed
from quotas.selectors.trees import quota_trees

MONITOR = system("idle watch")
State = IdleWatch.State
RULE = "idle_window"


@dataclass(frozen=True, slots=True)
class IdleFinding:
    """What monitoring knows of one running allocation: `idle` since a moment, `busy`, or `unknown`."""

    allocation_id: int
    state: str
    since: datetime | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)


def idle_findings_take(*, findings: Iterable[IdleFinding]) -> dict[str, int]:
    """Judge findings by the rules; returns how many were warned, begun, advised, and withdrawn."""
    at, rules = now(), rules_active()[1]
    done = {"warned": 0, "begun": 0, "advised": 0, "withdrawn": 0}
    idle: dict[int, IdleFinding] = {}
    for finding in findings:
        done["withdrawn"] += _note(finding, at)
        if finding.state == State.IDLE and finding.since is not None:
            idle[finding.allocation_id] = finding
    long_enough = _eligible(idle, at, rules)
    done["withdrawn"] += _forget_warnings(set(idle) - {row.pk for row in long_enough})
    modes = Modes.load()
    for allocation in long_enough:
        outcome = _judge(allocation, idle[allocation.pk], modes, rules, at)
        if outcome:
            done[outcome] += 1
    return done


def _note(finding: IdleFinding, at: datetime) -> bool:
    """Keep what is known; what is not idle any more loses its warning, and a case that idleness began."""
    if not Allocation.objects.filter(pk=finding.allocation_id, state=Allocation.State.RUNNING).exists():
        return False
    idle = finding.state == State.IDLE
    values: dict[str, Any] = {
        "state": finding.state,
        "idle_since": finding.since if idle else None,
        "judged_at": at,
        "evidence": dict(finding.evidence),
    }
    if not idle:
        values["warned_at"] = None
    IdleWatch.objects.update_or_create(allocation_id=finding.allocation_id, defaults=values)
    return False if idle else _withdraw(finding.allocation_id, f"idle_{finding.state}")


def _withdraw(allocation_id: int, why: str, actor: Actor = MONITOR) -> bool:
    case = ReclaimCase.objects.filter(
        allocation_id=allocation_id, closed_at=None, cause=ReclaimCase.Cause.IDLE
    ).first()
    return case is not None and case_withdraw(acting_user=actor, case_id=case.pk, why=why)


def _eligible(idle: Mapping[int, IdleFinding], at: datetime, rules: Rules) -> list[Allocation]:
    """Those that have been idle for the whole window and, unless everybody's may be taken, are borrowed."""
    window = timedelta(seconds=rules.idle_window_s)
    rows = [
        row
        for row in Allocation.objects.filter(pk__in=idle, state=Allocation.State.RUNNING)
        .select_related("request", "holder", "idle_watch")
        .order_by("id")
        if at - _since(row, idle[row.pk]) >= window
        and (row.idle_watch.excused_until is None or row.idle_watch.excused_until <= at)
    ]
    if rules.idle_everybody:
        return rows
    trees = quota_trees(sorted({row.flavour_id for row in rows if row.flavour_id is not None}))
    groups: dict[tuple[int, int], list[Allocation]] = {}
    for row in rows:
        if row.flavour_id is not None:
            groups.setdefault((row.department_id, row.flavour_id), []).append(row)
    kept: set[int] = set()
    for (department_id, flavour_id), members in groups.items():
        tree = trees.get(flavour_id)
        above = borrowed(tree, department_id) if tree is not None and department_id in tree.nodes else 0
        holders = [Holder(row.pk, row.charge_milli, to_ms(_since(row, idle[row.pk]))) for row in members]
        kept.update(idle_within_borrowed(holders, above))
    return [row for row in rows if row.pk in kept]


def _since(row: Allocation, finding: IdleFinding) -> datetime:
    """Idle since then; what was before its last start counts for another."""
    assert finding.since is not None
    return max(finding.since, row.started_at) if row.started_at is not None else finding.since


def _forget_warnings(allocation_ids: set[int]) -> int:
    """Work that is idle but no longer to be taken (within its guarantee again, excused) is not warned any more."""
    IdleWatch.objects.filter(allocation_id__in=allocation_ids, warned_at__isnull=False).update(warned_at=None)
    return sum(_withdraw(pk, "idle_within_guarantee") for pk in sorted(allocation_ids))


def _judge(row: Allocation, finding: IdleFinding, modes: Modes, rules: Rules, at: datetime) -> str:
    """Warn, begin the ladder, or advise; empty where nothing is due."""
    figures = {
        "idle_since": _since(row, finding).isoformat(),
        "window_s": rules.idle_window_s,
        "borrowed_only": not rules.idle_everybody,
        **finding.evidence,
    }
    mode = modes.spares(row.department_id, row.request_id)
    if mode is not None:
        advice_note(allocation_id=row.pk, cause=ReclaimCase.Cause.IDLE, rule=RULE, mode=mode, figures=figures)
        return "advised"
    warned_at = row.idle_watch.warned_at
    if warned_at is None:
        return "warned" if _warn(row, figures, rules, at) else ""
    if at - warned_at < timedelta(seconds=rules.idle_warn_s):
        return ""
    if ReclaimCase.objects.filter(allocation=row, closed_at=None).exists():
        return ""
    try:
        case_begin(
            acting_user=MONITOR,
            allocation_id=row.pk,
            cause=ReclaimCase.Cause.IDLE,
            rule=RULE,
            grace_s=rules.grace_idle_s,
            figures=figures,
        )
    except Conflict:
        return ""
    return "begun"


def _warn(row: Allocation, figures: Mapping[str, Any], rules: Rules, at: datetime) -> bool:
    """Say once per idle time that it will be taken back unless it is used or said to be needed."""
    taken_at = at + timedelta(seconds=rules.idle_warn_s + rules.grace_idle_s)
    with transaction.atomic():
        allocation = allocation_lock(row.pk)
        if allocation.state != Allocation.State.RUNNING:
            return False
        if not IdleWatch.objects.filter(pk=row.pk, warned_at=None).update(warned_at=at):
            return False
        facts = {**figures, "taken_at": taken_at.isoformat()}
        AllocationEvent.objects.create(
            allocation=allocation, at=at, kind="idle_warning", actor_name=MONITOR.name, facts=facts
        )
        outbox_add(
            "pool.allocation_idle",
            {"allocation": str(allocation.uid), "holder_id": allocation.holder_id, **facts},
            key=allocation.ref,
        )
    return True


def still_needed(*, acting_user: Actor, allocation: Allocation) -> IdleWatch:
    """Its holder needs it although it is idle: no warning and no case of idleness for a while.

    Conflict `still_needed_used_up` after the allowed number of times, `too_late` where it is being stopped,
    `not_idle` where nobody doubts it.
    """
    if not acting_user.is_system and acting_user.user_id != allocation.holder_id:
        raise Refused(code="forbidden", detail=_("Only its holder may say this."))
    at, rules = now(), rules_active()[1]
    with transaction.atomic():
        locked = allocation_lock(allocation.pk)
        if locked.state != Allocation.State.RUNNING:
            raise Conflict(code="too_late", detail=_("It is ending already."))
        watch = IdleWatch.objects.filter(pk=locked.pk).first()
        if watch is None or watch.state != State.IDLE:
            raise Conflict(code="not_idle", detail=_("It does not count as idle."))
        if watch.excuses >= rules.still_needed_times:
            raise Conflict(
                code="still_needed_used_up",
                detail=_(
                    "“Still needed” was said {n} times already: use it, or ask its administrator."
                ).format(n=watch.excuses),
                extra={"times": watch.excuses, "limit": rules.still_needed_times},
            )
        until = at + timedelta(seconds=rules.still_needed_s)
        IdleWatch.objects.filter(pk=locked.pk).update(
            excuses=F("excuses") + 1, excused_until=until, warned_at=None
        )
        _withdraw(locked.pk, "still_needed", acting_user)
        facts = {"until": until.isoformat(), "times": watch.excuses + 1, "limit": rules.still_needed_times}
        AllocationEvent.objects.create(
            allocation=locked, at=at, kind="still_needed", actor_name=acting_user.name, facts=facts
        )
        audit_record(acting_user=acting_user, action="allocation.still_needed", subject=locked, after=facts)
        watch.refresh_from_db()
    return watch
