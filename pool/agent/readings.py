"""What all readers of cards share: the shape of rows, units, and reasons for what is not there."""

from __future__ import annotations

import re
from datetime import datetime, timezone
from typing import Any

MIB = 1024 * 1024
PCI_DEVICES = "/sys/bus/pci/devices"
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


def numa_of(bus_id: str | None) -> int | None:
    """The NUMA node that a card hangs on, from the kernel's view of its PCI address (``00000000:1B:00.0``); None where
    the kernel does not say (no NUMA, a virtual machine, no sysfs)."""
    found = re.fullmatch(
        r"(?:[0-9a-f]{4})?([0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])", (bus_id or "").lower()
    )
    if found is None:
        return None
    try:
        with open(f"{PCI_DEVICES}/{found[1]}/numa_node") as file:
            number = int(file.read(16))
    except (OSError, ValueError):
        return None
    return number if 0 <= number < 2**15 else None


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
