"""What happened to cards: XIDs, lost and returned cards, processes without a lease. Recorded once, then acted upon."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import structlog
from django.db import transaction
from django.db.models import Q
from django.urls import reverse

from monitoring.engine.xid import BURST_S, effect_of, strongest
from monitoring.models import GpuEvent
from monitoring.services.bus import facts_changed
from pool.models import Allocation, Gpu, Lease, Node
from pool.services.conditions import gpu_condition_set
from pool.services.nodes import node_cordon
from portal.kernel.clock import now
from portal.notify.services.notices import notify
from portal.ops.actor import system
from portal.ops.models import Incident
from portal.ops.services import incident_open

log = structlog.get_logger(__name__)
ACTOR = system("health")
KINDS = {"xid", "gpu_lost", "gpu_back", "nvml_broken", "foreign_process", "foreign_gone"}
_DAY = timedelta(hours=24)


@cache
def xid_catalogue() -> dict[int, dict[str, Any]]:
    """Code → name, meaning, effect; shipped data."""
    raw = json.loads((Path(__file__).resolve().parents[1] / "data" / "xid.json").read_text(encoding="utf-8"))
    return {int(code): entry for code, entry in raw["codes"].items()}


def gpu_event_record(payload: dict[str, Any]) -> GpuEvent | None:
    """Subscriber of `pool.agent_event` {node_uid, gpu_uuid, kind, at, data}: keep it, then act on it. Idempotent.

    The pool itself acts on lost and returned cards and on foreign processes; what an XID means is judged here.
    """
    node = Node.objects.filter(uid=payload["node_uid"]).first()
    kind = str(payload.get("kind", ""))
    if node is None or kind not in KINDS:
        log.warning("gpu_event_unknown", kind=kind, node=payload.get("node_uid"))
        return None
    uuid = payload.get("gpu_uuid")
    card = Gpu.objects.filter(uuid=uuid, node=node).first() if uuid else None
    data = payload.get("data") or {}
    code = data.get("xid") if kind == "xid" and isinstance(data.get("xid"), int) else None
    at = _moment(payload.get("at"))
    entry = xid_catalogue().get(code) if code is not None else None
    facts = {
        key: data[key]
        for key in ("pid", "text", "name", "user", "mem_mib", "reason", "recovery_action")
        if key in data
    }
    with transaction.atomic():
        holders = list(_holders(card, at)) if card is not None else []
        facts["allocations"] = holders
        if kind == "xid":
            facts |= {"xid_name": (entry or {}).get("name", ""), "meaning": (entry or {}).get("meaning", "")}
            facts["effect"] = _effect(card, code, at, entry, data, holders)
        event, created = GpuEvent.objects.get_or_create(
            node=node, gpu=card, at=at, kind=kind, code=code, defaults={"facts": facts, "seen_at": now()}
        )
        if not created:
            return event
        _act(node, card, event)
    return event


def _moment(raw: Any) -> datetime:
    try:
        moment = datetime.fromisoformat(str(raw))
    except ValueError:
        return now()
    return moment if moment.tzinfo is not None else now()


def _holders(card: Gpu, at: datetime) -> list[str]:
    """Allocations that held the card at that moment."""
    leases = Lease.objects.filter(gpu=card, started_at__lte=at).filter(Q(ended_at=None) | Q(ended_at__gt=at))
    return [str(uid) for uid in leases.values_list("allocation__uid", flat=True).distinct()]


def _effect(
    card: Gpu | None,
    code: int | None,
    at: datetime,
    entry: dict[str, Any] | None,
    data: dict[str, Any],
    holders: list[str],
) -> str:
    if card is None or code is None:
        return effect_of(entry, data=data, repeated=False, owners=len(holders))
    before = list(
        GpuEvent.objects.filter(gpu=card, kind="xid", at__gt=at - _DAY, at__lte=at).exclude(at=at, code=code)
    )
    same = [event for event in before if event.code == code]
    owners = set(holders).union(*(event.facts.get("allocations", []) for event in same))
    own = effect_of(entry, data=data, repeated=bool(same), owners=len(owners))
    burst = [e.facts.get("effect", "ignore") for e in before if at - e.at <= timedelta(seconds=BURST_S)]
    return strongest([own, *(effect for effect in burst if effect != "restart_then_drain")])


def _act(node: Node, card: Gpu | None, event: GpuEvent) -> None:
    """Incidents, conditions and cordons that an event calls for."""
    if event.kind == "xid":
        facts = {
            "node": node.name,
            "gpu": card.index if card else None,
            "at": event.at.isoformat(),
            **event.facts,
        }
        _act_on_xid(node, card, event, facts)
    if card is not None:
        facts_changed(gpu_ids=[card.pk])


def _tell_holders(card: Gpu, event: GpuEvent) -> None:
    """Those who held the card then, once a day for the same code: they may have to save or restart their work."""
    for allocation in Allocation.objects.filter(uid__in=event.facts.get("allocations", [])).order_by("id"):
        notify(
            user_ids=[allocation.holder_id],
            kind="monitoring.xid_on_mine",
            subject=allocation,
            threshold=f"xid:{event.code}:{card.pk}:{event.at:%Y-%m-%d}",
            params={
                "ref": allocation.ref,
                "code": event.code,
                "card": f"{card.node.name}/{card.index}",
                "meaning": event.facts.get("meaning", ""),
                "effect": event.facts.get("effect", ""),
                "at": event.at,
            },
            url=reverse("pool:allocation", args=[allocation.uid]),
        )


def _act_on_xid(node: Node, card: Gpu | None, event: GpuEvent, facts: dict[str, Any]) -> None:
    effect = event.facts["effect"]
    if effect in ("ignore", "log_only"):
        return
    if card is not None:
        _tell_holders(card, event)
    severity = (
        Incident.Severity.CRITICAL if effect in ("drain_gpu", "drain_node") else Incident.Severity.WARNING
    )
    subject: Any = card if card is not None else node
    incident_open(
        kind="xid",
        dedupe_key=f"xid:{subject.uid}:{event.code}",
        severity=severity,
        subject=subject,
        facts={**facts, "code": event.code},
    )
    if effect == "drain_node" and node.schedulable == Node.Schedulable.OPEN:
        node_cordon(acting_user=ACTOR, node=node, reason=f"XID {event.code}")
    if card is not None and effect in ("drain_gpu", "drain_node"):
        gpu_condition_set(
            acting_user=ACTOR, gpu=card, condition="fault", reason=f"xid_{event.code}", facts=facts
        )
    elif card is not None and effect == "reset_when_idle" and card.condition == Gpu.Condition.OK:
        gpu_condition_set(
            acting_user=ACTOR, gpu=card, condition="suspect", reason=f"xid_{event.code}", facts=facts
        )
