"""People: create, change, suspend, bring back, passwords, preferences."""

from __future__ import annotations

import re
import zoneinfo
from typing import Any

from django.conf import settings
from django.contrib.auth.password_validation import validate_password
from django.core.exceptions import ValidationError
from django.core.validators import validate_email
from django.db import IntegrityError, transaction
from django.db.models import F
from django.utils.translation import gettext_lazy as _

from portal.accounts.models import ApiToken, Department, Role, RoleBinding, User
from portal.accounts.services.common import (
    difference,
    fields_of,
    lock_administrators,
    quick_hash,
    require_people_admin,
    temporary_password,
)
from portal.kernel.clock import now
from portal.kernel.errors import Conflict, FieldProblem, Invalid, PreconditionFailed, Refused
from portal.ops.actor import Actor
from portal.ops.outbox import outbox_add
from portal.ops.services import audit_record

EDITABLE = ("display_name", "email", "home_department", "system_account", "language", "time_zone")
OWN = ("language", "time_zone", "theme")
LEASES_AT_SUSPENSION = ("end", "keep")
_USERNAME = re.compile(r"^[a-z0-9][a-z0-9._-]{0,63}$")
_ACCOUNT = re.compile(r"^[a-z_][a-z0-9._-]{0,31}$")
_NEVER = {"root", "daemon", "bin", "sys", "adm", "nobody", "toor", "system", "postgres", "slurm", "munge"}


def user_problems(values: dict[str, Any]) -> list[FieldProblem]:
    """What is wrong with a person's fields (only those given), before anything is written."""
    found: list[FieldProblem] = []

    def wrong(pointer: str, detail: Any) -> None:
        found.append({"pointer": pointer, "detail": detail})

    if "username" in values:
        name = values["username"]
        if not _USERNAME.match(name):
            wrong("username", _("Small letters, digits, dot, dash and underscore; 64 at most."))
        elif name in _NEVER:
            wrong("username", _("This name belongs to the operating system."))
    if "display_name" in values and not 0 < len(values["display_name"]) <= 120:
        wrong("display_name", _("A name of 1 to 120 characters is needed."))
    if values.get("email"):
        try:
            validate_email(values["email"])
        except ValidationError:
            wrong("email", _("This is no mail address."))
    account = values.get("system_account", "")
    if account and (not _ACCOUNT.match(account) or account in _NEVER):
        wrong(
            "system_account", _("A person's account: small letters, digits, dash; never root or a service.")
        )
    if "language" in values and values["language"] not in dict(settings.LANGUAGES):
        wrong("language", _("One of: %(known)s.") % {"known": ", ".join(dict(settings.LANGUAGES))})
    if values.get("time_zone") and values["time_zone"] not in zoneinfo.available_timezones():
        wrong("time_zone", _("A zone name like Asia/Shanghai."))
    if "theme" in values and values["theme"] not in User.Theme.values:
        wrong("theme", _("One of: %(known)s.") % {"known": ", ".join(User.Theme.values)})
    department = values.get("home_department")
    if department is not None and not department.is_open:
        wrong("home_department", _("This department is closed."))
    return found


def _refuse(problems: list[FieldProblem]) -> None:
    if problems:
        raise Invalid(code="invalid", detail=_("Some fields need a change."), errors=problems)


def password_check(password: str, user: User) -> None:
    """Raise `Invalid` at field `password` when the rules for passwords say no."""
    try:
        validate_password(password, user)
    except ValidationError as error:
        _refuse([{"pointer": "password", "detail": text} for text in error.messages])


