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

LONGEST_MINIMUM_S = 30 * 86400


def mode_set(
    *,
    acting_user: Actor,
    department: Department | None,
    mode: str | None,
    willing: bool = False,
    minimum_s: tuple[int | None, int | None] | None = None,
    reason: str = "",
) -> DepartmentMode | None:
    """Set how far taking back acts in a department and below it (None: in the installation).

    ``mode`` None takes the department's own away: it follows the one above again. ``minimum_s``: for how many seconds
    after its start its work is left alone by its own department, and by owners (None each: as above); None leaves
    both as they are.
    """
    require_pool_admin(acting_user)
    _check_minimum(department, minimum_s)
    if not reason.strip():
        raise Invalid.field("reason", _("Say why."), code="reason_missing")
    if mode is not None and mode not in DepartmentMode.Mode.values:
        raise Invalid.field("mode", _("Pilot, roll-out or enforce."))
    with transaction.atomic():
        row = DepartmentMode.objects.select_for_update().filter(department=department).first()
        before = _told(row)
        minimum = minimum_s if minimum_s is not None else _minimum_of(row)
        subject: Any = department
        if mode is None and minimum == (None, None):
            if row is None:
                return None
            row.delete()
            row = None
        elif row is None:
            row = DepartmentMode.objects.create(
                department=department,
                mode=mode or "",
                willing=willing,
                min_run_preempt_s=minimum[0],
                min_run_reclaim_s=minimum[1],
                reason=reason.strip(),
                set_by_name=acting_user.name,
            )
        else:
            advance(
                DepartmentMode.objects.filter(pk=row.pk),
                mode=mode or "",
                willing=willing,
                min_run_preempt_s=minimum[0],
                min_run_reclaim_s=minimum[1],
                reason=reason.strip(),
                set_by_name=acting_user.name,
            )
            row.refresh_from_db()
        after = _told(row)
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


def _check_minimum(department: Department | None, minimum_s: tuple[int | None, int | None] | None) -> None:
    names = ("min_run_preempt_s", "min_run_reclaim_s")
    for name, value in zip(names, minimum_s or (None, None), strict=True):
        if value is not None and department is None:
            raise Invalid.field(name, _("For the installation the scheduling policy says it."))
        if value is None:
            continue
        # Pages hand on what was typed where it is no number: it is refused here.
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= LONGEST_MINIMUM_S:
            raise Invalid.field(name, _("Between 0 and 30 days; empty means as the department above."))


def _minimum_of(row: DepartmentMode | None) -> tuple[int | None, int | None]:
    return (None, None) if row is None else (row.min_run_preempt_s, row.min_run_reclaim_s)


def _told(row: DepartmentMode | None) -> dict[str, Any]:
    """A setting as the audit has it."""
    if row is None:
        return {"mode": None}
    told: dict[str, Any] = {"mode": row.mode or None, "willing": row.willing}
    for name in ("min_run_preempt_s", "min_run_reclaim_s"):
        if getattr(row, name) is not None:
            told[name] = getattr(row, name)
    return told


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
