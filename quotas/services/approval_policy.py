"""The approval policy: versions of rules as data, one of them in force."""

from __future__ import annotations

from typing import Any

from django.db import IntegrityError, transaction
from django.utils.translation import gettext_lazy as _

from portal.accounts.policy import Policy
from portal.kernel.clock import now
from portal.kernel.errors import Conflict, Invalid
from portal.kernel.models import advance
from portal.ops.actor import Actor, system
from portal.ops.services.audit import audit_record
from quotas.engine.approval import DEFAULT_POLICY, PolicyError, parse_policy
from quotas.models import ApprovalPolicy


def policy_default_ensure() -> ApprovalPolicy:
    """The policy in force; the first call of an installation puts the default one in force."""
    found = ApprovalPolicy.objects.filter(active=True).first()
    if found is not None:
        return found
    try:
        with transaction.atomic():
            made = ApprovalPolicy.objects.create(
                name="default",
                rules=DEFAULT_POLICY,
                active=True,
                published_at=now(),
                published_by_name="system",
            )
            audit_record(
                acting_user=system("first start"),
                action="approval_policy.published",
                subject=made,
                after={"rules": DEFAULT_POLICY},
            )
            return made
    except IntegrityError:
        return ApprovalPolicy.objects.get(active=True)


def rules_check(rules: Any) -> list[dict[str, Any]]:
    """The rules as given when they parse, else Invalid with the place of the mistake."""
    try:
        parse_policy(rules)
    except PolicyError as error:
        raise Invalid(
            code="policy_invalid",
            detail=_("The rules could not be read."),
            errors=[{"pointer": f"rules{error.pointer}", "detail": error.message}],
        ) from None
    checked: list[dict[str, Any]] = rules
    return checked


def policy_publish(
    *, acting_user: Actor, policy: Policy, rules: Any, name: str = "", base_version: int | None = None
) -> ApprovalPolicy:
    """Put a new version in force; the old one stays readable. ``base_version`` is the id of the version that
    the rules were made from: Conflict when another is in force meanwhile. Open steps keep the rules of their
    time.
    """
    policy.require(policy.administers_pool)
    checked = rules_check(rules)
    with transaction.atomic():
        old = ApprovalPolicy.objects.select_for_update().filter(active=True).first()
        if base_version is not None and old is not None and old.pk != base_version:
            raise Conflict(
                code="version_changed",
                detail=_("Another version of the policy was published meanwhile."),
                extra={"current_version": old.pk},
            )
        if old is not None:
            advance(ApprovalPolicy.objects.filter(pk=old.pk), active=False)
        made = ApprovalPolicy.objects.create(
            name=name[:80] or "policy",
            rules=checked,
            active=True,
            published_at=now(),
            published_by_name=acting_user.name,
        )
        audit_record(
            acting_user=acting_user,
            action="approval_policy.published",
            subject=made,
            before={"rules": old.rules} if old is not None else {},
            after={"rules": checked},
        )
        return made