def user_create(
    *,
    acting_user: Actor,
    username: str,
    display_name: str,
    email: str = "",
    home_department: Department | None = None,
    system_account: str = "",
    language: str | None = None,
    time_zone: str = "",
    password: str | None = None,
    must_change_password: bool = True,
) -> User:
    """Make a person without any role. Without `password` nobody can sign in as them until one is set.

    Errors: `Invalid` by field; `Conflict` ``username_taken``.
    """
    require_people_admin(acting_user)
    values: dict[str, Any] = {
        "username": username.strip().lower(),
        "display_name": display_name.strip(),
        "email": email.strip(),
        "home_department": home_department,
        "system_account": system_account.strip(),
        "language": language or settings.LANGUAGE_CODE,
        "time_zone": time_zone.strip(),
    }
    _refuse(user_problems(values))
    user = User(**values, must_change_password=must_change_password, date_joined=now())
    if password is None:
        user.set_unusable_password()
    else:
        password_check(password, user)
        user.set_password(password)
    with transaction.atomic():
        try:
            with transaction.atomic():
                user.save()
        except IntegrityError as error:
            raise Conflict(
                code="username_taken",
                detail=_("Somebody has this user name already."),
                errors=[{"pointer": "username", "detail": _("Taken: choose another one.")}],
            ) from error
        _before, after = difference({}, {k: v for k, v in values.items() if v not in ("", None)})
        audit_record(
            acting_user=acting_user,
            action="user.created",
            subject=user,
            after=after,
            department_id=user.home_department_id,
        )
    return user


def user_update(
    *, acting_user: Actor, user: User, expected_version: int | None = None, **changes: Any
) -> User:
    """Change fields of `EDITABLE`. Errors: `Invalid` by field, `PreconditionFailed` on an older version."""
    require_people_admin(acting_user)
    unknown = set(changes) - set(EDITABLE)
    if unknown:
        raise TypeError(f"not editable: {sorted(unknown)}")
    changes = {k: v.strip() if isinstance(v, str) else v for k, v in changes.items()}
    return _change(acting_user, user, changes, "user.changed", expected_version)


def preferences_save(*, acting_user: Actor, user: User, **changes: Any) -> User:
    """A person's own language, time zone and theme."""
    if acting_user.user_id != user.pk:
        raise Refused(code="not_yours", detail=_("These are another person's preferences."))
    unknown = set(changes) - set(OWN)
    if unknown:
        raise TypeError(f"not a preference: {sorted(unknown)}")
    return _change(acting_user, user, changes, "user.preferences_changed", None)


def _change(
    acting_user: Actor, user: User, changes: dict[str, Any], action: str, expected_version: int | None
) -> User:
    with transaction.atomic():
        row = User.objects.select_for_update(of=("self",)).select_related("home_department").get(pk=user.pk)
        if expected_version is not None and row.version != expected_version:
            raise PreconditionFailed(
                code="version_changed",
                detail=_("It was changed by somebody else meanwhile. Load it again and repeat the change."),
                extra={"current_version": row.version},
            )
        before, after = difference(fields_of(row, changes), changes)
        if not after:
            return row
        _refuse(user_problems({k: changes[k] for k in after}))
        for name in after:
            setattr(row, name, changes[name])
        row.version += 1
        row.save(update_fields=[*after, "version"])
        audit_record(
            acting_user=acting_user,
            action=action,
            subject=row,
            before=before,
            after=after,
            department_id=row.home_department_id,
        )
    return row


def is_last_administrator(user: User) -> bool:
    """Whether nobody else active holds the installation's pool administration without an end."""
    administrators = RoleBinding.objects.filter(
        role=Role.POOL_ADMIN, department=None, valid_to=None, valid_from__lte=now(), user__is_active=True
    )
    return administrators.filter(user=user).exists() and not administrators.exclude(user=user).exists()


