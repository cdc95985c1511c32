"""Delegation: a deputy decides in somebody's place during a time, never on own requests or on the
principal's.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from django.db import transaction
from django.utils.translation import gettext_lazy as _

from portal.accounts.models import User
from portal.accounts.policy import Policy
from portal.kernel.clock import now
from portal.kernel.errors import Conflict, Invalid, Refused
from portal.kernel.models import advance
from portal.ops.actor import Actor
from portal.ops.services.audit import audit_record
from quotas.models import Delegation

LONGEST = timedelta(days=366)


def delegation_create(
    *,
    acting_user: Actor,
    policy: Policy,
    deputy: User,
    ends_at: datetime,
    starts_at: datetime | None = None,
    principal: User | None = None,
) -> Delegation:
    """Let ``deputy`` decide in the acting person's place; an administrator may do it for somebody who is
    away.
    """
    if acting_user.user is None:
        raise Refused(code="person_needed", detail=_("Only a person can delegate."))
    who = principal or acting_user.user
    if who.pk != acting_user.user.pk:
        policy.require(policy.administers_people)
        if deputy.pk == acting_user.user.pk:
            raise Refused(code="self_approval", detail=_("An administrator cannot become a deputy this way."))
    start = starts_at or now()
    if deputy.pk == who.pk:
        raise Invalid.field("deputy", _("Choose another person."))
    if not deputy.is_active:
        raise Invalid.field("deputy", _("{name} is not active.").format(name=deputy.get_full_name()))
    if ends_at <= max(start, now()):
        raise Invalid.field("ends_at", _("The end has to lie in the future, after the start."))
    if ends_at - start > LONGEST:
        raise Invalid.field("ends_at", _("At most a year; longer needs a role of its own."))
    with transaction.atomic():
        made = Delegation.objects.create(principal=who, deputy=deputy, starts_at=start, ends_at=ends_at)
        audit_record(
            acting_user=acting_user,
            action="delegation.created",
            subject=made,
            after={"deputy": deputy.username, "from": start.isoformat(), "to": ends_at.isoformat()},
        )
        return made


def delegation_revoke(*, acting_user: Actor, policy: Policy, delegation: Delegation) -> Delegation:
    """End it at once: by the principal, the deputy, or an administrator."""
    if acting_user.user_id not in (delegation.principal_id, delegation.deputy_id):
        policy.require(policy.administers_people)
    with transaction.atomic():
        if not advance(Delegation.objects.filter(pk=delegation.pk, revoked_at=None), revoked_at=now()):
            raise Conflict(code="delegation_over", detail=_("This delegation was ended already."))
        delegation.refresh_from_db()
        audit_record(acting_user=acting_user, action="delegation.revoked", subject=delegation)
        return delegation
