"""Departments ask for other numbers, or to be lent guarantee by another department for a period.

They go through the same approval steps as requests: for other numbers the nearest lead above who may decide,
then the administrators; for a lending the lender's lead comes first. The last agreement sets the grants.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from django.db import transaction
from django.utils.translation import gettext as _

from portal.accounts.models import Department, Role
from portal.accounts.policy import Policy
from portal.kernel.clock import now
from portal.kernel.errors import Conflict, Invalid, Refused
from portal.kernel.models import advance
from portal.ops.actor import Actor
from portal.ops.outbox import outbox_add
from portal.ops.services.audit import audit_record
from quotas.models import GpuFlavour, QuotaChange, QuotaGrant
from quotas.selectors.approvers import Deciders
from quotas.selectors.grants import GrantNumbers, grant_numbers, sum_checks
from quotas.services.approval_steps import Wanted, steps_make, steps_skip
from quotas.services.grants import check_numbers, grant_set, sum_error
from quotas.services.locks import quota_change_lock
from quotas.transitions import move_change

TIMEOUT_HOURS = 72
LONGEST_PURPOSE = 2000


def quota_change_submit(
    *,
    acting_user: Actor,
    policy: Policy,
    department: Department,
    flavour: GpuFlavour,
    asked: GrantNumbers,
    purpose: str,
    starts_at: datetime | None = None,
    ends_at: datetime | None = None,
    override: bool = False,
) -> QuotaChange:
    """Ask for other numbers of a department. Leads of it or of those above, and administrators, may ask.

    What the approvers could only refuse is refused here: Conflict ``quota_sum`` where the guarantees would pass
    the parent's or what is installed, unless ``override`` asks all the same (approvers may override sums).
    """
    policy.require(may_ask_change(policy, department.pk))
    check_numbers(asked)
    _check_text_and_time(purpose, starts_at, ends_at)
    moment = starts_at or now()
    before = grant_numbers(department.pk, flavour.pk, moment) or GrantNumbers()
    if before == asked:
        raise Invalid.field("guaranteed", _("These are the numbers in force already."))
    failed = [c for c in sum_checks({department.pk: asked}, flavour.pk, moment) if not c.holds]
    if failed and not override:
        raise sum_error(failed[0])
    return _submit(
        acting_user,
        policy,
        department,
        flavour,
        before.as_fields(),
        asked.as_fields(),
        purpose,
        starts_at,
        ends_at,
        None,
    )


def lending_submit(
    *,
    acting_user: Actor,
    policy: Policy,
    department: Department,
    lender: Department,
    flavour: GpuFlavour,
    amount_milli: int,
    purpose: str,
    starts_at: datetime | None,
    ends_at: datetime,
) -> QuotaChange:
    """Ask another department to lend part of its guarantee for a period; afterwards all is as before."""
    policy.require(may_ask_change(policy, department.pk))
    _check_text_and_time(purpose, starts_at, ends_at)
    if department.pk == lender.pk:
        raise Invalid.field("lender", _("A department cannot lend to itself."))
    held = grant_numbers(lender.pk, flavour.pk, starts_at or now())
    most = held.guaranteed if held is not None else 0
    if not 0 < amount_milli <= most:
        raise Invalid.field(
            "amount",
            _("{name} has {n} guaranteed; lend between a part and all of it.").format(
                name=lender.name, n=most / 1000
            ),
        )
    before = grant_numbers(department.pk, flavour.pk, starts_at or now()) or GrantNumbers()
    return _submit(
        acting_user,
        policy,
        department,
        flavour,
        before.as_fields(),
        {"lend": amount_milli},
        purpose,
        starts_at,
        ends_at,
        lender,
    )


def quota_change_revise(
    *,
    acting_user: Actor,
    policy: Policy,
    change: QuotaChange,
    asked: Mapping[str, Any],
    purpose: str,
    version: int | None = None,
) -> QuotaChange:
    """Change what is asked while it is undecided or was returned; the steps begin anew."""
    _check_purpose(purpose)
    with transaction.atomic():
        held = quota_change_lock(change.pk)
        if version is not None and held.version != version:
            raise Conflict(code="version_changed", detail=_("It was changed by somebody else meanwhile."))
        if held.requester_id != acting_user.user_id:
            raise Refused(code="not_yours", detail=_("Only its requester may change it."))
        values = dict(asked)
        if held.lender_id is None:
            check_numbers(GrantNumbers(**values))
        before = held.asked
        move_change(held, "change", asked=values, purpose=purpose.strip(), last_editor_id=acting_user.user_id)
        audit_record(
            acting_user=acting_user, action="quota_change.changed", subject=held, before=before, after=values
        )
        steps_make(held, _wanted(held, Deciders.load(policy.tree)))
        return held


def quota_change_withdraw(*, acting_user: Actor, policy: Policy, change: QuotaChange) -> QuotaChange:
    """Take it back while it is undecided."""
    with transaction.atomic():
        held = quota_change_lock(change.pk)
        if held.requester_id != acting_user.user_id:
            policy.require(policy.administers_pool)
        move_change(held, "withdraw", decided_at=now())
        steps_skip(held)
        audit_record(acting_user=acting_user, action="quota_change.withdrawn", subject=held)
        return held


def change_decided(*, acting_user: Actor, change: QuotaChange, override: bool = False) -> None:
    """Every agreement is there: set the grants. Runs under the change's lock; a sum that does not add up
    raises Conflict ``quota_sum`` and leaves the last step open.
    """
    start, end = change.starts_at, change.ends_at
    reason = _("quota change {ref}").format(ref=f"Q-{change.pk}")
    common: dict[str, Any] = {
        "acting_user": acting_user, "policy": None, "flavour": change.flavour, "starts_at": start, "ends_at":
        end, "reason": reason, "override": override,
    }  # fmt: skip
    if change.lender is None:
        numbers = GrantNumbers(**change.asked)
        granted = grant_set(department=change.department, **numbers.as_fields(), **common)
        result = {**numbers.as_fields(), "grant": str(granted.grant.uid), "warnings": granted.warnings}
    else:
        amount = change.asked["lend"]
        moment = max(start, now()) if start is not None else now()
        gives = grant_numbers(change.lender.pk, change.flavour_id, moment) or GrantNumbers()
        takes = grant_numbers(change.department_id, change.flavour_id, moment) or GrantNumbers()
        if gives.guaranteed < amount:
            raise Conflict(
                code="lender_short",
                detail=_("{name} has less guaranteed now than it was asked to lend.").format(
                    name=change.lender.name
                ),
                blocking={
                    "level": change.lender.name,
                    "limit": gives.guaranteed,
                    "used": 0,
                    "requested": amount,
                },
            )
        source = grant_set(
            department=change.lender,
            **{**gives.as_fields(), "guaranteed": gives.guaranteed - amount},
            **{**common, "override": True},
        )
        _lend_to(change, takes, amount, source.grant, common)
        result = {"lend": amount, "from": change.lender.code}
    advance(QuotaChange.objects.filter(pk=change.pk), granted=result)
    change.refresh_from_db()
    outbox_add(
        "quotas.change_decided",
        {"quota_change": str(change.uid), "decision": "approved"},
        key=str(change)[:100],
    )


def _lend_to(
    change: QuotaChange, takes: GrantNumbers, amount: int, source: QuotaGrant, common: dict[str, Any]
) -> None:
    cap = takes.hard_cap
    values = takes.as_fields() | {
        "guaranteed": takes.guaranteed + amount,
        "hard_cap": None if cap is None else max(cap, takes.guaranteed + amount),
    }
    grant_set(department=change.department, **values, **common, lent_from=source)


def may_ask_change(policy: Policy, department_id: int) -> bool:
    """Leads of the department or of one above, and administrators."""
    return department_id in policy.scope(Role.LEAD, Role.POOL_ADMIN)


def _submit(
    acting_user: Actor,
    policy: Policy,
    department: Department,
    flavour: GpuFlavour,
    old: dict[str, Any],
    asked: dict[str, Any],
    purpose: str,
    starts_at: datetime | None,
    ends_at: datetime | None,
    lender: Department | None,
) -> QuotaChange:
    if acting_user.user is None:
        raise Refused(code="person_needed", detail=_("Only a person can ask for quota."))
    with transaction.atomic():
        made = QuotaChange.objects.create(
            department=department,
            flavour=flavour,
            requester=acting_user.user,
            last_editor=acting_user.user,
            lender=lender,
            starts_at=starts_at,
            ends_at=ends_at,
            old=old,
            asked=asked,
            purpose=purpose.strip(),
        )
        audit_record(
            acting_user=acting_user,
            action="quota_change.submitted",
            subject=made,
            before=old,
            after={**asked, "flavour": flavour.code, "lender": lender.code if lender is not None else None},
            reason=purpose.strip(),
        )
        steps_make(made, _wanted(made, Deciders.load(policy.tree)))
        return made


def _wanted(change: QuotaChange, deciders: Deciders) -> list[Wanted]:
    """The lender's lead, the nearest lead above who may decide, then the administrators; at least one of
    them.
    """
    barred = deciders.barred(change)
    out: list[Wanted] = []
    for place, rule in ((change.lender_id, "lending"), (change.department_id, "quota-change")):
        nearest = deciders.lead_place(place, barred) if place is not None else None
        if nearest is not None and all(w.department_id != nearest[0] for w in out):
            out.append(Wanted(Role.LEAD, nearest[0], TIMEOUT_HOURS, rule))
    if deciders.holders(Role.POOL_ADMIN, change.department_id, barred):
        out.append(Wanted(Role.POOL_ADMIN, None, TIMEOUT_HOURS, "quota-change"))
    if not out:
        raise Conflict(
            code="no_approver",
            detail=_(
                "Nobody may decide this: a second department lead or pool administrator has to be appointed first."
            ),
        )
    return out


def _check_purpose(purpose: str) -> None:
    if not purpose.strip():
        raise Invalid.field("purpose", _("Say why: approvers read this."))
    if len(purpose.strip()) > LONGEST_PURPOSE:
        raise Invalid.field("purpose", _("At most {n} signs.").format(n=LONGEST_PURPOSE))


def _check_text_and_time(purpose: str, starts_at: datetime | None, ends_at: datetime | None) -> None:
    _check_purpose(purpose)
    if ends_at is not None and ends_at <= (starts_at or now()):
        raise Invalid.field("ends_at", _("The end lies before the start."))
