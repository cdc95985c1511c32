"""Flavours on offer, and which of them meet a requirement."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from django.db.models import Q, QuerySet

from quotas.models import GpuFlavour

MIB_PER_GIB = 1024
NAME_TOLERANCE = 0.12  # "80 GB" cards report some 79.6 GiB, "48 GB" ones 45


def flavours_on_offer() -> QuerySet[GpuFlavour]:
    """What people may ask for, with capacity, in display order."""
    return (
        GpuFlavour.objects.filter(active=True).select_related("capacity").order_by("position", "name", "id")
    )


def find_flavour(key: str) -> GpuFlavour | None:
    """A flavour on offer by uid or code."""
    try:
        query = Q(uid=uuid.UUID(str(key)))
    except ValueError:
        query = Q(code=str(key))
    return flavours_on_offer().filter(query).first()


def unmet(flavour: GpuFlavour, requirement: Mapping[str, Any]) -> list[str]:
    """What of a requirement a flavour does not meet, as codes: memory, model, nvlink, mig, fp8; [] when all
    is met.

    ``memory_mib`` is meant as the name of a card says it: a card of 80 GB meets 80 GiB.
    """
    missing: list[str] = []
    wanted = int(requirement.get("memory_mib") or 0)
    if wanted and flavour.memory_mib < wanted * (1 - NAME_TOLERANCE):
        missing.append("memory")
    models = requirement.get("models") or []
    if models and flavour.code not in models and flavour.model_key not in models:
        missing.append("model")
    missing += [name for name in ("nvlink", "fp8") if requirement.get(name) and not getattr(flavour, name)]
    if requirement.get("mig") and not flavour.mig_capable:
        missing.append("mig")
    return missing


def is_empty_requirement(requirement: Mapping[str, Any]) -> bool:
    """Whether a requirement asks for nothing at all."""
    return not any(requirement.get(name) for name in ("memory_mib", "models", "nvlink", "mig", "fp8"))
