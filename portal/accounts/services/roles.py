"""Roles: bind one to a department's subtree or to the installation, for a time; end it."""

from __future__ import annotations

from datetime import datetime, timedelta

from django.db import IntegrityError, transaction
from django.db.models import Q
from django.utils.translation import gettext_lazy as _

from portal.accounts.models import Department, Role, RoleBinding, User
from portal.accounts.services.common import lock_administrators, require_people_admin, shown
from portal.accounts.services.users import is_last_administrator
from portal.kernel.clock import now
from portal.kernel.errors import Conflict, Invalid, Refused
from portal.kernel.models import advance
from portal.ops.actor import Actor
from portal.ops.outbox import outbox_add
from portal.ops.services import audit_record

_MICROSECOND = timedelta(microseconds=1)


def role_grant(
    *,
    acting_user: Actor,
    user: User,
    role: str,
    department: Department | None = None,
    valid_from: datetime | None = None,
    valid_to: datetime | None = None,
) -> RoleBinding:
    """Bind `role` over `department` and all below it (None: the installation), from `valid_from` to `valid_to`.

    Only pool administrators of the installation grant. Nobody gives himself authority over others: any role
    but researcher needs another administrator. Errors: `Refused` ``self_grant``, `Invalid` by field,
    `Conflict` ``role_held`` where the same binding overlaps.
    """
    require_people_admin(acting_user)
    if role not in Role.values:
        raise Invalid.field("role", _("One of: %(known)s.") % {"known": ", ".join(Role.values)})
    if acting_user.user_id == user.pk and role != Role.RESEARCHER:
        raise Refused(
            code="self_grant", detail=_("Nobody gives himself a role over others. Another administrator can.")
        )
    start = valid_from or now()
    if valid_to is not None and valid_to <= max(start, now()):
        raise Invalid.field("valid_to", _("The end lies before the start, or is past."))
    if department is not None and not department.is_open:
        raise Invalid.field("department", _("This department is closed."))
    with transaction.atomic():
        User.objects.select_for_update().get(pk=user.pk)
        if not User.objects.filter(pk=user.pk, is_active=True).exists():
            raise Conflict(code="user_suspended", detail=_("This person is suspended."))
        overlapping = RoleBinding.objects.filter(user=user, role=role, department=department).filter(
            Q(valid_to=None) | Q(valid_to__gt=start)
        )
        if valid_to is not None:
            overlapping = overlapping.filter(valid_from__lt=valid_to)
        if overlapping.exists():
            raise _held()
        try:
            with transaction.atomic():
                binding = RoleBinding.objects.create(
                    user=user,
                    role=role,
                    department=department,
                    valid_from=start,
                    valid_to=valid_to,
                    granted_by_name=acting_user.name,
                )
        except IntegrityError as error:
            raise _held() from error
        audit_record(acting_user=acting_user, action="role.granted", subject=binding, after=_told(binding))
        outbox_add("accounts.role_granted", _payload(binding), key=user.username)
    return binding


def role_withdraw(*, acting_user: Actor, binding: RoleBinding, reason: str = "") -> RoleBinding:
    """End a binding now; one that has not begun is taken back. History keeps both.

    Errors: `Conflict` ``role_ended`` for one that is over, ``last_administrator`` for the last one.
    """
    require_people_admin(acting_user)
    moment = now()
    with transaction.atomic():
        lock_administrators()
        row = (
            RoleBinding.objects.select_for_update(of=("self",))
            .select_related("user", "department")
            .get(pk=binding.pk)
        )
        if row.valid_to is not None and row.valid_to <= moment:
            raise Conflict(code="role_ended", detail=_("This role has ended already."))
        ends_rule = row.role == Role.POOL_ADMIN and row.department_id is None and row.valid_to is None
        if ends_rule and is_last_administrator(row.user):
            raise Conflict(
                code="last_administrator",
                detail=_("This is the last pool administrator of the installation. Name another one first."),
            )
        before = _told(row)
        if row.valid_from > moment:  # taken back before it began: it never holds
            start, end = moment - _MICROSECOND, moment
        else:
            start, end = row.valid_from, max(moment, row.valid_from + _MICROSECOND)
        advance(RoleBinding.objects.filter(pk=row.pk), valid_from=start, valid_to=end)
        row.refresh_from_db()
        audit_record(
            acting_user=acting_user,
            action="role.withdrawn",
            subject=row,
            before=before,
            after={"valid_to": shown(row.valid_to)},
            reason=reason.strip(),
        )
        outbox_add("accounts.role_withdrawn", _payload(row), key=row.user.username)
    return row


def _held() -> Conflict:
    return Conflict(
        code="role_held",
        detail=_("This person holds this role there already, at least for a part of the time."),
    )


def _told(binding: RoleBinding) -> dict[str, object]:
    return {
        "user": binding.user.username,
        "role": binding.role,
        "department": binding.department.name if binding.department is not None else "*",
        "valid_from": shown(binding.valid_from),
        "valid_to": shown(binding.valid_to),
    }


def _payload(binding: RoleBinding) -> dict[str, object]:
    return {
        "user": str(binding.user.uid),
        "user_id": binding.user_id,
        "binding": str(binding.uid),
        "role": binding.role,
        "department": str(binding.department.uid) if binding.department is not None else None,
        "department_id": binding.department_id,
        "valid_to": shown(binding.valid_to),
    }
