"""Leases and nodes changed in the pool: tell the hubs which cards to read again."""

from __future__ import annotations

from typing import Any

from django.db.models import Q

from monitoring.services.bus import facts_changed
from pool.models import Gpu


def allocation_changed(payload: dict[str, Any]) -> None:
    """Subscriber of pool.allocation_*: the cards of that allocation."""
    uid = payload.get("allocation")
    if uid:
        facts_changed(gpu_ids=Gpu.objects.filter(leases__allocation__uid=uid).values_list("pk", flat=True))


def node_changed(payload: dict[str, Any]) -> None:
    """Subscriber of pool.node_state: the cards of that node."""
    uid = payload.get("node_uid") or payload.get("node")
    if uid:
        facts_changed(gpu_ids=Gpu.objects.filter(node__uid=uid).values_list("pk", flat=True))


def gpu_changed(payload: dict[str, Any]) -> None:
    """Subscriber of pool.gpu_condition."""
    found = (
        Gpu.objects.filter(Q(uid=payload.get("gpu_uid"))) if payload.get("gpu_uid") else Gpu.objects.none()
    )
    facts_changed(gpu_ids=found.values_list("pk", flat=True))


def capacity_changed(payload: dict[str, Any]) -> None:
    """Subscriber of pool.capacity_changed: cards came or went, so the list of cells may be another one."""
    facts_changed(inventory=True)
