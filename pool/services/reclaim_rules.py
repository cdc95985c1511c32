"""The rules of taking back: read the active version, publish another."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from django.db import transaction
from django.utils.translation import gettext_lazy as _

from pool.engine.ladder import RuleError, Rules, rules_of
from pool.models import ReclaimRuleSet
from pool.services.nodes import require_pool_admin
from portal.kernel.errors import Conflict, Invalid
from portal.kernel.models import advance
from portal.ops.actor import Actor
from portal.ops.services import audit_record


def rules_active() -> tuple[ReclaimRuleSet | None, Rules]:
    """The active version (None: nobody ever published one) and its rules."""
    row = ReclaimRuleSet.objects.filter(active=True).first()
    return row, rules_of(row.values if row is not None else {})


def rules_publish(
    *, acting_user: Actor, values: dict[str, Any], reason: str, seen_version: int | None = None
) -> ReclaimRuleSet:
    """Make these rules the active ones; rules not named keep their present value.

    ``seen_version``: the version (its id, 0 for none) that the editor looked at. Conflict where another one
    was published meanwhile; Invalid with the field for a value out of bounds.
    """
    require_pool_admin(acting_user)
    if not reason.strip():
        raise Invalid.field("reason", _("Say why."), code="reason_missing")
    with transaction.atomic():
        before = ReclaimRuleSet.objects.select_for_update().filter(active=True).first()
        known = before.pk if before is not None else 0
        if seen_version is not None and seen_version != known:
            raise Conflict(
                code="rules_changed", detail=_("Somebody published other rules meanwhile: look again.")
            )
        old = asdict(rules_of(before.values if before is not None else {}))
        try:
            new = asdict(rules_of({**old, **values}))
        except RuleError as error:
            raise _out_of_bounds(error) from error
        if before is not None:
            advance(ReclaimRuleSet.objects.filter(pk=before.pk), active=False)
        made = ReclaimRuleSet.objects.create(
            values=new, active=True, reason=reason.strip(), published_by_name=acting_user.name
        )
        changed = {name: value for name, value in new.items() if old[name] != value}
        audit_record(
            acting_user=acting_user,
            action="reclaim_rules.published",
            subject=made,
            before={name: old[name] for name in changed},
            after=changed,
            reason=reason.strip(),
        )
    return made


def _out_of_bounds(error: RuleError) -> Invalid:
    if error.low is None:
        return Invalid.field(error.name, _("Yes or no."), code="rule_out_of_bounds")
    detail = _("A whole number between {low} and {high}.").format(low=error.low, high=error.high)
    return Invalid.field(error.name, detail, code="rule_out_of_bounds")
