"""The figures beside navigation entries: what waits for this person.

They are kept in Redis for a few seconds, so that a page does not ask the database again for what stood on the page
before; whatever the person changes (any request that is not a read) forgets them. Without Redis they are counted anew.
"""

from __future__ import annotations

from collections.abc import Callable

import redis
from django.core.cache import cache
from django.http import HttpRequest

from portal.notify.models import Notification
from portal.ops.models import Incident
from quotas.models import CapacityRequest
from quotas.selectors.approvals import waiting_for
from quotas.selectors.user_limits import WAITING


def unread(request: HttpRequest) -> int:
    """Unread notices of the person."""
    return Notification.objects.filter(user_id=request.user.pk, read_at=None).count()


def to_decide(request: HttpRequest) -> int:
    """Approval steps that wait for this person."""
    return waiting_for(request.user.pk, request.policy)  # type: ignore[arg-type, attr-defined]


def asks_waiting(request: HttpRequest) -> int:
    """The person's own requests that wait, for people or for GPUs; a series counts once."""
    return CapacityRequest.objects.filter(requester_id=request.user.pk, head=None, state__in=WAITING).count()


def open_incidents(request: HttpRequest) -> int:
    """Incidents that are not closed."""
    return Incident.objects.exclude(state=Incident.State.CLOSED).count()


KEPT_SECONDS = 15
COUNTS: dict[str, Callable[[HttpRequest], int]] = {
    "quotas:approvals": to_decide,
    "quotas:request-list": asks_waiting,
    "ops:incidents": open_incidents,
    "unread": unread,
}


def _key(user_id: int) -> str:
    return f"navigation-counts:{user_id}"


def _kept(request: HttpRequest) -> dict[str, int]:
    """The person's figures as kept, on the request once they were read."""
    found: dict[str, int] | None = getattr(request, "_navigation_counts", None)
    if found is None:
        try:
            found = cache.get(_key(request.user.pk)) or {}
        except redis.RedisError:
            found = {}
        request._navigation_counts = found  # type: ignore[attr-defined]
    return found


def of(request: HttpRequest, *names: str) -> int:
    """The figure of the first of the names that has one, else 0 (which shows nothing)."""
    for name in names:
        if name in COUNTS:
            kept = _kept(request)
            if name not in kept:
                kept[name] = COUNTS[name](request)
                try:
                    cache.set(_key(request.user.pk), kept, KEPT_SECONDS)
                except redis.RedisError:
                    pass
            return kept[name]
    return 0


def forget(user_id: int) -> None:
    """The person changed something: count anew on the next page."""
    try:
        cache.delete(_key(user_id))
    except redis.RedisError:
        pass
