"""Grants: what a department may have of a flavour during a time; and the limits on the usage rows that
follow.

Lowering stops nothing: the department shows "over by n" and new starts wait. Sums that do not add up are
refused unless an administrator overrides them; the warning is then kept with the grant's audit.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from django.db import transaction
from django.db.backends.postgresql.psycopg_any import DateTimeTZRange
from django.db.models import Q
from django.utils.translation import gettext as _

from portal.accounts.models import Department
from portal.accounts.policy import Policy
from portal.kernel.clock import now
from portal.kernel.errors import Conflict, Invalid
from portal.kernel.units import gpus_from_milli
from portal.ops.actor import Actor
from portal.ops.outbox import outbox_add
from portal.ops.services.audit import audit_record
from quotas.models import GpuFlavour, QuotaGrant, QuotaUsage
from quotas.selectors.budgets import stopped_roots
from quotas.selectors.grants import GrantNumbers, SumCheck, grant_numbers, sum_checks
from quotas.selectors.trees import department_parents, grants_now
from quotas.services.locks import flavour_lock
from quotas.services.usage import limits_copy

MOST_MILLI = 10_000_000_000
LONGEST_REASON = 1000


@dataclass(slots=True)
class Granted:
    """The new grant and the warnings that were overridden with it."""

    grant: QuotaGrant
    warnings: list[str] = field(default_factory=list)


def grant_set(
    *,
    acting_user: Actor,
    policy: Policy | None,
    department: Department,
    flavour: GpuFlavour,
    guaranteed: int,
    borrow_limit: int | None = None,
    lend_limit: int | None = None,
    hard_cap: int | None = None,
    weight: int = 1,
    starts_at: datetime | None = None,
    ends_at: datetime | None = None,
    reason: str = "",
    override: bool = False,
    lent_from: QuotaGrant | None = None,
    expect: GrantNumbers | None = None,
) -> Granted:
    """Put numbers (milli-GPU; None = unlimited, 0 = none) in force from ``starts_at`` (now) to ``ends_at``
    (open).

    What was in force before continues up to the start and, where the end is given, after it again.
    ``expect``: the numbers that the page showed; Conflict when others are in force meanwhile. ``policy``
    None: the caller has checked (an approved quota change). Raises Invalid (amounts, order of times),
    Conflict ``quota_sum``.
    """
    numbers = GrantNumbers(guaranteed, borrow_limit, lend_limit, hard_cap, weight)
    if policy is not None:
        policy.require(may_set_grants(policy, department.pk))
    check_numbers(numbers)
    if len(reason) > LONGEST_REASON:
        raise Invalid.field("reason", _("At most {n} signs.").format(n=LONGEST_REASON))
    with transaction.atomic():
        flavour_lock(flavour.pk)
        moment = now()
        start = max(starts_at, moment) if starts_at is not None else moment
        if ends_at is not None and ends_at <= start:
            raise Invalid.field("ends_at", _("The end lies before the start."))
        before = grant_numbers(department.pk, flavour.pk, start)
        if expect is not None and before != expect:
            raise Conflict(
                code="version_changed",
                detail=_("Somebody changed these numbers meanwhile. Look at them again."),
            )
        failed = [c for c in sum_checks({department.pk: numbers}, flavour.pk, start) if not c.holds]
        if failed and not override:
            raise sum_error(failed[0])
        _make_room(department.pk, flavour.pk, start, ends_at)
        grant = QuotaGrant.objects.create(
            department=department,
            flavour=flavour,
            **numbers.as_fields(),
            during=DateTimeTZRange(start, ends_at),
            lent_from=lent_from,
            granted_by_name=acting_user.name,
            reason=reason,
        )
        warnings = [str(sum_error(c).detail) for c in failed]
        audit_record(
            acting_user=acting_user,
            action="quota.grant_set",
            subject=grant,
            before=before.as_fields() if before is not None else {},
            after={
                **numbers.as_fields(),
                "flavour": flavour.code,
                "from": start.isoformat(),
                "to": ends_at.isoformat() if ends_at else None,
                **({"overridden": warnings} if warnings else {}),
            },
            reason=reason,
            department_id=department.pk,
        )
        if start <= moment:
            limits_apply(flavour_id=flavour.pk)
        return Granted(grant, warnings)


def grants_end(*, acting_user: Actor, department_id: int, reason: str) -> int:
    """End all that a department may have, now and later, and put what follows in force: it is closed. Its use
    goes on as borrowed. Returns how many grants ended or were dropped.
    """
    moment, done = now(), 0
    with transaction.atomic():
        rows = QuotaGrant.objects.filter(
            department_id=department_id, during__overlap=DateTimeTZRange(moment, None)
        )
        for flavour_id in sorted(set(rows.values_list("flavour_id", flat=True))):
            flavour = flavour_lock(flavour_id)
            here = rows.filter(flavour_id=flavour_id)
            before = [GrantNumbers.of(grant).as_fields() for grant in here.order_by("during")]
            _make_room(department_id, flavour_id, moment, None)
            audit_record(
                acting_user=acting_user,
                action="quota.grant_ended",
                subject=flavour,
                before={"grants": before},
                after={"flavour": flavour.code, "to": moment.isoformat()},
                reason=reason,
                department_id=department_id,
            )
            limits_apply(flavour_id=flavour_id)
            done += len(before)
    return done


def limits_apply(*, flavour_id: int) -> int:
    """Bring the limits on the usage rows of a flavour to the grants now in force, in one transaction under
    lock; returns how many rows changed. Run when grants change, and by the sweep when one begins or ends.
    """
    with transaction.atomic():
        flavour = flavour_lock(flavour_id)
        limits = limits_now(flavour_id)
        changed = limits_copy(flavour_id=flavour_id, limits=limits)
        if changed:
            outbox_add(
                "quotas.limits_changed", {"flavour": str(flavour.uid), "cause": "grant"}, key=flavour.code
            )
        return changed


def limits_now(flavour_id: int) -> dict[int, GrantNumbers]:
    """The limits that hold now: those of the grants in force, and nothing to borrow for a department whose budget
    stops and is used up (it keeps its guarantee, or where it has no grant what is guaranteed below it).
    """
    limits = {pk: GrantNumbers.of(grant) for pk, grant in grants_now(flavour_id, now()).items()}
    stopped = stopped_roots()
    if not stopped:
        return limits
    below: dict[int, list[int]] = defaultdict(list)
    for pk, parent in department_parents().items():
        if parent is not None:
            below[parent].append(pk)

    def guaranteed(pk: int) -> int:
        return limits[pk].guaranteed if pk in limits else sum(guaranteed(child) for child in below[pk])

    held_back = {
        pk: replace(limits.get(pk) or GrantNumbers(guaranteed=guaranteed(pk)), borrow_limit=0)
        for pk in stopped
    }
    return limits | held_back


def limits_sweep() -> int:
    """Apply grants that began or ended since the last run, and budgets that are used up or no longer hold; returns
    how many flavours changed. Safe to run twice, and after a missed night.
    """
    moment = now()
    due = QuotaUsage.objects.filter(granted=True).values_list("flavour_id", flat=True).distinct()
    starting = (
        QuotaGrant.objects.filter(during__contains=moment).values_list("flavour_id", flat=True).distinct()
    )
    return sum(
        1
        for flavour_id in sorted(set(due) | set(starting))
        if _differs(flavour_id) and limits_apply(flavour_id=flavour_id)
    )


def check_numbers(numbers: GrantNumbers) -> None:
    """Invalid with every amount that is negative or absurd."""
    values = numbers.as_fields()
    text = _("0 or more; empty means unlimited where a limit may be empty.")
    wrong = [name for name, value in values.items() if value is not None and not 0 <= value <= MOST_MILLI]
    if wrong:
        raise Invalid(
            code="invalid", detail=text, errors=[{"pointer": name, "detail": text} for name in wrong]
        )
    if numbers.hard_cap is not None and numbers.hard_cap < numbers.guaranteed:
        raise Invalid.field("hard_cap", _("A hard cap below the guarantee would make the guarantee void."))


def may_set_grants(policy: Policy, department_id: int) -> bool:
    """Administrators of the installation, or those bound to the department or above."""
    return policy.administers_pool or department_id in policy.scope("pool_admin")


def sum_error(check: SumCheck) -> Conflict:
    """Conflict with the sum that does not add up."""
    detail = _("{level}: the guarantees below it sum to {below}, more than its own {own}.").format(
        level=check.level, below=gpus_from_milli(check.below), own=gpus_from_milli(check.own)
    )
    if check.installation:
        detail = _("{below} guaranteed in all, more than the {own} installed.").format(
            below=gpus_from_milli(check.below), own=gpus_from_milli(check.own)
        )
    return Conflict(
        code="quota_sum",
        detail=detail,
        blocking={"level": check.level, "limit": check.own, "used": 0, "requested": check.below},
        extra={"overridable": True},
    )


def _differs(flavour_id: int) -> bool:
    rows = QuotaUsage.objects.filter(flavour_id=flavour_id, granted=True)
    return limits_now(flavour_id) != {row.department_id: GrantNumbers.of(row) for row in rows}


def _make_room(department_id: int, flavour_id: int, start: datetime, end: datetime | None) -> None:
    """Cut grants that overlap [start, end): the part before stays, the part after comes back as a grant of
    its own; one that would have begun later and lies inside is dropped (the audit trail keeps it).
    """
    overlapping = QuotaGrant.objects.select_for_update().filter(
        Q(department_id=department_id, flavour_id=flavour_id), during__overlap=DateTimeTZRange(start, end)
    )
    for old in overlapping.order_by("during"):
        lower, upper = old.during.lower, old.during.upper
        tail = end is not None and (upper is None or upper > end)
        values: dict[str, Any] = {
            name: getattr(old, name)
            for name in ("department_id", "flavour_id", "lent_from_id", "granted_by_name", "reason")
        }
        values |= GrantNumbers.of(old).as_fields()
        if lower < start:
            old.during = DateTimeTZRange(lower, start)
            old.save(update_fields=["during"])
        elif old.lendings.exists():
            old.during = DateTimeTZRange(lower, lower)
            old.save(update_fields=["during"])
        else:
            old.delete()
        if tail:
            QuotaGrant.objects.create(**values, during=DateTimeTZRange(end, upper))
