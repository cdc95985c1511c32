"""Tokens: shown once, hashed, scoped, expiring, revoked at once."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from portal.accounts.models import ApiToken
from portal.accounts.services import token_create, token_revoke, token_rotate
from portal.kernel.clock import now, set_clock
from portal.kernel.errors import Conflict, Invalid, Refused
from portal.ops.actor import Actor
from portal.ops.models import AuditEvent
from tests.portal.builders import actor, admin, person

pytestmark = pytest.mark.django_db
T0 = datetime(2026, 6, 16, tzinfo=UTC)


def test_only_the_hash_is_kept() -> None:
    user = person("x")
    with set_clock(T0):
        token, value = token_create(
            acting_user=actor(user), user=user, name="laptop", scopes=["request", "read"]
        )
    assert value.startswith("gpp_")
    assert len(value) == 47
    assert token.scopes == ["read", "request"]
    assert token.expires_at == T0 + timedelta(days=90)
    kept = str(list(ApiToken.objects.values())) + str(list(AuditEvent.objects.values()))
    assert value not in kept
    assert token.prefix == value[:8]


@pytest.mark.parametrize(
    ("values", "pointer"),
    [
        ({"name": " "}, "name"),
        ({"scopes": []}, "scopes"),
        ({"scopes": ["read", "root"]}, "scopes"),
        ({"expires_at": T0}, "expires_at"),
        ({"expires_at": T0 + timedelta(days=367)}, "expires_at"),
    ],
)
def test_wrong_fields(values: dict[str, object], pointer: str) -> None:
    user = person("x")
    with set_clock(T0), pytest.raises(Invalid) as caught:
        token_create(acting_user=actor(user), user=user, **{"name": "n", "scopes": ["read"], **values})  # type: ignore[arg-type]
    assert caught.value.errors[0]["pointer"] == pointer
    assert not ApiToken.objects.exists()


def test_nobody_makes_rotates_or_revokes_anothers() -> None:
    boss, user, other = admin(), person("x"), person("y")
    token, _v = token_create(acting_user=actor(user), user=user, name="n", scopes=["read"])
    for act in (
        lambda: token_create(acting_user=actor(boss), user=user, name="n", scopes=["read"]),
        lambda: token_create(acting_user=actor(user, via="token"), user=user, name="n", scopes=["read"]),
        lambda: token_rotate(acting_user=actor(boss), token=token),
        lambda: token_revoke(acting_user=actor(other), token=token),
        lambda: token_rotate(acting_user=Actor(user=user, via="token", token_uid="another"), token=token),
    ):
        with pytest.raises(Refused):
            act()
    assert list(ApiToken.objects.values_list("revoked_at", flat=True)) == [None]
    token_revoke(acting_user=actor(boss), token=token)
    token.refresh_from_db()
    assert token.revoked_at is not None
    with pytest.raises(Conflict):
        token_revoke(acting_user=actor(boss), token=token)


def test_rotation_replaces_at_once_and_keeps_the_length_of_life() -> None:
    user = person("x")
    with set_clock(T0):
        token, value = token_create(
            acting_user=actor(user),
            user=user,
            name="ci",
            scopes=["request"],
            expires_at=T0 + timedelta(days=30),
        )
    later = T0 + timedelta(days=20)
    with set_clock(later):
        fresh, other = token_rotate(
            acting_user=Actor(user=user, via="token", token_uid=str(token.uid)), token=token
        )
        token.refresh_from_db()
        assert token.revoked_at == later
        assert (fresh.name, fresh.scopes, fresh.expires_at) == ("ci", ["request"], later + timedelta(days=30))
        assert other != value
        with pytest.raises(Conflict):
            token_rotate(acting_user=actor(user), token=token)
    assert now() > later
