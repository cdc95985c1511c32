"""What the services of this room share: authority, differences, temporary passwords."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from datetime import datetime
from typing import Any

from django.contrib.auth.hashers import get_hasher, make_password
from django.db import models
from django.utils.translation import gettext_lazy as _

from portal.accounts.policy import policy_of
from portal.kernel.errors import Refused
from portal.kernel.locks import lock_in_transaction
from portal.ops.actor import Actor

_LETTERS = "abcdefghjkmnpqrstuvwxyz23456789"


def require_people_admin(acting_user: Actor) -> None:
    """Refuse unless the system itself or an administrator of people acts."""
    if acting_user.is_system:
        return
    if not policy_of(acting_user.user).administers_people:
        raise Refused(
            code="forbidden", detail=_("Only a pool administrator of the installation may do this.")
        )


def lock_administrators() -> None:
    """Serialise all that could take away the last administrator."""
    lock_in_transaction("accounts.administrators")


def lock_tree() -> None:
    """Serialise changes of the department tree; readers are not held up."""
    lock_in_transaction("accounts.tree")


def shown(value: Any) -> Any:
    """A field's value as the audit trail keeps it."""
    if isinstance(value, models.Model):
        return str(value)
    if isinstance(value, datetime):
        return value.isoformat()
    return value


def difference(before: dict[str, Any], after: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Only what changed, on both sides, ready for JSON."""
    changed = [k for k in after if before.get(k) != after[k]]
    return {k: shown(before.get(k)) for k in changed}, {k: shown(after[k]) for k in changed}


def fields_of(row: models.Model, names: Iterable[str]) -> dict[str, Any]:
    """The named fields of a row."""
    return {name: getattr(row, name) for name in names}


def temporary_password() -> str:
    """A first password of about 79 random bits, easy to read out: `mk4p-x7ta-q2hd-9wre`."""
    return "-".join("".join(secrets.choice(_LETTERS) for _i in range(4)) for _j in range(4))


def quick_hash(password: str) -> str:
    """Hash of a random temporary password with few rounds, so that an import of thousands takes seconds.

    The value has too many random bits to be guessed whatever the rounds; Django hashes anew at the first
    sign-in, and the person must choose another one then.
    """
    hasher = get_hasher()
    if hasattr(hasher, "iterations"):
        return str(hasher.encode(password, hasher.salt(), iterations=1000))  # type: ignore[call-arg]
    return make_password(password)
