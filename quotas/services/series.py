"""Series: one agreed request that is several in the queue. Made, followed, closed.

The head is approved once and stays in state SERIES; its members are requests of the queue like any other, so
the scheduler, quotas, leases and bills know nothing of series.

- *array*: all members at once, of which ``array_at_once`` are in line or hold GPUs; the next one enters the
  line when one ends.
- *window*: the occurrences of the coming two weeks; each ends at its own time, whenever it began.
- *service*: as many replicas as its timetable, its signal, or its number says. What is too much is released,
  what lacks is asked again at the head's place in line. A replica whose node is to be emptied *moves*: it no longer
  counts, so another is asked for at once, and the pool ends it when that one stands (``pool.services.rolling``).

``series_follow`` brings a series up to date and may run at any time, any number of times. Lock order: head,
then members by id.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import structlog
from django.db import transaction
from django.db.models import Q

from portal.kernel.clock import now
from portal.kernel.errors import DomainError
from portal.kernel.models import advance
from portal.ops.actor import Actor, system
from portal.ops.outbox import outbox_add
from portal.ops.services.audit import audit_record
from quotas.engine import recurrence, timetable
from quotas.models import CapacityRequest
from quotas.selectors.series import progress_of
from quotas.services.asking_series import timetable_of, weekly_of
from quotas.services.history import note_event
from quotas.services.locks import request_lock
from quotas.services.wishes import COPIED
from quotas.transitions import move

log = structlog.get_logger(__name__)
S = CapacityRequest.State
Series = CapacityRequest.Series
SYSTEM = system("queue")
HORIZON = timedelta(days=14)
"""Occurrences so far ahead are in the queue: as far as the scheduler keeps places for windows."""
LEAD_S = 600
"""A higher figure of a timetable is asked so many seconds before its hour: notice and stop of what borrowed."""
CALM_S = 300
"""A signal lowers the number of replicas only after so long without a higher one."""
CRASHES, CRASH_WINDOW, CRASH_PAUSE = 3, timedelta(minutes=10), timedelta(minutes=5)
SHORTEST = timedelta(seconds=60)
MOVING = "moving"
"""``let_go_cause`` of a replica that goes on until another stands elsewhere."""
OWN = frozenset(
    {"series", "array_count", "array_at_once", "window", "scale_by", "timetable", "signal_per_replica",
     "replicas_min", "replicas_max", "after_failed"}
)  # fmt: skip
"""Wishes that concern the series as a whole and are not handed on to its members."""


def series_begin(head: CapacityRequest, *, held: str) -> int:
    """Make the first members of a head that was just agreed on and is locked; returns how many.

    ``held`` is the mark of members that may not enter the line.
    """
    if head.series == Series.ARRAY:
        each = head.charge_milli // head.array_at_once
        cost = None if head.cost_at_most_micro is None else head.cost_at_most_micro // head.array_count
        rows = [
            member_of(
                head,
                index,
                charge_milli=each,
                cost_at_most_micro=cost,
                held=held or ("" if index < head.array_at_once else "array"),
                start_at=head.start_at,
            )
            for index in range(head.array_count)
        ]
        CapacityRequest.objects.bulk_create(rows, batch_size=500)
        return len(rows)
    return series_follow(head_id=head.pk)


def member_of(head: CapacityRequest, index: int, **values: Any) -> CapacityRequest:
    """A member that is not saved yet: the head's wishes, agreed on as the head was, at its place in line."""
    shared = {name: getattr(head, name) for name in COPIED if name not in OWN}
    return CapacityRequest(
        **{
            **shared,
            "head": head,
            "member_index": index,
            "requester_id": head.requester_id,
            "last_editor_id": head.last_editor_id,
            "state": S.QUEUED,
            "state_since": now(),
            "submitted_at": head.submitted_at,
            "decided_at": head.decided_at,
            "queued_at": head.queued_at,
            "review_at": head.review_at,
            "deadline_at": head.deadline_at,
            "policy_rule": head.policy_rule,
            "over_quota": head.over_quota,
            **values,
        }
    )


