"""More time for what runs: judged by the approval rules as an ask of its own."""

from __future__ import annotations

from django.utils.translation import gettext_lazy as _

from portal.accounts.policy import DepartmentTree
from portal.kernel.errors import Refused
from portal.kernel.units import MS_PER_SECOND
from quotas.engine import approval
from quotas.models import CapacityRequest
from quotas.selectors.fit import department_codes
from quotas.services.approval_policy import policy_default_ensure


def extension_check(*, request: CapacityRequest, beyond_s: int) -> None:
    """Raise Refused (`extension_needs_approval`) unless the rules let `beyond_s` more seconds pass by themselves.

    `beyond_s` counts all time after the end that was approved, so that many small extensions are one large one.
    """
    if beyond_s <= 0 or request.flavour is None:
        return
    cost = request.cost_at_most_micro
    if cost is not None and request.duration_s:
        cost = cost * beyond_s // request.duration_s
    ask = approval.Ask(
        amount_milli=request.charge_milli,
        flavour=request.flavour.code,
        duration_ms=beyond_s * MS_PER_SECOND,
        cost_micro=cost,
        over_guarantee=request.over_quota,
        job_class=request.work_class,
        interruptible=request.interruptible,
        nodes=request.nodes,
        departments=department_codes(DepartmentTree.load(), request.department_id),
    )
    plan = approval.evaluate(approval.parse_policy(policy_default_ensure().rules), ask)
    if plan.outcome == "refused" or plan.steps:
        raise Refused(
            code="extension_needs_approval",
            detail=_("So much more time needs approval: clone the request and ask again."),
            extra={"rules": list(plan.matched), "roles": [step.role for step in plan.steps]},
        )
