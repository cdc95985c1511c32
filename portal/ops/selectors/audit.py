"""The audit trail, newest first."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime
from typing import Any, Protocol
from uuid import UUID

from django.db import connection
from django.db.models import Q, QuerySet

from portal.ops.models import AuditEvent

NEAR = 500
_UUID = re.compile(r"^[0-9a-fA-F]{8}-?([0-9a-fA-F]{4}-?){3}[0-9a-fA-F]{12}$")


class Reader(Protocol):
    """What is asked of a policy (portal.accounts.policy.Policy is one; this room lies below it)."""

    def scope(self, *roles: str) -> Any:
        """Departments over which one of the roles is held."""


def audit_visible(policy: Reader) -> QuerySet[AuditEvent]:
    """Rows that auditors and pool administrators see: all, or those of their departments."""
    scope = policy.scope("auditor", "pool_admin")
    return AuditEvent.objects.filter(scope.q("department_id")).order_by("-id")


def audit_filtered(
    rows: QuerySet[AuditEvent],
    *,
    search: str = "",
    action: str = "",
    object_type: str = "",
    via: str = "",
    actor_id: int | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
) -> QuerySet[AuditEvent]:
    """Filtered. `search` meets a request id, an object (uid or words), a person or an act; `action` is an act or the
    beginning of one; `until` is exclusive."""
    if search:
        if _UUID.match(search):
            rows = rows.filter(Q(object_uid=UUID(search)) | Q(request_id=UUID(search).hex))
        else:
            rows = rows.filter(
                Q(request_id=search)
                | Q(object_label__icontains=search)
                | Q(actor_name__icontains=search)
                | Q(action__icontains=search)
            )
    if action:
        rows = rows.filter(Q(action=action) | Q(action__startswith=f"{action}."))
    if object_type:
        rows = rows.filter(object_type=object_type)
    if via:
        rows = rows.filter(via=via)
    if actor_id is not None:
        rows = rows.filter(actor_id=actor_id)
    if since is not None:
        rows = rows.filter(at__gte=since)
    if until is not None:
        rows = rows.filter(at__lt=until)
    return rows


def history_of(uids: UUID | Iterable[UUID], limit: int = 20) -> list[AuditEvent]:
    """The last changes of one object, or of several that belong together."""
    wanted = [uids] if isinstance(uids, UUID) else list(uids)
    return list(AuditEvent.objects.filter(object_uid__in=wanted).order_by("-id")[:limit])


def same_request(event: AuditEvent) -> list[AuditEvent]:
    """What else was written by the request behind `event` (looked for nearby only)."""
    if not event.request_id:
        return []
    near = AuditEvent.objects.filter(pk__gt=event.pk - NEAR, pk__lt=event.pk + NEAR)
    return list(near.filter(request_id=event.request_id).exclude(pk=event.pk).order_by("id")[:20])


def audit_total() -> int:
    """About how many rows there are: the planner's figure once it has one, else counted."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT reltuples::bigint FROM pg_class WHERE oid = 'ops_auditevent'::regclass")
        row = cursor.fetchone()
    guess = int(row[0]) if row else -1
    return guess if guess > 10_000 else AuditEvent.objects.count()
