"""The first sign-in of an installation without people."""

from __future__ import annotations

from dataclasses import dataclass

from django.db import transaction

from portal.accounts.models import Role, User
from portal.accounts.services.common import lock_administrators, temporary_password
from portal.accounts.services.roles import role_grant
from portal.accounts.services.users import user_create
from portal.ops.actor import system


@dataclass(frozen=True)
class FirstSignIn:
    """`created` is false where people exist already; then there is no password to tell."""

    username: str
    password: str
    created: bool


def first_admin_create(*, username: str = "admin", password: str = "") -> FirstSignIn:
    """Make the pool administrator of the installation, once: only while there is nobody at all.

    Without `password` one is made. It must be changed at the first sign-in. Two starts at once make one.
    """
    acting = system("first start", via="command")
    value = password or temporary_password()
    with transaction.atomic():
        lock_administrators()
        if User.objects.exists():
            first = User.objects.order_by("id").values_list("username", flat=True).first()
            return FirstSignIn(first or username, "", created=False)
        user = user_create(
            acting_user=acting,
            username=username,
            display_name="Administrator",
            password=value,
            must_change_password=True,
        )
        # no language yet: the first one who signs in is met in the browser's
        User.objects.filter(pk=user.pk).update(is_staff=True, is_superuser=True, language="")
        role_grant(acting_user=acting, user=user, role=Role.POOL_ADMIN)
    return FirstSignIn(user.username, value, created=True)


def first_administrator_create(*, login: str, password: str) -> bool:
    """`first_admin_create` for the supervisor, which has chosen both; whether somebody was made."""
    return first_admin_create(username=login, password=password).created