def series_follow(*, head_id: int) -> int:
    """Bring one series up to date; returns how many members were added or let into the line."""
    with transaction.atomic():
        head = request_lock(head_id)
        if head.state != S.SERIES:
            return 0
        if head.is_service and head.review_at is not None and head.review_at <= now():
            series_close(head, cause="review_passed", acting_user=SYSTEM)
            return 0
        if head.let_go_at is not None:
            _finish_if_through(head)
            return 0
        follow = {Series.ARRAY: _array, Series.WINDOW: _windows, Series.SERVICE: _replicas}
        added = follow[Series(head.series)](head)
        if added:
            outbox_add("quotas.request_queued", {"request": str(head.uid), "cause": "series"}, key=head.ref)
        return added


def series_sweep() -> dict[str, int]:
    """Follow all series; one that fails stops no other. Returns how many members came and series failed."""
    done = {"added": 0, "errors": 0}
    for pk in CapacityRequest.objects.filter(state=S.SERIES).order_by("pk").values_list("pk", flat=True):
        try:
            done["added"] += series_follow(head_id=pk)
        except DomainError as error:
            done["errors"] += 1
            log.warning("series_not_followed", head=pk, code=error.code)
    return done


def series_close(
    head: CapacityRequest, *, cause: str, acting_user: Actor, stop_running: bool = True, reason: str = ""
) -> None:
    """End a locked series: members that wait are withdrawn, those that run are released or left to end by
    themselves; the head ends with the last of them.
    """
    for member in CapacityRequest.objects.filter(head=head, state=S.QUEUED).order_by("pk"):
        member_withdraw(member, cause)
    if stop_running:
        for member in CapacityRequest.objects.filter(head=head, state=S.ALLOCATED).order_by("pk"):
            let_go(member, cause)
    advance(CapacityRequest.objects.filter(pk=head.pk), let_go_at=now(), let_go_cause=cause[:32])
    head.refresh_from_db()
    facts = {"cause": cause, "stop_running": stop_running}
    note_event(
        request_id=head.pk, kind="series_closed", actor_name=acting_user.name, facts=facts, text=reason
    )
    audit_record(
        acting_user=acting_user, action="request.series_closed", subject=head, after=facts, reason=reason
    )
    _finish_if_through(head)


def let_go(member: CapacityRequest, cause: str) -> bool:
    """Ask the pool to end what a member holds; False where that was asked already."""
    goes_on = Q(let_go_at=None) | Q(let_go_cause=MOVING)
    rows = CapacityRequest.objects.filter(goes_on, pk=member.pk, state=S.ALLOCATED)
    if not advance(rows, let_go_at=now(), let_go_cause=cause[:32]):
        return False
    note_event(request_id=member.pk, kind="let_go", actor_name=SYSTEM.name, facts={"cause": cause})
    outbox_add("quotas.let_go", {"request": str(member.uid), "cause": cause}, key=member.ref)
    return True


def replica_moves(*, request_id: int, facts: dict[str, Any]) -> bool:
    """Ask for another replica in the place of one whose node is to be emptied, which goes on meanwhile; False where
    it is no replica of a service that goes on, or is ending or moving already. ``facts``: why, for its history."""
    member = CapacityRequest.objects.only("head_id").get(pk=request_id)
    if member.head_id is None:
        return False
    with transaction.atomic():
        head = request_lock(member.head_id)
        if head.state != S.SERIES or head.series != Series.SERVICE or head.let_go_at is not None:
            return False
        rows = CapacityRequest.objects.filter(pk=request_id, state=S.ALLOCATED, let_go_at=None)
        if not advance(rows, let_go_at=now(), let_go_cause=MOVING):
            return False
        note_event(request_id=request_id, kind="moving", actor_name=SYSTEM.name, facts=facts)
        series_follow(head_id=head.pk)
    return True


