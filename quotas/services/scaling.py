"""Services: the signal that says how many replicas are needed, and the review date that their owner renews."""

from __future__ import annotations

from datetime import datetime, timedelta

from django.db import transaction
from django.utils import timezone
from django.utils.formats import date_format
from django.utils.translation import gettext as _

from portal.kernel.clock import now
from portal.kernel.errors import Conflict, Invalid, Refused
from portal.kernel.models import advance
from portal.ops.actor import Actor, system
from portal.ops.outbox import outbox_add
from portal.ops.services.audit import audit_record
from quotas.engine.timetable import wanted_by_signal
from quotas.models import CapacityRequest
from quotas.services.asking_time import AHEAD
from quotas.services.dependencies import give_up
from quotas.services.history import note_event
from quotas.services.locks import request_lock
from quotas.services.series import CALM_S, let_go, series_follow
from quotas.transitions import refused

S = CapacityRequest.State
SYSTEM = system("queue")
REVIEW_NOTICES_S = (7 * 86400, 86400)
REVIEW_WARNED = "review_warning"
BIGGEST_SIGNAL = 1_000_000_000
PEAKS_KEPT = 200


def service_signal(*, acting_user: Actor, request: CapacityRequest, value: int) -> CapacityRequest:
    """Take a service's load, for example its requests per second: the replicas it needs follow from it, up at
    once, down after five calm minutes. The number is kept, whatever became of it; its requester's only.
    """
    _own(acting_user, request)
    if not 0 <= value <= BIGGEST_SIGNAL:
        raise Invalid.field("value", _("A whole number from 0 is needed here."))
    with transaction.atomic():
        head = request_lock(request.pk)
        if head.series != CapacityRequest.Series.SERVICE or head.scale_by != CapacityRequest.ScaleBy.SIGNAL:
            raise Conflict(code="no_signal", detail=_("It is no service that follows a signal."))
        if head.state != S.SERIES:
            raise refused(head.state, "signal", head.get_state_display())
        moment = now()
        wanted = wanted_by_signal(value, head.signal_per_replica, head.replicas_min, head.replicas_max)
        since = moment - timedelta(seconds=CALM_S)
        recent = [[at, n] for at, n in head.signal_peak if datetime.fromisoformat(at) >= since]
        # Of a stretch in which nothing higher came the last entry says all.
        recent = [[at, n] for at, n in recent if n > wanted][-PEAKS_KEPT:]
        advance(
            CapacityRequest.objects.filter(pk=head.pk),
            signal_value=value,
            signal_at=moment,
            signal_peak=[*recent, [moment.isoformat(), wanted]],
        )
    series_follow(head_id=request.pk)
    request.refresh_from_db()
    return request


def service_renew(*, acting_user: Actor, request: CapacityRequest, review_at: datetime) -> CapacityRequest:
    """Move the review date: its owner, from now at most as far as was agreed at first. What its replicas hold
    goes on as it is.
    """
    _own(acting_user, request)
    with transaction.atomic():
        held = request_lock(request.pk)
        if not held.is_service or held.head_id is not None:
            raise Conflict(code="no_service", detail=_("Only a service has a review date."))
        if held.state not in (S.QUEUED, S.ALLOCATED, S.SERIES) or held.let_go_at is not None:
            raise refused(held.state, "renew", held.get_state_display())
        moment = now()
        span = timedelta(seconds=held.review_span_s) if held.review_span_s else AHEAD
        latest = moment + min(span, AHEAD)
        if review_at <= moment:
            raise Invalid.field("review_at", _("A date in the future is needed."))
        if review_at > latest + timedelta(minutes=5):
            text = _("At most until {latest}: so much time at once was agreed.")
            shown = date_format(timezone.localtime(latest), "Y-m-d H:i")
            raise Invalid.field("review_at", text.format(latest=shown))
        before = held.review_at
        advance(CapacityRequest.objects.filter(pk=held.pk), review_at=review_at)
        members = CapacityRequest.objects.filter(head=held, state__in=[S.QUEUED, S.ALLOCATED])
        advance(members, review_at=review_at)
        facts = {"from": before.isoformat() if before else None, "to": review_at.isoformat()}
        note_event(request_id=held.pk, kind="renewed", actor_name=acting_user.name, facts=facts)
        audit_record(
            acting_user=acting_user,
            action="request.renewed",
            subject=held,
            before={"review_at": facts["from"]},
            after={"review_at": facts["to"]},
        )
        held.refresh_from_db()
        return held


def reviews_sweep() -> dict[str, int]:
    """Warn owners before the review date, once per threshold and date; end what was not renewed."""
    moment = now()
    done = {"warned": 0, "ended": 0}
    rows = CapacityRequest.objects.filter(
        is_service=True,
        head=None,
        state__in=[S.QUEUED, S.ALLOCATED, S.SERIES],
        review_at__lte=moment + timedelta(seconds=max(REVIEW_NOTICES_S)),
    ).order_by("review_at", "pk")
    for row in rows:
        if row.review_at is not None and row.review_at <= moment:
            done["ended"] += _end_unrenewed(row.pk)
        else:
            done["warned"] += _warn(row.pk, moment)
    return done


def _warn(request_id: int, moment: datetime) -> int:
    with transaction.atomic():
        held = request_lock(request_id)
        if held.review_at is None:
            return 0
        left = (held.review_at - moment).total_seconds()
        # A notice that would come with more than half of the whole time left helps nobody.
        whole = held.review_span_s or max(REVIEW_NOTICES_S) * 2
        due = [s for s in REVIEW_NOTICES_S if left <= s and s * 2 <= whole]
        if not due:
            return 0
        facts = {"threshold_s": min(due), "review_at": held.review_at.isoformat()}
        told = held.events.filter(
            kind=REVIEW_WARNED, facts__review_at=facts["review_at"], facts__threshold_s__lte=min(due)
        )
        if told.exists():
            return 0
        note_event(request_id=held.pk, kind=REVIEW_WARNED, actor_name=SYSTEM.name, facts=facts)
        outbox_add("quotas.review_due", {"request": str(held.uid), **facts}, key=held.ref)
        return 1


def _end_unrenewed(request_id: int) -> int:
    with transaction.atomic():
        held = request_lock(request_id)
        if held.review_at is None or held.review_at > now():
            return 0
        if held.state == S.QUEUED:
            give_up(held, "review_passed")
            return 1
        if held.state == S.ALLOCATED:
            return int(let_go(held, "review_passed"))
    return int(series_follow(head_id=request_id) >= 0) if held.let_go_at is None else 0


def _own(acting_user: Actor, request: CapacityRequest) -> None:
    if acting_user.user is None or request.requester_id != acting_user.user.pk:
        raise Refused(code="not_yours", detail=_("Only its requester may do this."))
