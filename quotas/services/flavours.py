"""Flavours come into being when the pool meets a card that it has not seen before."""

from __future__ import annotations

import re

from django.db import IntegrityError, transaction
from django.utils.translation import gettext_lazy as _

from portal.kernel.errors import Conflict, Invalid
from portal.kernel.models import advance
from portal.ops.actor import Actor, system
from portal.ops.services.audit import audit_record
from quotas.models import GpuFlavour
from quotas.selectors.catalogue import MIB_PER_GB, catalogue_match, catalogue_rows, memory_matches, mig_table


def flavour_ensure(*, model_name: str, memory_mib: int) -> GpuFlavour:
    """The flavour of a card, made when it is new. Safe to call at once from many places.

    ``model_name`` is the name as NVML, Slurm or Kubernetes spells it, or any name of ours; ``memory_mib``
    what the card reports (0: unknown). A card that the catalogue does not know gets a flavour of its own name
    and memory; a known one with another memory (a rebuilt card) a flavour beside the usual one.
    """
    name = model_name.strip()
    if not name or memory_mib < 0:
        raise Invalid.field("model", _("A GPU needs a model name and a memory size of 0 or more."))
    row = catalogue_match(name, memory_mib)
    gigabytes = round(memory_mib / MIB_PER_GB)
    if row is None:
        plain = re.sub(r"^NVIDIA\s+", "", name, flags=re.IGNORECASE)
        suffix = (
            f" {gigabytes}GB" if gigabytes and f"{gigabytes}GB" not in plain.upper().replace(" ", "") else ""
        )
        values: dict[str, object] = {"name": f"{plain}{suffix}"[:120], "memory_mib": memory_mib}
        code = _slug(f"{plain}{suffix}")
        position = 10_000
    else:
        table = mig_table(row["mig_table"]) if row["mig_table"] else None
        usual = memory_mib == 0 or memory_matches(row, memory_mib)
        code = row["code"] if usual else f"{row['code']}-{gigabytes}gb"
        values = {
            "name": row["name"] if usual else f"{row['name']} ({gigabytes}GB)",
            "model_key": row["key"],
            "memory_mib": memory_mib or row["memory_gb"] * MIB_PER_GB,
            "architecture": row["architecture"],
            "mig_capable": bool(row["mig_capable"] and table),
            "mig_table": row["mig_table"] if table else "",
            "nvlink": row["nvlink_gb_s"] > 0,
            "fp8": row["fp8"],
            "compute_slices": table.compute_slices if table else 0,
            "memory_slices": table.memory_slices if table else 0,
            "tdp_w": row["tdp_w"],
        }
        # Newest and largest first: what people look for stands at the top of lists
        position = 1000 - catalogue_rows().index(row)
    found = GpuFlavour.objects.filter(code=code).first()
    if found is not None:
        return found
    try:
        with transaction.atomic():
            made = GpuFlavour.objects.create(code=code, position=position, **values)
            audit_record(
                acting_user=system("inventory"),
                action="flavour.created",
                subject=made,
                after={"code": code, "name": made.name, "memory_mib": made.memory_mib},
            )
            return made
    except IntegrityError:
        return GpuFlavour.objects.get(code=code)


def flavour_offer(
    *, acting_user: Actor, flavour: GpuFlavour, active: bool, version: int | None = None
) -> GpuFlavour:
    """Put a flavour on offer or take it off; what runs is not touched. The caller has checked the role."""
    with transaction.atomic():
        rows = GpuFlavour.objects.filter(pk=flavour.pk)
        if version is not None:
            rows = rows.filter(version=version)
        if not advance(rows, active=active):
            raise Conflict(code="version_changed", detail=_("It was changed by somebody else meanwhile."))
        audit_record(
            acting_user=acting_user,
            action="flavour.offered" if active else "flavour.withdrawn",
            subject=flavour,
            before={"active": flavour.active},
            after={"active": active},
        )
        flavour.refresh_from_db()
        return flavour


def _slug(text: str) -> str:
    """A flavour code from a free name: small letters, digits and dashes, at most 48."""
    slug = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return slug[:48] or "gpu"