def replica_stays(*, request_id: int) -> bool:
    """Its node is not to be emptied after all: it counts again, and what was asked for in its place goes."""
    member = CapacityRequest.objects.only("head_id").get(pk=request_id)
    with transaction.atomic():
        if member.head_id is not None:
            request_lock(member.head_id)
        rows = CapacityRequest.objects.filter(pk=request_id, state=S.ALLOCATED, let_go_cause=MOVING)
        if not advance(rows, let_go_at=None, let_go_cause=""):
            return False
        note_event(request_id=request_id, kind="stays", actor_name=SYSTEM.name)
        if member.head_id is not None:
            series_follow(head_id=member.head_id)
    return True


def member_withdraw(member: CapacityRequest, cause: str) -> None:
    """Take a waiting member out of the queue for its series."""
    move(member, "withdraw", ended_at=now(), end_reason=cause[:32], held="")
    note_event(request_id=member.pk, kind="withdrawn", actor_name=SYSTEM.name, facts={"reason": cause})
    outbox_add("quotas.request_withdrawn", {"request": str(member.uid)}, key=member.ref)


# -- the three kinds -------------------------------------------------------------------------------------


def _array(head: CapacityRequest) -> int:
    progress = progress_of(head)
    if progress.open == 0:
        _finish(head)
        return 0
    room = head.array_at_once - progress.waiting - progress.running
    if room <= 0:
        return 0
    waiting = CapacityRequest.objects.filter(head=head, state=S.QUEUED, held="array")
    following = list(waiting.order_by("member_index").values_list("pk", flat=True)[:room])
    return advance(CapacityRequest.objects.filter(pk__in=following), held="")


def _windows(head: CapacityRequest) -> int:
    moment, rule = now(), weekly_of(head.window)
    for member in CapacityRequest.objects.filter(
        head=head, state=S.QUEUED, end_at__lte=moment + SHORTEST
    ).order_by("pk"):
        member_withdraw(member, "window_missed")
        outbox_add("quotas.window_missed", {"request": str(member.uid)}, key=member.ref)
    known = set(CapacityRequest.objects.filter(head=head).values_list("member_index", flat=True))
    coming = [
        one
        for one in recurrence.occurrences(rule, moment + SHORTEST, moment + HORIZON)
        if one.day.toordinal() not in known
    ]
    made = [_occurrence(head, one, rule) for one in coming]
    CapacityRequest.objects.bulk_create(made)
    last = recurrence.instant_after(rule)
    if not made and moment >= last and progress_of(head).open == 0:
        _finish(head)
    return len(made)


def _occurrence(
    head: CapacityRequest, one: recurrence.Occurrence, rule: recurrence.Weekly
) -> CapacityRequest:
    total = recurrence.total_seconds(rule) or 1
    cost = head.cost_at_most_micro
    return member_of(
        head,
        one.day.toordinal(),
        charge_milli=head.charge_milli,
        cost_at_most_micro=None if cost is None else cost * one.seconds // total,
        start_at=one.start,
        end_at=one.end,
        duration_s=one.seconds,
    )


def wanted_of(head: CapacityRequest, moment: datetime) -> int:
    """Replicas that a service wants at a moment."""
    if head.scale_by == CapacityRequest.ScaleBy.TIMETABLE:
        return timetable.wanted_now(timetable_of(head.timetable), moment, LEAD_S)
    if head.scale_by == CapacityRequest.ScaleBy.SIGNAL:
        peaks = [(datetime.fromisoformat(at), int(n)) for at, n in head.signal_peak]
        return timetable.damped(peaks, moment, CALM_S) if peaks else head.replicas_min
    return head.replicas_max


