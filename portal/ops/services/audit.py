"""Write the audit trail. Called by every service inside its own transaction."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from django.db import transaction

from portal.kernel.bulk import values_copy
from portal.kernel.clock import now
from portal.ops.actor import Actor
from portal.ops.models import AuditEvent


def audit_record(
    *,
    acting_user: Actor,
    action: str,
    subject: Any,
    before: dict[str, Any] | None = None,
    after: dict[str, Any] | None = None,
    reason: str = "",
    department_id: int | None = None,
) -> AuditEvent:
    """Record that `acting_user` did `action` on `subject` (a model instance with `uid` where it has one).

    `before` and `after` hold only the fields that changed, JSON-ready, and never secrets.
    """
    values = audit_row(
        acting_user=acting_user, action=action, subject=subject, before=before, after=after, reason=reason,
        department_id=department_id,
    )  # fmt: skip
    _of_a_change()
    row = AuditEvent(**values._asdict())
    row.save(force_insert=True)
    return row


class AuditRow(NamedTuple):
    """An audit row that is not written yet: its columns."""

    at: datetime
    action: str
    actor_id: int | None
    actor_name: str
    via: str
    object_type: str
    object_uid: UUID | None
    object_label: str
    department_id: int | None
    before: dict[str, Any]
    after: dict[str, Any]
    reason: str
    request_id: str
    address: str | None


def audit_row(
    *,
    acting_user: Actor,
    action: str,
    subject: Any,
    before: dict[str, Any] | None = None,
    after: dict[str, Any] | None = None,
    reason: str = "",
    department_id: int | None = None,
) -> AuditRow:
    """The same, not written yet: for changes of many things at once, written by `audit_record_many`."""
    return AuditRow(
        at=now(),
        action=action,
        actor_id=acting_user.user_id,
        actor_name=acting_user.name,
        via=acting_user.via,
        object_type=subject._meta.label_lower,
        object_uid=getattr(subject, "uid", None),
        object_label=str(subject)[:300],
        department_id=department_id if department_id is not None else getattr(subject, "department_id", None),
        before=before or {},
        after=after or {},
        reason=reason,
        request_id=acting_user.request_id,
        address=acting_user.address,
    )


def audit_record_many(rows: Iterable[AuditRow]) -> int:
    """Write prepared rows by COPY, inside the transaction of the changes that they tell of; returns how many."""
    _of_a_change()
    return values_copy(AuditEvent, AuditRow._fields, rows)


def _of_a_change() -> None:
    if not transaction.get_connection().in_atomic_block:
        raise RuntimeError("an audit row belongs to the transaction of the change it tells of")
