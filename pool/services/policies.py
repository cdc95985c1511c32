"""The scheduler's policy as data: draft, preview by replay, publish, roll back. A published version never changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import datetime
from typing import Any

from django.db import transaction
from django.utils.translation import gettext_lazy as _

from pool.engine.decide import decide
from pool.engine.model import Plan, Snapshot
from pool.engine.switches import BY_NAME, SwitchError, checked
from pool.models import SchedulerCycle, SchedulingPolicy
from pool.services.decisions import plan_again
from pool.services.nodes import require_pool_admin
from pool.services.snapshot import policy_active, policy_from, snapshot_load
from pool.services.snapshot_store import snapshot_stored
from portal.kernel.clock import now
from portal.kernel.errors import Conflict, DomainError, Invalid
from portal.kernel.models import advance
from portal.kernel.units import to_ms
from portal.ops.actor import Actor
from portal.ops.outbox import outbox_add
from portal.ops.services import audit_record
from quotas.models import CapacityRequest

PREVIEWED = 10
"""So many of the last stored whole decisions are decided again under a draft."""
TOLD = 20
DETAILS = {
    "unknown_switch": _("There is no such switch."),
    "not_a_flag": _("Yes or no."),
    "not_a_number": _("A whole number."),
    "not_a_choice": _("Not one of the choices."),
    "not_weights": _("A weight for each class of work."),
}


def policy_draft(
    *,
    acting_user: Actor,
    name: str,
    values: dict[str, Any],
    note: str = "",
    based_on: SchedulingPolicy | None = None,
) -> SchedulingPolicy:
    """Begin a version. ``values``: the switches that are to differ from the defaults. Nothing takes effect yet."""
    require_pool_admin(acting_user)
    if not name.strip():
        raise Invalid.field("name", _("It needs a name."), code="name_missing")
    with transaction.atomic():
        made = SchedulingPolicy.objects.create(
            name=name.strip()[:80],
            values=_checked(values),
            note=note.strip(),
            based_on=based_on,
            made_by_name=acting_user.name,
        )
        audit_record(
            acting_user=acting_user, action="policy.drafted", subject=made, after={"values": made.values}
        )
    return made


def policy_change(
    *,
    acting_user: Actor,
    policy: SchedulingPolicy,
    values: dict[str, Any],
    note: str | None = None,
    version: int,
) -> SchedulingPolicy:
    """Change a draft. Conflict `policy_published` for a version that was in force once, `version_changed` where
    somebody else was faster.
    """
    require_pool_admin(acting_user)
    wanted = _checked(values)
    with transaction.atomic():
        row = _locked(policy.pk)
        if row.published_at is not None:
            raise Conflict(code="policy_published", detail=_("A version that was in force never changes."))
        if row.version != version:
            raise Conflict(code="version_changed", detail=_("It was changed by somebody else meanwhile."))
        before = row.values
        advance(
            SchedulingPolicy.objects.filter(pk=row.pk),
            values=wanted,
            note=row.note if note is None else note.strip(),
            preview={},
            previewed_at=None,
        )
        audit_record(
            acting_user=acting_user,
            action="policy.changed",
            subject=row,
            before={"values": before},
            after={"values": wanted},
        )
        row.refresh_from_db()
    return row


def policy_discard(*, acting_user: Actor, policy: SchedulingPolicy) -> None:
    """Throw a draft away."""
    require_pool_admin(acting_user)
    with transaction.atomic():
        row = _locked(policy.pk)
        if row.published_at is not None:
            raise Conflict(code="policy_published", detail=_("A version that was in force never changes."))
        audit_record(
            acting_user=acting_user, action="policy.discarded", subject=row, before={"values": row.values}
        )
        SchedulingPolicy.objects.filter(based_on=row).update(based_on=row.based_on)
        row.delete()


def policy_publish(*, acting_user: Actor, policy: SchedulingPolicy, reason: str) -> SchedulingPolicy:
    """Put a version in force from the next cycle on: a draft, or one that was in force before."""
    require_pool_admin(acting_user)
    if not reason.strip():
        raise Invalid.field("reason", _("Say why."), code="reason_missing")
    with transaction.atomic():
        row = _locked(policy.pk)
        before = SchedulingPolicy.objects.select_for_update().filter(active=True).first()
        if before is not None and before.pk == row.pk:
            raise Conflict(code="policy_active", detail=_("This version is in force already."))
        _checked(row.values)
        if before is not None:
            advance(SchedulingPolicy.objects.filter(pk=before.pk), active=False)
        advance(
            SchedulingPolicy.objects.filter(pk=row.pk),
            active=True,
            published_at=row.published_at or now(),
            published_by_name=row.published_by_name or acting_user.name,
        )
        row.refresh_from_db()
        audit_record(
            acting_user=acting_user,
            action="policy.published",
            subject=row,
            before={"policy": str(before), "values": before.values} if before else {},
            after={"policy": str(row), "values": row.values},
            reason=reason.strip(),
        )
        outbox_add("pool.policy_published", {"policy": str(row.uid)}, key=str(row))
    return row


def policy_roll_back(*, acting_user: Actor, reason: str) -> SchedulingPolicy:
    """Put the version in force again that was published before the present one. Conflict where there is none."""
    require_pool_admin(acting_user)
    present = SchedulingPolicy.objects.filter(active=True).first()
    earlier = (
        SchedulingPolicy.objects.filter(published_at__lt=present.published_at)
        .order_by("-published_at")
        .first()
        if present is not None and present.published_at is not None
        else None
    )
    if earlier is None:
        raise Conflict(code="nothing_to_roll_back", detail=_("No version was in force before this one."))
    return policy_publish(acting_user=acting_user, policy=earlier, reason=reason)


def policy_preview(*, policy_id: int, last: int = PREVIEWED) -> dict[str, Any]:
    """Decide the last stored whole decisions, and what stands now, under a version; note what would differ.

    Reads only, but for the note on the version itself. Snapshots past their retention are left out.
    """
    policy = SchedulingPolicy.objects.get(pk=policy_id)
    rows: list[dict[str, Any]] = []
    cycles = SchedulerCycle.objects.filter(
        only__isnull=True, snapshot__isnull=False, decided_at_ms__isnull=False
    )
    for cycle in cycles.select_related("policy", "snapshot").order_by("-id")[:last]:
        assert cycle.snapshot is not None
        try:
            snapshot = snapshot_stored(cycle.snapshot)
        except DomainError:
            continue
        rows.append(
            {
                "cycle": str(cycle.uid),
                "number": cycle.pk,
                "at": cycle.started_at.isoformat(),
                **_difference(
                    plan_again(cycle, snapshot), plan_again(cycle, snapshot, policy.values), snapshot
                ),
            }
        )
    rows.insert(0, _now_under(policy, now()))
    preview = {"rows": rows, "decisions": len(rows)}
    SchedulingPolicy.objects.filter(pk=policy.pk).update(preview=preview, previewed_at=now())
    return preview


def _now_under(policy: SchedulingPolicy, at: datetime) -> dict[str, Any]:
    snapshot = snapshot_load().snapshot
    _row, present = policy_active()
    was = decide(snapshot, present, to_ms(at))
    would = decide(snapshot, policy_from(policy.values), to_ms(at))
    return {"cycle": "", "number": None, "at": at.isoformat(), **_difference(was, would, snapshot)}


def _difference(was: Plan, would: Plan, snapshot: Snapshot) -> dict[str, Any]:
    """What two plans for one snapshot do differently, in numbers and by the first requests concerned."""
    was_at = {place.request_id: place for place in was.places}
    would_at = {place.request_id: place for place in would.places}
    elsewhere = [
        pk
        for pk in was_at.keys() & would_at.keys()
        if (was_at[pk].members, was_at[pk].flavour) != (would_at[pk].members, would_at[pk].flavour)
    ]
    was_out = {one.allocation_id for one in was.evicts}
    would_out = {one.allocation_id for one in would.evicts}
    codes = {one.request_id: one.code for one in was.waiting}
    reasons = Counter(
        (codes[one.request_id], one.code)
        for one in would.waiting
        if one.request_id in codes and codes[one.request_id] != one.code
    )
    return {
        "same": was.ops == would.ops and not reasons,
        "waiting": len(snapshot.pending),
        "places": [len(was_at), len(would_at)],
        "evicts": [len(was_out), len(would_out)],
        "starts_too": _refs(would_at.keys() - was_at.keys()),
        "starts_not": _refs(was_at.keys() - would_at.keys()),
        "elsewhere": _refs(elsewhere),
        "taken_too": sorted(would_out - was_out)[:TOLD],
        "taken_not": sorted(was_out - would_out)[:TOLD],
        "reasons": [[before, after, count] for (before, after), count in reasons.most_common(TOLD)],
        "promises": [len(was.reserves), len(would.reserves)],
    }


def _refs(ids: Iterable[int]) -> list[str]:
    first = sorted(ids)[:TOLD]
    found = CapacityRequest.objects.in_bulk(first)
    return [found[pk].ref if pk in found else f"R-{pk}" for pk in first]


def _checked(values: dict[str, Any]) -> dict[str, Any]:
    try:
        return checked(values)
    except SwitchError as error:
        raise Invalid.field(error.name, _detail(error), code=f"policy_{error.code}") from error


def _detail(error: SwitchError) -> object:
    if error.code == "out_of_bounds":
        switch = BY_NAME[error.name]
        return _("A whole number between {low} and {high}.").format(low=switch.low, high=switch.high)
    return DETAILS[error.code]


def _locked(policy_id: int) -> SchedulingPolicy:
    return SchedulingPolicy.objects.select_for_update().get(pk=policy_id)
