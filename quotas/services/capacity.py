"""What exists of each flavour, told by the pool; guarantees are held against it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.db import transaction
from django.utils.translation import gettext_lazy as _

from portal.kernel.clock import now
from portal.kernel.errors import Invalid
from portal.ops.outbox import outbox_add
from quotas.models import FlavourCapacity, PoolName
from quotas.services.locks import flavour_lock


def capacity_write(
    *,
    flavour_id: int,
    installed_milli: int,
    healthy_milli: int,
    largest_node_gpus: int,
    cuda_max: str | None = None,
    facts: dict[str, Any] | None = None,
) -> FlavourCapacity:
    """Write the capacity of a flavour in milli-GPU. 0 ≤ healthy ≤ installed; raises Invalid otherwise.
    ``cuda_max``: the newest CUDA version that a node's driver runs; ``facts``: what its nodes offer (see the
    model); None leaves what was told before.

    Idempotent: the same figures write nothing. A lower capacity stops nothing that runs; new starts see it at
    once, because the same lock guards debits. Topic ``quotas.limits_changed``.
    """
    if not 0 <= healthy_milli <= installed_milli or largest_node_gpus < 0:
        raise Invalid(
            code="capacity_invalid", detail=_("Healthy capacity lies between 0 and what is installed.")
        )
    values: dict[str, Any] = {
        "installed_milli": installed_milli,
        "healthy_milli": healthy_milli,
        "largest_node_gpus": largest_node_gpus,
    }
    if cuda_max is not None:
        values["cuda_max"] = cuda_max[:16]
    if facts is not None:
        values["facts"] = facts
    found = FlavourCapacity.objects.filter(flavour_id=flavour_id).first()
    if found is not None and all(getattr(found, key) == value for key, value in values.items()):
        return found
    with transaction.atomic():
        flavour = flavour_lock(flavour_id)
        row, _made = FlavourCapacity.objects.update_or_create(
            flavour=flavour, defaults={**values, "updated_at": now()}
        )
        outbox_add(
            "quotas.limits_changed", {"flavour": str(flavour.uid), "cause": "capacity"}, key=flavour.code
        )
        return row


def pool_names_write(*, kind: str, rows: Mapping[str, Mapping[str, Any]]) -> int:
    """Make ``rows`` (code → name, department_id, facts) all that requests may name of a kind; what is not
    among them any more stays known but cannot be asked. Returns how many changed.
    """
    known = {row.code: row for row in PoolName.objects.filter(kind=kind)}
    changed = 0
    with transaction.atomic():
        for code, values in rows.items():
            row = known.pop(code, None) or PoolName(kind=kind, code=code, active=False)
            wanted = {
                "name": str(values.get("name", ""))[:200],
                "department_id": values.get("department_id"),
                "facts": dict(values.get("facts") or {}),
                "active": True,
            }
            if row.pk is None or any(getattr(row, name) != value for name, value in wanted.items()):
                for name, value in wanted.items():
                    setattr(row, name, value)
                row.save()
                changed += 1
        gone = [row.pk for row in known.values() if row.active]
        changed += PoolName.objects.filter(pk__in=gone).update(active=False)
    return changed
