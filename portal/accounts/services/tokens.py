"""API tokens: made, revoked, rotated by their owner. The value leaves this module once."""

from __future__ import annotations

import secrets
from datetime import datetime, timedelta

from django.db import transaction
from django.utils.translation import gettext_lazy as _

from portal.accounts.hashes import token_hash
from portal.accounts.models import ApiToken, User
from portal.accounts.policy import policy_of
from portal.kernel.clock import now
from portal.kernel.errors import Conflict, Invalid, Refused
from portal.kernel.models import advance
from portal.ops.actor import Actor
from portal.ops.services import audit_record

SCOPES = ("read", "request", "approve", "admin")
LONGEST = timedelta(days=366)
DEFAULT_LIFE = timedelta(days=90)
MOST_TOKENS = 50
PREFIX = "gpp_"


def token_create(
    *,
    acting_user: Actor,
    user: User,
    name: str,
    scopes: list[str],
    expires_at: datetime | None = None,
) -> tuple[ApiToken, str]:
    """Make a token of one's own; returns it with its value, of which only the hash is kept.

    `expires_at` defaults to 90 days from now and lies at most 366 days ahead. A token never makes tokens.
    Errors: `Refused` ``not_yours`` or ``needs_session``; `Invalid` by field; `Conflict` ``too_many_tokens``.
    """
    if acting_user.user_id != user.pk:
        raise Refused(code="not_yours", detail=_("A token is made by its owner alone."))
    if acting_user.via == "token":
        raise Refused(code="needs_session", detail=_("A token cannot make tokens. Sign in for that."))
    moment = now()
    end = expires_at or moment + DEFAULT_LIFE
    name = name.strip()
    if not 0 < len(name) <= 80:
        raise Invalid.field("name", _("A name of 1 to 80 characters is needed."))
    if not scopes or not set(scopes) <= set(SCOPES):
        raise Invalid.field("scopes", _("At least one of: %(known)s.") % {"known": ", ".join(SCOPES)})
    if not moment < end <= moment + LONGEST:
        raise Invalid.field("expires_at", _("The end lies between now and 366 days from now."))
    with transaction.atomic():
        User.objects.select_for_update().get(pk=user.pk)
        if ApiToken.objects.filter(user=user, revoked_at=None, expires_at__gt=moment).count() >= MOST_TOKENS:
            raise Conflict(code="too_many_tokens", detail=_("You have 50 tokens. Revoke one first."))
        token, value = _make(user, name, [s for s in SCOPES if s in scopes], end)
        audit_record(
            acting_user=acting_user,
            action="token.created",
            subject=token,
            after={"name": name, "scopes": token.scopes, "expires_at": end.isoformat()},
        )
    return token, value


def token_revoke(*, acting_user: Actor, token: ApiToken, reason: str = "") -> ApiToken:
    """End a token at once: its owner, an administrator of people, or the token itself."""
    if not acting_user.is_system and acting_user.user_id != token.user_id:
        policy_of(acting_user.user).require(policy_of(acting_user.user).administers_people)
    moment = now()
    with transaction.atomic():
        if not advance(ApiToken.objects.filter(pk=token.pk, revoked_at=None), revoked_at=moment):
            raise Conflict(code="token_revoked", detail=_("This token is revoked already."))
        token.refresh_from_db()
        audit_record(
            acting_user=acting_user,
            action="token.revoked",
            subject=token,
            after={"revoked_at": moment.isoformat()},
            reason=reason.strip(),
        )
    return token


def token_rotate(*, acting_user: Actor, token: ApiToken) -> tuple[ApiToken, str]:
    """Replace a token by one of the same name, scopes and length of life; the old one ends at once.

    Its owner may, or the token itself. Errors as `token_create`; `Conflict` for one that is over.
    """
    if acting_user.user_id != token.user_id:
        raise Refused(code="not_yours", detail=_("A token is rotated by its owner alone."))
    if acting_user.via == "token" and acting_user.token_uid != str(token.uid):
        raise Refused(code="needs_session", detail=_("A token rotates itself alone. Sign in for the others."))
    moment = now()
    with transaction.atomic():
        row = ApiToken.objects.select_for_update(of=("self",)).select_related("user").get(pk=token.pk)
        if row.revoked_at is not None or (row.expires_at is not None and row.expires_at <= moment):
            raise Conflict(code="token_over", detail=_("This token is over. Make a new one."))
        life = (row.expires_at - row.created_at) if row.expires_at is not None else DEFAULT_LIFE
        advance(ApiToken.objects.filter(pk=row.pk), revoked_at=moment)
        fresh, value = _make(row.user, row.name, list(row.scopes), moment + min(life, LONGEST))
        audit_record(
            acting_user=acting_user,
            action="token.rotated",
            subject=fresh,
            before={"token": str(row.uid), "prefix": row.prefix},
            after={"token": str(fresh.uid), "prefix": fresh.prefix},
        )
    return fresh, value


def _make(user: User, name: str, scopes: list[str], end: datetime) -> tuple[ApiToken, str]:
    value = PREFIX + secrets.token_urlsafe(32)
    moment = now()
    token = ApiToken.objects.create(
        user=user,
        name=name,
        prefix=value[:8],
        hash=token_hash(value),
        scopes=scopes,
        expires_at=end,
        created_at=moment,
        updated_at=moment,
    )
    return token, value
