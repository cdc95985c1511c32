"""Requests that wait for others to end: set, checked against circles, settled when the other has ended.

A request in the queue with an open dependency is *held*: it is no part of the scheduler's line, and its page
says what it waits for. It enters the line when the last dependency is met; its time in line counts from then.
Lock order: the one lock on all dependencies, then requests by id.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.db import transaction
from django.utils.translation import gettext as _

from portal.accounts.policy import Policy
from portal.kernel.clock import now
from portal.kernel.errors import Conflict, FieldProblem, Invalid, Refused
from portal.kernel.locks import lock_in_transaction
from portal.kernel.models import advance
from portal.ops.actor import Actor, system
from portal.ops.outbox import outbox_add
from portal.ops.services.audit import audit_record
from quotas.models import CapacityRequest, RequestDependency
from quotas.selectors.series import ended_well, held_by
from quotas.services.history import note_event
from quotas.services.locks import request_lock
from quotas.transitions import REQUEST_TERMINAL, move

S = CapacityRequest.State
Kind = RequestDependency.Kind
LOCK = "quotas.dependencies"
SYSTEM = system("queue")
After = tuple[CapacityRequest, str]


def dependencies_check(after: Iterable[After], *, request: CapacityRequest | None = None) -> None:
    """Invalid where a dependency could never be met: on itself, in a circle, or on what has ended badly."""
    problems: list[FieldProblem] = []
    for one, kind in after:
        if request is not None and _canonical(one) == _canonical(request):
            problems.append({"pointer": "after", "detail": _("A request cannot wait for itself.")})
        elif request is not None and _reaches(_canonical(one), _canonical(request)):
            text = _("{ref} waits for this one already: they would wait for each other forever.")
            problems.append({"pointer": "after", "detail": text.format(ref=one.ref)})
        elif one.state == S.DRAFT:
            text = _("{ref} is a draft: it would never end.")
            problems.append({"pointer": "after", "detail": text.format(ref=one.ref)})
        elif kind == Kind.OK and ended_well(one) is False:
            text = _("{ref} did not end well, so this would never start. Wait for any end, or leave it out.")
            problems.append({"pointer": "after", "detail": text.format(ref=one.ref)})
    if problems:
        raise Invalid(code="invalid", detail=_("Some fields need a change."), errors=problems)


def dependencies_set(request: CapacityRequest, after: Iterable[After]) -> None:
    """Make ``after`` all that the request waits for. Runs in its writer's transaction, before the request is
    locked by anybody else; what has ended already is met at once.
    """
    wanted = {one.pk: kind for one, kind in after}
    lock_in_transaction(LOCK)
    dependencies_check(after, request=request)
    request.waits_for.exclude(on_id__in=wanted).delete()
    for on_id, kind in wanted.items():
        on = next(one for one, _kind in after if one.pk == on_id)
        on.refresh_from_db()
        well = ended_well(on)
        RequestDependency.objects.update_or_create(
            request=request,
            on=on,
            defaults={"kind": kind, "met_at": now() if well is not None else None, "failed_at": None},
        )


def dependencies_change(
    *, acting_user: Actor, policy: Policy, request: CapacityRequest, after: list[After]
) -> CapacityRequest:
    """Change what a request waits for while it is not in line yet; its requester may. With nothing left to
    wait for it enters the line.
    """
    if acting_user.user is None or request.requester_id != acting_user.user.pk:
        raise Refused(code="not_yours", detail=_("Only its requester may change a request."))
    with transaction.atomic():
        lock_in_transaction(LOCK)
        held = request_lock(request.pk)
        waits = held.state in (S.QUEUED, S.SERIES) and held_by(held) in ("dependency", "failed")
        if held.state not in (S.IN_APPROVAL, S.NEEDS_CONSENT, S.RETURNED) and not waits:
            raise Conflict(
                code="wrong_state", detail=_("It waits for nobody now, so there is nothing to change.")
            )
        before = [dep.on.ref for dep in held.waits_for.select_related("on").order_by("on_id")]
        dependencies_set(held, after)
        facts = {"before": before, "after": [one.ref for one, _kind in after]}
        note_event(request_id=held.pk, kind="after_changed", actor_name=acting_user.name, facts=facts)
        audit_record(
            acting_user=acting_user,
            action="request.after_changed",
            subject=held,
            before={"after": before},
            after={"after": facts["after"]},
        )
        if waits:
            line_enter(held)
        held.refresh_from_db()
        return held


def hold_of(request: CapacityRequest) -> str:
    """Why a request that is agreed on may not enter the line: "failed", "dependency", or ""."""
    rows = list(request.waits_for.all())
    if any(row.failed_at is not None for row in rows):
        return "failed"
    return "dependency" if any(row.met_at is None for row in rows) else ""


def dependencies_settle(on: CapacityRequest) -> int:
    """Tell those who wait for ``on``, which has ended; returns how many were told. Idempotent."""
    well = ended_well(on)
    if well is None:
        return 0
    told = 0
    with transaction.atomic():
        lock_in_transaction(LOCK)
        for dep in on.awaited_by.filter(met_at=None, failed_at=None).order_by("request_id"):
            met = well or dep.kind == Kind.ANY
            RequestDependency.objects.filter(pk=dep.pk).update(**{"met_at" if met else "failed_at": now()})
            waiting = request_lock(dep.request_id)
            facts = {"on": on.ref, "reason": on.end_reason}
            if not met:
                note_event(
                    request_id=waiting.pk, kind="dependency_failed", actor_name=SYSTEM.name, facts=facts
                )
                outbox_add(
                    "quotas.dependency_failed", {"request": str(waiting.uid), **facts}, key=waiting.ref
                )
            if waiting.state in (S.QUEUED, S.SERIES):
                line_enter(waiting)
            told += 1
    return told


def line_enter(request: CapacityRequest) -> None:
    """Bring a locked request of the queue in line with its dependencies: into the line where all are met,
    out where one failed and it shall not wait.
    """
    reason = hold_of(request)
    if reason == "failed" and request.after_failed == CapacityRequest.AfterFailed.WITHDRAW:
        give_up(request, "dependency_failed")
        return
    before = held_by(request)
    if reason == before:
        return
    if request.state == S.SERIES:
        members = CapacityRequest.objects.filter(head=request, state=S.QUEUED)
        if reason:
            advance(members.exclude(held=""), held=reason)
            return
        first = list(members.order_by("member_index").values_list("pk", flat=True)[: request.array_at_once])
        advance(members.exclude(held="").filter(pk__in=first), held="", queued_at=now())
        advance(members.exclude(held="").exclude(pk__in=first), held="array", queued_at=now())
    else:
        changed: dict[str, Any] = {"held": reason}
        if not reason:
            changed["queued_at"] = now()
        advance(CapacityRequest.objects.filter(pk=request.pk), **changed)
    request.refresh_from_db()
    if not reason:
        note_event(request_id=request.pk, kind="in_line", actor_name=SYSTEM.name)
        outbox_add(
            "quotas.request_queued", {"request": str(request.uid), "cause": "dependency"}, key=request.ref
        )


def give_up(request: CapacityRequest, reason: str, *, facts: dict[str, Any] | None = None) -> None:
    """Take a locked request out of the queue for a rule: its members too where it is a series."""
    for member in CapacityRequest.objects.filter(head=request, state=S.QUEUED).order_by("pk"):
        move(member, "withdraw", ended_at=now(), end_reason=reason, held="")
    before = request.state
    move(request, "withdraw", ended_at=now(), end_reason=reason, held="")
    note_event(
        request_id=request.pk,
        kind="withdrawn",
        actor_name=SYSTEM.name,
        facts={"from": before, "reason": reason, **(facts or {})},
    )
    audit_record(
        acting_user=SYSTEM,
        action="request.withdrawn",
        subject=request,
        before={"state": before},
        after={"state": request.state, "reason": reason},
    )
    outbox_add("quotas.request_withdrawn", {"request": str(request.uid)}, key=request.ref)


def dependencies_sweep() -> int:
    """Settle what an event did not: dependencies on requests that have ended. Returns how many."""
    rows = (
        RequestDependency.objects.filter(met_at=None, failed_at=None, on__state__in=REQUEST_TERMINAL)
        .order_by("on_id")
        .values_list("on_id", flat=True)
        .distinct()[:500]
    )
    return sum(dependencies_settle(CapacityRequest.objects.get(pk=pk)) for pk in rows)


def _canonical(request: CapacityRequest) -> int:
    """A member stands for its whole series: it starts after what the series waits for."""
    return request.head_id or request.pk


def _reaches(start: int, goal: int) -> bool:
    """Whether ``start`` waits, directly or through others, for ``goal``."""
    seen, edge = {start}, {start}
    while edge:
        if goal in edge:
            return True
        rows = RequestDependency.objects.filter(request_id__in=edge).select_related("on")
        edge = {_canonical(row.on) for row in rows} - seen
        seen |= edge
    return False
