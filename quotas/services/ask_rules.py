"""What departments let their people choose when they ask."""

from __future__ import annotations

from django.db import transaction
from django.utils.translation import gettext as _

from portal.accounts.models import Department, Role
from portal.accounts.policy import Policy
from portal.kernel.errors import Invalid
from portal.kernel.models import advance
from portal.ops.actor import Actor
from portal.ops.services.audit import audit_record
from quotas.models import AskRule
from quotas.selectors.ask_rules import HIGHEST
from quotas.selectors.ask_rules import priority_most as most_of


def ask_rule_set(
    *, acting_user: Actor, policy: Policy, department: Department, priority_most: int | None
) -> AskRule | None:
    """Set the highest priority that a department's people may ask, or take the rule away (None). Pool
    administrators; leads for what they lead, up to what holds for them. Standing requests keep their priority.
    """
    policy.require(policy.administers_pool or department.pk in policy.scope(Role.LEAD))
    if priority_most is not None and not 0 <= priority_most <= HIGHEST:
        raise Invalid.field("priority_most", _("A priority lies between 0 and 100."))
    if not policy.administers_pool:
        above = HIGHEST if department.parent_id is None else most_of(policy.tree, department.parent_id)
        if (HIGHEST if priority_most is None else priority_most) > above:
            raise Invalid.field(
                "priority_most", _("At most {n}, as the department above allows.").format(n=above)
            )
    with transaction.atomic():
        row = AskRule.objects.select_for_update().filter(department=department).first()
        before = row.priority_most if row is not None else None
        if priority_most is None:
            if row is not None:
                row.delete()
            row = None
        elif row is None:
            row = AskRule.objects.create(department=department, priority_most=priority_most)
        else:
            advance(AskRule.objects.filter(pk=row.pk), priority_most=priority_most)
            row.refresh_from_db()
        audit_record(
            acting_user=acting_user,
            action="ask_rule.set",
            subject=department,
            before={"priority_most": before},
            after={"priority_most": priority_most},
            department_id=department.pk,
        )
    return row
