"""What all readers of cards share: the shape of rows, units, and reasons for what is not there."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

MIB = 1024 * 1024
UINT_MAX = 0xFFFFFFFF
ULL_MAX = 0xFFFFFFFFFFFFFFFF
CARD_MEASURES = (
    "util",
    "sm",
    "mem_used",
    "mem_total",
    "mem_reserved",
    "temp",
    "power_mw",
    "power_limit_mw",
    "sm_clock",
    "mem_clock",
    "throttle",
    "ecc_uncorr",
    "energy_mj",
)


def utc_now() -> str:
    """The present instant as ISO 8601 with milliseconds and a Z."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class NvmlDown(Exception):
    """The cards cannot be read at all; ``reason`` is the code reported to the installation."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Missing(Exception):
    """One measure is not there; ``reason`` says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def checked(value: Any, top: int = UINT_MAX) -> int:
    """An unsigned reading as int; the type's maximum (NVML's "not available") is a missing value."""
    number = int(value)
    if number < 0 or number >= top or number == ULL_MAX:
        raise Missing("not_supported")
    return number


def lost_row(uuid: str) -> list[Any]:
    """The row of a card that was seen before and is not there now."""
    return [uuid, None, utc_now(), {}, dict.fromkeys(CARD_MEASURES, "gpu_lost"), []]
