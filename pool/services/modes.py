"""How far taking back acts, department by department: pilot, roll-out, enforce. Inherited over the tree.

What a mode spares is kept as advice, counted, and shown; nothing is done and nobody is told.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.db import IntegrityError, transaction
from django.db.models import F
from django.utils.translation import gettext_lazy as _

from pool.models import Allocation, DepartmentMode, ReclaimAdvice, ReclaimConsent
from pool.services.nodes import require_pool_admin
from portal.accounts.models import Department
from portal.kernel.clock import now
from portal.kernel.errors import Invalid, Refused
from portal.kernel.models import advance
from portal.ops.actor import Actor
from portal.ops.outbox import outbox_add
from portal.ops.services import audit_record
from quotas.models import CapacityRequest


def mode_set(
    *,
    acting_user: Actor,
    department: Department | None,
    mode: str | None,
    willing: bool = False,
    reason: str = "",
) -> DepartmentMode | None:
    """Set how far taking back acts in a department and below it (None: in the installation).

    ``mode`` None takes the department's own setting away: it follows the one above again.
    """
    require_pool_admin(acting_user)
    if not reason.strip():
        raise Invalid.field("reason", _("Say why."), code="reason_missing")
    if mode is not None and mode not in DepartmentMode.Mode.values:
        raise Invalid.field("mode", _("Pilot, roll-out or enforce."))
    with transaction.atomic():
        row = DepartmentMode.objects.select_for_update().filter(department=department).first()
        before = {"mode": row.mode, "willing": row.willing} if row is not None else {"mode": None}
        subject: Any = department
        if mode is None:
            if row is None:
                return None
            row.delete()
            row = None
        elif row is None:
            row = DepartmentMode.objects.create(
                department=department,
                mode=mode,
                willing=willing,
                reason=reason.strip(),
                set_by_name=acting_user.name,
            )
        else:
            advance(
                DepartmentMode.objects.filter(pk=row.pk),
                mode=mode,
                willing=willing,
                reason=reason.strip(),
                set_by_name=acting_user.name,
            )
            row.refresh_from_db()
        after = {"mode": row.mode, "willing": row.willing} if row is not None else {"mode": None}
        audit_record(
            acting_user=acting_user,
            action="reclaim_mode.set",
            subject=subject if subject is not None else row,
            before=before,
            after=after,
            reason=reason.strip(),
            department_id=department.pk if department is not None else None,
        )
        outbox_add("pool.capacity_changed", {"cause": "reclaim_mode"})
    return row


def consent_set(*, acting_user: Actor, request: CapacityRequest, willing: bool) -> bool:
    """A holder takes part in the roll-out with this request, or no longer. True where that changed."""
    if not acting_user.is_system and acting_user.user_id != request.requester_id:
        raise Refused(code="forbidden", detail=_("Only its holder may say this."))
    with transaction.atomic():
        if willing:
            try:
                with transaction.atomic():
                    ReclaimConsent.objects.create(request=request, given_by_name=acting_user.name, at=now())
            except IntegrityError:
                return False
        elif not ReclaimConsent.objects.filter(request=request).delete()[0]:
            return False
        audit_record(
            acting_user=acting_user,
            action="request.reclaim_consent",
            subject=request,
            before={"willing": not willing},
            after={"willing": willing},
            department_id=request.department_id,
        )
    return True


def advice_note(
    *,
    allocation_id: int,
    cause: str,
    rule: str,
    mode: str,
    figures: Mapping[str, Any],
    for_request_id: int | None = None,
) -> ReclaimAdvice:
    """Note what would have been taken back; the same advice again is counted."""
    at = now()
    with transaction.atomic():
        row, made = ReclaimAdvice.objects.get_or_create(
            allocation=Allocation(pk=allocation_id),
            cause=cause,
            for_request_id=for_request_id,
            defaults={
                "rule": rule[:64],
                "mode": mode,
                "figures": dict(figures),
                "first_at": at,
                "last_at": at,
            },
        )
        if not made:
            advance(
                ReclaimAdvice.objects.filter(pk=row.pk),
                times=F("times") + 1,
                last_at=at,
                rule=rule[:64],
                mode=mode,
                figures=dict(figures),
            )
            row.refresh_from_db()
    return row
