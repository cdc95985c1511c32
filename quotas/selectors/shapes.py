"""The shape of an ask: what it takes of cards, what that is charged, and how it reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from portal.kernel.units import MILLI_PER_GPU, gpus_from_milli
from quotas.engine.charge import ChargeError, fraction_charge, mig_charge, whole_charge
from quotas.models import CapacityRequest, GpuFlavour
from quotas.selectors.catalogue import mig_table

S = CapacityRequest.Shape
FIELDS = ("shape", "gpus_per_node", "nodes", "fraction_milli", "fraction_mib", "mig_profile", "mig_count")


@dataclass(frozen=True, slots=True)
class AskShape:
    """``gpus_per_node × nodes`` whole cards, or that many equal fractions, or ``mig_profile × mig_count``."""

    shape: str = "whole"
    gpus_per_node: int = 1
    nodes: int = 1
    fraction_milli: int | None = None
    fraction_mib: int | None = None
    mig_profile: str = ""
    mig_count: int = 0

    @classmethod
    def of(cls, source: CapacityRequest | Mapping[str, Any]) -> AskShape:
        """From a request, or from its cleaned values."""
        if isinstance(source, Mapping):
            return cls(**{name: source[name] for name in FIELDS if name in source})
        return cls(**{name: getattr(source, name) for name in FIELDS})

    @property
    def pieces(self) -> int:
        """Cards or slices asked in all."""
        if self.shape == S.CPU:
            return 0
        return self.mig_count if self.shape == S.MIG else self.gpus_per_node * self.nodes

    def charge(self, flavour: GpuFlavour) -> int:
        """Milli-GPU charged in all on this flavour. ChargeError where a card of it cannot give the piece."""
        if self.shape == S.CPU:
            return 0
        if self.shape == S.WHOLE:
            return whole_charge(self.pieces)
        if self.shape == S.FRACTION:
            return (
                fraction_charge(self.fraction_milli or 0, self.fraction_mib or 0, flavour.memory_mib)
                * self.pieces
            )
        table = mig_table(flavour.mig_table) if flavour.mig_capable else None
        profile = table.get(self.mig_profile) if table is not None else None
        if table is None or profile is None:
            raise ChargeError("the card has no such MIG profile")
        return mig_charge(profile.compute_slices, table.compute_slices) * self.mig_count

    def cards_at_least(self, flavour: GpuFlavour) -> int:
        """Cards that must exist for it, in the best case: for the comparison with what is installed."""
        if self.shape == S.WHOLE:
            return self.pieces
        return -(-self.charge(flavour) // MILLI_PER_GPU)


def amount_text(shape: AskShape, flavour: str) -> str:
    """``8 × H800 80GB``, ``0.3 × L40S 48GB``, ``2 × A100 80GB 2g.20gb``; for lists and heads."""
    if shape.shape == S.CPU:
        return ngettext("%(n)s node without GPU", "%(n)s nodes without GPU", shape.nodes) % {"n": shape.nodes}
    if shape.shape == S.MIG:
        return f"{shape.mig_count} × {flavour} {shape.mig_profile}"
    if shape.shape == S.FRACTION:
        share = gpus_from_milli(shape.fraction_milli or 0)
        text = f"{share} × {flavour}" if shape.fraction_milli else f"{shape.fraction_mib:,} MiB × {flavour}"
        return text if shape.pieces == 1 else f"{shape.pieces} × {text}"
    return f"{shape.pieces} × {flavour}"


def place_text(shape: AskShape) -> str:
    """``1 node × 8``: how whole cards are spread; "" where there is nothing to say."""
    if shape.shape not in (S.WHOLE, S.FRACTION) or shape.pieces <= 1:
        return ""
    nodes = ngettext("%(n)s node", "%(n)s nodes", shape.nodes) % {"n": shape.nodes}
    return f"{nodes} × {shape.gpus_per_node}"


def flavour_text(request: CapacityRequest, names: Mapping[str, str] | None = None) -> str:
    """The flavour of a request, or the first that meets its requirement and how many more do."""
    if request.flavour is not None:
        return request.flavour.name
    if not request.options:
        return _("GPU")
    first = (names or {}).get(request.options[0], request.options[0])
    more = len(request.options) - 1
    return first if not more else _("%(first)s or %(n)s more") % {"first": first, "n": more}
