"""What was found about a GPU: healthy, suspect, fault, vanished; used by others; cordoned by people."""

from __future__ import annotations

from typing import Any

from django.db import transaction
from django.utils.translation import gettext_lazy as _

from pool.models import Gpu
from pool.services.capacity import capacity_refresh
from pool.services.nodes import require_pool_admin
from portal.kernel.clock import now
from portal.kernel.errors import Conflict, Invalid
from portal.kernel.models import advance
from portal.ops.actor import Actor
from portal.ops.outbox import outbox_add
from portal.ops.services import audit_record, incident_open, incident_resolve


def gpu_condition_set(
    *, acting_user: Actor, gpu: Gpu, condition: str, reason: str = "", facts: dict[str, Any] | None = None
) -> bool:
    """Note a new condition of a GPU; returns whether it changed. A worse one opens an incident once, a return
    to `ok` closes it. Nothing new is placed on a GPU that is not `ok`; what runs is not touched here."""
    if condition not in Gpu.Condition.values:
        raise Invalid.field("condition", _("There is no such condition."))
    with transaction.atomic():
        locked = Gpu.objects.select_for_update().select_related("node").get(pk=gpu.pk)
        if locked.condition == condition and locked.condition_reason == reason:
            return False
        before = {"condition": locked.condition, "reason": locked.condition_reason}
        advance(
            Gpu.objects.filter(pk=gpu.pk), condition=condition, condition_reason=reason, condition_since=now()
        )
        audit_record(
            acting_user=acting_user,
            action="gpu.condition",
            subject=locked,
            before=before,
            after={"condition": condition, "reason": reason},
        )
        key = f"gpu_condition:{locked.uid}"
        if condition == Gpu.Condition.OK:
            incident_resolve(dedupe_key=key, note="healthy again")
        elif condition != Gpu.Condition.RETIRED:
            severity = "critical" if condition in (Gpu.Condition.FAULT, Gpu.Condition.VANISHED) else "warning"
            incident_open(
                kind=f"gpu_{condition}",
                dedupe_key=key,
                severity=severity,
                subject=locked,
                facts={"node": locked.node.name, "index": locked.index, "reason": reason, **(facts or {})},
            )
        outbox_add(
            "pool.gpu_condition", {"gpu_uid": str(locked.uid), "condition": condition, "reason": reason}
        )
        capacity_refresh()
    gpu.refresh_from_db()
    return True


def gpu_cordon(*, acting_user: Actor, gpu: Gpu, cordoned: bool, reason: str) -> Gpu:
    """Take one card out of placement, or back. Needs a reason."""
    require_pool_admin(acting_user)
    if not reason.strip():
        raise Invalid.field("reason", _("Say why."), code="reason_missing")
    with transaction.atomic():
        changed = advance(
            Gpu.objects.filter(pk=gpu.pk).exclude(cordoned=cordoned),
            cordoned=cordoned,
            cordon_reason=reason.strip(),
        )
        if not changed:
            raise Conflict(code="gpu_state", detail=_("The GPU is in that state already."))
        audit_record(
            acting_user=acting_user,
            action="gpu.cordoned" if cordoned else "gpu.uncordoned",
            subject=gpu,
            before={"cordoned": not cordoned},
            after={"cordoned": cordoned},
            reason=reason.strip(),
        )
        capacity_refresh()
    gpu.refresh_from_db()
    return gpu


def gpu_foreign_use_set(*, gpu: Gpu, processes: list[dict[str, Any]]) -> bool:
    """Processes seen on a card without a lease (name, user, memory; never arguments): it is not free for us. One that
    is only ``awaited`` (the outside system put our work out for it) keeps the card from us, but is no incident yet."""
    with transaction.atomic():
        locked = Gpu.objects.select_for_update().select_related("node").get(pk=gpu.pk)
        had, seen = _seen(locked.foreign_use), _seen(processes)
        if locked.foreign_use == processes:
            return False
        Gpu.objects.filter(pk=gpu.pk).update(foreign_use=processes)
        key = f"foreign_use:{locked.uid}"
        if seen:
            incident_open(
                kind="foreign_use",
                dedupe_key=key,
                subject=locked,
                facts={"node": locked.node.name, "index": locked.index, "processes": seen},
            )
        elif had:
            incident_resolve(dedupe_key=key, note="the processes are gone")
    return True


def _seen(processes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [item for item in processes if not item.get("awaited")]