def user_suspend(*, acting_user: Actor, user: User, reason: str, leases: str = "end") -> User:
    """End a person's access at once: no sign-in, tokens revoked, sessions and sockets closed.

    `leases`: "end" (with the usual notice and grace) or "keep"; carried out by the pool, which hears of it
    by the outbox. Roles stay on record and hold again after a reactivation.
    Errors: `Invalid` without a reason, `Conflict` for oneself, the last administrator, or one suspended
    before.
    """
    require_people_admin(acting_user)
    if not reason.strip():
        raise Invalid.field("reason", _("Say in a sentence why."))
    if leases not in LEASES_AT_SUSPENSION:
        raise Invalid.field("leases", _("Choose whether the leases end or go on."))
    if acting_user.user_id == user.pk:
        raise Conflict(
            code="self_suspend", detail=_("You cannot suspend yourself. Another administrator can.")
        )
    moment = now()
    with transaction.atomic():
        lock_administrators()
        row = User.objects.select_for_update().get(pk=user.pk)
        if not row.is_active:
            raise Conflict(code="user_suspended", detail=_("This person is suspended already."))
        if is_last_administrator(row):
            raise Conflict(
                code="last_administrator",
                detail=_("This is the last pool administrator of the installation. Name another one first."),
            )
        row.is_active = False
        row.suspended_at = moment
        row.session_generation += 1
        row.version += 1
        row.save(update_fields=["is_active", "suspended_at", "session_generation", "version"])
        revoked = ApiToken.objects.filter(user=row, revoked_at=None).update(
            revoked_at=moment, updated_at=moment, version=F("version") + 1
        )
        audit_record(
            acting_user=acting_user,
            action="user.suspended",
            subject=row,
            before={"is_active": True},
            after={"is_active": False, "tokens_revoked": revoked, "leases": leases},
            reason=reason.strip(),
            department_id=row.home_department_id,
        )
        outbox_add(
            "accounts.user_suspended",
            {"user": str(row.uid), "user_id": row.pk, "leases": leases, "reason": reason.strip()},
            key=row.username,
        )
    return row


def user_reactivate(*, acting_user: Actor, user: User, reason: str = "") -> User:
    """Let a suspended person in again. Tokens stay revoked; the old sessions stay closed."""
    require_people_admin(acting_user)
    with transaction.atomic():
        row = User.objects.select_for_update().get(pk=user.pk)
        if row.is_active:
            raise Conflict(code="user_active", detail=_("This person is active."))
        row.is_active = True
        row.suspended_at = None
        row.version += 1
        row.save(update_fields=["is_active", "suspended_at", "version"])
        audit_record(
            acting_user=acting_user,
            action="user.reactivated",
            subject=row,
            before={"is_active": False},
            after={"is_active": True},
            reason=reason.strip(),
            department_id=row.home_department_id,
        )
    return row


def password_reset(*, acting_user: Actor, user: User) -> tuple[User, str]:
    """Give a person a temporary password (returned, shown once); they must choose another one at sign-in."""
    require_people_admin(acting_user)
    value = temporary_password()
    with transaction.atomic():
        row = User.objects.select_for_update().get(pk=user.pk)
        row.password = quick_hash(value)
        row.must_change_password = True
        row.version += 1
        row.save(update_fields=["password", "must_change_password", "version"])
        audit_record(
            acting_user=acting_user,
            action="user.password_reset",
            subject=row,
            department_id=row.home_department_id,
        )
    return row, value


def password_change(*, acting_user: Actor, user: User, old_password: str, new_password: str) -> User:
    """A person's own change of password; all other sessions end. Errors: `Invalid` by field."""
    if acting_user.user_id != user.pk or acting_user.via == "token":
        raise Refused(code="not_yours", detail=_("Only the person, signed in, changes this password."))
    with transaction.atomic():
        row = User.objects.select_for_update().get(pk=user.pk)
        if not row.check_password(old_password):
            _refuse([{"pointer": "old_password", "detail": _("This is not the present password.")}])
        if old_password == new_password:
            _refuse([{"pointer": "password", "detail": _("Choose one that differs from the present one.")}])
        password_check(new_password, row)
        row.set_password(new_password)
        row.must_change_password = False
        row.version += 1
        row.save(update_fields=["password", "must_change_password", "version"])
        audit_record(acting_user=acting_user, action="user.password_changed", subject=row)
    return row
