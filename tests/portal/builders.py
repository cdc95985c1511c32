"""Builders of people and departments, through the real services."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from django.test import Client

from portal.accounts.models import Department, RoleBinding, User
from portal.accounts.services import department_create, role_grant, token_create, user_create
from portal.ops.actor import Actor, system

SYSTEM = system("test", via="command")
PASSWORD = "correct horse 7 battery"
LONG_AGO = datetime(2000, 1, 1, tzinfo=UTC)
_count = 0


def actor(user: User, via: str = "page") -> Actor:
    """`user` acting by a page."""
    return Actor(user=user, via=via)


def person(username: str = "", *roles: tuple[str, Department | None], **values: Any) -> User:
    """A person with a password, who need not change it, and with `roles`."""
    global _count
    _count += 1
    name = username or f"person{_count}"
    values.setdefault("display_name", name.replace(".", " ").title())
    values.setdefault("language", "en")
    user = user_create(
        acting_user=SYSTEM, username=name, password=PASSWORD, must_change_password=False, **values
    )
    for role, where in roles:
        role_grant(acting_user=SYSTEM, user=user, role=role, department=where, valid_from=LONG_AGO)
    return user


def admin(username: str = "zhao.rui") -> User:
    """A pool administrator of the installation."""
    return person(username, ("pool_admin", None))


def department(code: str, parent: Department | None = None, name: str = "") -> Department:
    """A department."""
    return department_create(acting_user=SYSTEM, code=code, name=name or code.title(), parent=parent)


def client_of(user: User) -> Client:
    """A browser signed in as `user`."""
    client = Client()
    client.force_login(user, backend="django.contrib.auth.backends.ModelBackend")
    return client


def token_of(user: User, *scopes: str) -> str:
    """The value of a fresh token of `user`."""
    return token_create(acting_user=actor(user), user=user, name="test", scopes=list(scopes or ["read"]))[1]


def bearer(value: str) -> dict[str, str]:
    """Client keyword arguments of a token."""
    return {"HTTP_AUTHORIZATION": f"Bearer {value}"}


def binding(user: User) -> RoleBinding:
    """The only binding of `user`."""
    return RoleBinding.objects.get(user=user)
