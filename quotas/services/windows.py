"""Single occurrences of a recurring window: left out, moved, each without touching the others."""

from __future__ import annotations

from datetime import date, datetime, timedelta
from typing import Any

from django.db import transaction
from django.utils.translation import gettext as _

from portal.accounts.policy import Policy
from portal.kernel.clock import now
from portal.kernel.errors import Conflict, Invalid, Refused
from portal.kernel.models import advance
from portal.ops.actor import Actor
from portal.ops.outbox import outbox_add
from portal.ops.services.audit import audit_record
from quotas.engine import recurrence
from quotas.models import CapacityRequest
from quotas.services.asking_series import weekly_of
from quotas.services.history import note_event
from quotas.services.locks import request_lock
from quotas.services.series import member_withdraw
from quotas.transitions import refused

S = CapacityRequest.State


def occurrence_skip(
    *, acting_user: Actor, policy: Policy, request: CapacityRequest, day: date, reason: str = ""
) -> CapacityRequest:
    """Leave one occurrence out, whether it is in the queue already or still far ahead; its requester or a
    pool administrator. One that holds GPUs is released on its allocation instead.
    """
    with transaction.atomic():
        head = _head(request, acting_user, policy)
        known = (
            CapacityRequest.objects.filter(head=head, member_index=day.toordinal()).order_by("-id").first()
        )
        if known is None:
            if recurrence.occurrence_on(weekly_of(head.window), day) is None:
                raise Invalid.field("day", _("The window has no occurrence on that day."))
            skip = sorted({*head.window.get("skip", []), day.isoformat()})
            advance(CapacityRequest.objects.filter(pk=head.pk), window={**head.window, "skip": skip})
            head.refresh_from_db()
        elif known.state == S.QUEUED:
            member_withdraw(request_lock(known.pk), "skipped")
        else:
            raise refused(known.state, "withdraw", known.get_state_display())
        _tell(head, "occurrence_skipped", acting_user, {"day": day.isoformat()}, reason)
        return head


def occurrence_move(
    *,
    acting_user: Actor,
    policy: Policy,
    request: CapacityRequest,
    day: date,
    start_at: datetime,
    end_at: datetime,
) -> CapacityRequest:
    """Give one occurrence another time, no longer than it was; all others stay where they are. Refused where
    it would overlap another occurrence: their capacity is asked once, not twice.
    """
    with transaction.atomic():
        head = _head(request, acting_user, policy)
        row = CapacityRequest.objects.filter(head=head, member_index=day.toordinal(), state=S.QUEUED).first()
        if row is None:
            raise Conflict(
                code="no_occurrence",
                detail=_("No occurrence of that day waits in the queue; those of the coming two weeks do."),
            )
        member = request_lock(row.pk)
        _check_times(head, member, start_at, end_at)
        facts = {
            "day": day.isoformat(),
            "from": member.start_at.isoformat() if member.start_at else None,
            "to": start_at.isoformat(),
        }
        advance(
            CapacityRequest.objects.filter(pk=member.pk),
            start_at=start_at,
            end_at=end_at,
            duration_s=int((end_at - start_at).total_seconds()),
        )
        _tell(member, "occurrence_moved", acting_user, facts, "")
        outbox_add("quotas.request_changed", {"request": str(member.uid)}, key=member.ref)
        member.refresh_from_db()
        return member


def _check_times(head: CapacityRequest, member: CapacityRequest, start: datetime, end: datetime) -> None:
    if start < now() - timedelta(minutes=5):
        raise Invalid.field("start_at", _("This start lies in the past."))
    if end <= start:
        raise Invalid.field("end_at", _("The end lies before the start."))
    seconds = int((end - start).total_seconds())
    if member.duration_s is not None and seconds > member.duration_s:
        raise Invalid.field(
            "end_at",
            _("At most {hours} h, as was agreed.").format(hours=f"{member.duration_s / 3600:g}"),
        )
    others = CapacityRequest.objects.filter(head=head, state__in=[S.QUEUED, S.ALLOCATED]).exclude(
        pk=member.pk
    )
    taken = [(one.start_at, one.end_at) for one in others if one.start_at and one.end_at]
    known = set(CapacityRequest.objects.filter(head=head).values_list("member_index", flat=True))
    taken += [
        (one.start, one.end)
        for one in recurrence.occurrences(weekly_of(head.window), start, end)
        if one.day.toordinal() not in known
    ]
    clash = next(((a, b) for a, b in taken if a < end and start < b), None)
    if clash is not None:
        raise Conflict(
            code="occurrences_overlap",
            detail=_("It would overlap another occurrence of the same window."),
            extra={"start_at": clash[0].isoformat(), "end_at": clash[1].isoformat()},
        )


def _head(request: CapacityRequest, acting_user: Actor, policy: Policy) -> CapacityRequest:
    head = request_lock(request.pk)
    if head.series != CapacityRequest.Series.WINDOW:
        raise Conflict(code="no_window", detail=_("It is no recurring window."))
    own = acting_user.user is not None and head.requester_id == acting_user.user.pk
    if not own and not policy.administers_pool:
        raise Refused(code="not_yours", detail=_("Only its requester may change a request."))
    if head.state != S.SERIES:
        raise refused(head.state, "change", head.get_state_display())
    return head


def _tell(
    subject: CapacityRequest, kind: str, acting_user: Actor, facts: dict[str, Any], reason: str
) -> None:
    note_event(request_id=subject.pk, kind=kind, actor_name=acting_user.name, facts=facts, text=reason)
    audit_record(
        acting_user=acting_user, action=f"request.{kind}", subject=subject, after=facts, reason=reason
    )
