"""What is read of notices."""

from __future__ import annotations

from django.db.models import QuerySet
from django.http import HttpRequest

from portal.notify.models import Notification


def own_notices(user_id: int, show: str = "all") -> QuerySet[Notification]:
    """A person's notices, newest first. `show`: all, unread, urgent."""
    rows = Notification.objects.filter(user_id=user_id).order_by("-id")
    if show == "unread":
        return rows.filter(read_at=None)
    if show == "urgent":
        return rows.filter(urgent=True)
    return rows


def unread_count(user_id: int) -> int:
    """How many a person has not read: the number on the bell."""
    return Notification.objects.filter(user_id=user_id, read_at=None).count()


def bell(request: HttpRequest) -> int:
    """`unread_count` of the signed-in person, for the shell."""
    return unread_count(request.user.pk) if request.user.is_authenticated else 0
