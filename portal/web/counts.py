"""The figures beside navigation entries: what waits for this person. One cheap query each, once per page."""

from __future__ import annotations

from collections.abc import Callable

from django.http import HttpRequest

from portal.notify.models import Notification
from portal.ops.models import Incident
from quotas.selectors.approvals import waiting_for


def unread(request: HttpRequest) -> int:
    """Unread notices of the person."""
    return Notification.objects.filter(user_id=request.user.pk, read_at=None).count()


def to_decide(request: HttpRequest) -> int:
    """Approval steps that wait for this person."""
    return waiting_for(request.user.pk, request.policy)  # type: ignore[arg-type, attr-defined]


def open_incidents(request: HttpRequest) -> int:
    """Incidents that are not closed."""
    return Incident.objects.exclude(state=Incident.State.CLOSED).count()


COUNTS: dict[str, Callable[[HttpRequest], int]] = {
    "quotas:approvals": to_decide,
    "ops:incidents": open_incidents,
}


def of(request: HttpRequest, *names: str) -> int:
    """The figure of the first of the URL names that has one, else 0 (which shows nothing)."""
    for name in names:
        if name in COUNTS:
            return COUNTS[name](request)
    return 0
