"""How much of a card an ask is charged, in milli-GPU: one formula for waiting, running and billing.

whole card  1000
fraction    max(compute share, memory share), the memory share rounded down: n equal shares of a card never
sum
            past 1000; the memory itself is counted in MiB beside it
MIG slice   floor(1000 × compute slices / compute slices per card): seven 1g of seven make 994, 6 are stranded
"""

from __future__ import annotations

from portal.kernel.units import MILLI_PER_GPU


class ChargeError(ValueError):
    """The ask cannot be part of one card."""


def whole_charge(gpus: int) -> int:
    """Charge of ``gpus`` ≥ 0 whole cards."""
    if gpus < 0:
        raise ChargeError("a number of cards may not be negative")
    return gpus * MILLI_PER_GPU


def fraction_charge(compute_milli: int, memory_mib: int, card_memory_mib: int) -> int:
    """Charge of a share of one card: 1 … 1000. ChargeError when either share is not within the card."""
    if (
        compute_milli < 0
        or memory_mib < 0
        or card_memory_mib <= 0
        or (compute_milli == 0 and memory_mib == 0)
    ):
        raise ChargeError("a fraction needs a positive share")
    if compute_milli > MILLI_PER_GPU or memory_mib > card_memory_mib:
        raise ChargeError("a fraction cannot exceed its card")
    return max(1, compute_milli, MILLI_PER_GPU * memory_mib // card_memory_mib)


def mig_charge(compute_slices: int, slices_per_card: int) -> int:
    """Charge of one MIG instance of ``compute_slices`` out of ``slices_per_card``."""
    if not 0 < compute_slices <= slices_per_card:
        raise ChargeError("a MIG instance has between one and all compute slices of its card")
    return MILLI_PER_GPU * compute_slices // slices_per_card


def mig_stranded(charges: list[int]) -> int:
    """Milli-GPU of one split card that no instance of its layout is charged for."""
    stranded = MILLI_PER_GPU - sum(charges)
    if stranded < 0:
        raise ChargeError("the instances of a card sum past the card")
    return stranded