def _replicas(head: CapacityRequest) -> int:
    moment = now()
    wanted = wanted_of(head, moment)
    if head.replicas_wanted != wanted:
        facts = {"from": head.replicas_wanted, "to": wanted, "cause": head.scale_by}
        advance(CapacityRequest.objects.filter(pk=head.pk), replicas_wanted=wanted)
        head.refresh_from_db()
        note_event(request_id=head.pk, kind="scaled", actor_name=SYSTEM.name, facts=facts)
    members = list(
        CapacityRequest.objects.filter(head=head, state__in=[S.QUEUED, S.ALLOCATED]).order_by("member_index")
    )
    staying = [one for one in members if one.let_go_at is None]
    for member in [one for one in members if one.let_go_at is not None and one.state == S.QUEUED]:
        member_withdraw(member, member.let_go_cause)
    surplus = len(staying) - wanted
    # First those that hold nothing yet, then the highest number.
    ranked = sorted(staying, key=lambda one: (one.state == S.ALLOCATED, -(one.member_index or 0)))
    for member in ranked[: max(0, surplus)]:
        if member.state == S.QUEUED:
            member_withdraw(member, "scaled_down")
        else:
            let_go(member, "scaled_down")
    if surplus >= 0 or _crashing(head, moment):
        return 0
    return _add_replicas(head, -surplus, {one.member_index for one in members})


def _add_replicas(head: CapacityRequest, count: int, taken: set[int | None]) -> int:
    free = (number for number in range(head.replicas_max + len(taken) + count) if number not in taken)
    cost = head.cost_at_most_micro
    rows = [
        member_of(
            head,
            next(free),
            nodes=1,
            charge_milli=head.charge_milli // head.nodes,
            cost_at_most_micro=None if cost is None else cost // head.nodes,
            start_at=head.start_at,
        )
        for _ in range(count)
    ]
    CapacityRequest.objects.bulk_create(rows)
    return len(rows)


def _crashing(head: CapacityRequest, moment: datetime) -> bool:
    """Whether replicas failed so often just now that the next one waits a while; told once each time."""
    since = moment - CRASH_WINDOW
    failed = CapacityRequest.objects.filter(
        head=head, state=S.ENDED, end_reason__in=["failed", "start_failed"], ended_at__gt=since
    ).order_by("-ended_at")
    times = [at for at in failed.values_list("ended_at", flat=True)[:CRASHES] if at is not None]
    if len(times) < CRASHES or times[0] + CRASH_PAUSE <= moment:
        return False
    if not head.events.filter(kind="crash_loop", at__gt=times[0] - timedelta(seconds=1)).exists():
        facts = {"failed": len(times), "again_at": (times[0] + CRASH_PAUSE).isoformat()}
        note_event(request_id=head.pk, kind="crash_loop", actor_name=SYSTEM.name, facts=facts)
        outbox_add("quotas.crash_loop", {"request": str(head.uid), **facts}, key=head.ref)
    return True


# -- the end ---------------------------------------------------------------------------------------------


def _finish_if_through(head: CapacityRequest) -> None:
    if progress_of(head).open == 0:
        _finish(head)


def _finish(head: CapacityRequest) -> None:
    """All members are through: the head ends, with what became of them."""
    progress = progress_of(head)
    if head.let_go_at is not None:
        reason = head.let_go_cause or "withdrawn"
    elif progress.badly:
        reason = "failed"
    elif progress.well:
        reason = "completed"
    else:
        reason = "withdrawn"
    nothing_ran = progress.well + progress.badly == 0
    act = "withdraw" if nothing_ran and reason != "completed" else "finish"
    facts = {
        "reason": reason,
        "well": progress.well,
        "badly": progress.badly,
        "withdrawn": progress.withdrawn,
    }
    move(head, act, ended_at=now(), end_reason=reason)
    note_event(request_id=head.pk, kind="ended", actor_name=SYSTEM.name, facts=facts)
    audit_record(acting_user=SYSTEM, action="request.ended", subject=head, after=facts)
    outbox_add("quotas.request_ended", {"request": str(head.uid), **facts}, key=head.ref)
