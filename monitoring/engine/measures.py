"""What can be measured of a card, in which unit it is told and stored, and how one raw value is judged.

A value is a number or a coded reason why there is none: blanks of libraries, null spellings of tools, NaN and what
cannot be true of any card are reasons, never 0 (pitfalls P17, P19, P26). The first table has columns of their own and
a history; the second is kept as the last state only (`GpuState.more`).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

# Reasons that an agent or exporter may give; anything else becomes "error".
_REASON = re.compile(r"[a-z][a-z0-9_]{1,31}\Z")
# The null spellings of nvidia-smi and dcgm in any of their tools (pitfall P26, P17).
_SPELLINGS = {
    "": "not_supported",
    "-": "not_supported",
    "n/a": "not_supported",
    "[n/a]": "not_supported",
    "none": "not_supported",
    "[not supported]": "not_supported",
    "not supported": "not_supported",
    "requested functionality has been deprecated": "not_supported",
    "<<<null>>>": "blank",
    "<<<not_found>>>": "not_supported",
    "<<<not_supported>>>": "not_supported",
    "<<<not_perm>>>": "not_permitted",
    "[unknown error]": "error",
    "unknown error": "error",
    "err!": "error",
    "[gpu is lost]": "gpu_lost",
    "gpu is lost": "gpu_lost",
    "[gpu requires reset]": "reset_required",
    "gpu requires reset": "reset_required",
    "[insufficient permissions]": "not_permitted",
    "insufficient permissions": "not_permitted",
}
_BLANKS = frozenset(
    {
        0xFFFFFFFF,
        0xFFFFFFFFFFFFFFFF,
        0xFFFF,
        *range(2147483632, 2147483636),
        *range(140737488355328, 140737488355332),
    }
)
_BLANK_FROM = 9.2233720368547758e18


@dataclass(frozen=True, slots=True)
class Measure:
    """One measure: its name in messages, in the store, the scale between the two, and what can be true."""

    name: str
    column: str
    scale: int
    low: int
    high: int


def _extra(name: str, low: int, high: int, scale: int = 1) -> Measure:
    return Measure(name, name, scale, low, high)


# High bounds leave room for hardware to come: 2 TiB of memory, 10 kW, 150 °C; 17 TB is a wrong unit.
MEASURES: tuple[Measure, ...] = (
    Measure("util", "util_pm", 10, 0, 1000),
    Measure("sm", "sm_pm", 10, 0, 1000),
    Measure("mem_used", "mem_used_mib", 1, 0, 2_097_152),
    Measure("mem_total", "mem_total_mib", 1, 1, 2_097_152),
    Measure("mem_reserved", "mem_reserved_mib", 1, 0, 2_097_152),
    Measure("temp", "temp_c", 1, -40, 150),
    Measure("power_mw", "power_mw", 1, 0, 10_000_000),
    Measure("sm_clock", "sm_clock_mhz", 1, 0, 20_000),
    Measure("throttle", "throttle", 1, 0, 2**62),
)
CARD_ONLY = frozenset({"temp", "power_mw", "sm_clock", "throttle"})

# Kept in the last state alone. Per mille: tensor, dram, fan. MHz: mem_clock. Rates in KiB/s. Counters only grow until
# the driver is loaded again (energy_mj in mJ; ECC `ecc_corr`, `ecc_uncorr` since the driver was loaded, `_total` for
# life). Flags are 0 or 1: `power_averaged` (the power is the mean of a second, not of an instant), `settling` (the
# driver was loaded less than a minute ago: its activity is not judged). `tlimit` is degrees left, a falling number.
EXTRAS: dict[str, Measure] = {
    m.name: m
    for m in (
        _extra("tensor", 0, 1000, 10),
        _extra("dram", 0, 1000, 10),
        _extra("fan", 0, 3000, 10),
        _extra("mem_free", 0, 2_097_152),
        _extra("mem_temp", -40, 150),
        _extra("tlimit", -100, 150),
        _extra("slowdown_c", 0, 150),
        _extra("mem_clock", 0, 40_000),
        _extra("power_limit_mw", 0, 10_000_000),
        _extra("power_averaged", 0, 1),
        _extra("energy_mj", 0, 2**62),
        _extra("pcie_rx_kib_s", 0, 2**40),
        _extra("pcie_tx_kib_s", 0, 2**40),
        _extra("nvlink_rx_kib_s", 0, 2**40),
        _extra("nvlink_tx_kib_s", 0, 2**40),
        _extra("pcie_gen", 1, 16),
        _extra("pcie_width", 1, 64),
        _extra("pcie_gen_max", 1, 16),
        _extra("pcie_width_max", 1, 64),
        _extra("pcie_replays", 0, 2**62),
        _extra("ecc_corr", 0, 2**62),
        _extra("ecc_uncorr", 0, 2**62),
        _extra("ecc_uncorr_total", 0, 2**62),
        _extra("ecc_threshold", 0, 1),
        _extra("remap_corr", 0, 2**31),
        _extra("remap_uncorr", 0, 2**31),
        _extra("remap_pending", 0, 1),
        _extra("remap_failure", 0, 1),
        _extra("retired_pages", 0, 2**31),
        _extra("retired_pending", 0, 1),
        _extra("fabric_state", 0, 15),
        _extra("persistence", 0, 1),
        _extra("settling", 0, 1),
        _extra("shared", 1, 1000),
    )
}


def value_or_reason(measure: Measure, raw: Any) -> tuple[int | None, str]:
    """(stored integer, "") or (None, reason code) of one raw value in the unit of messages."""
    kind = type(raw)
    if kind is int or (kind is float and -1e18 < raw < 1e18):
        # Nearly every value: a number that can be true. Blanks never are.
        value = raw if kind is int and measure.scale == 1 else round(raw * measure.scale)
        if measure.low <= value <= measure.high:
            return value, ""
    if isinstance(raw, str):
        spelled = spelled_reason(raw)
        if spelled:
            return None, spelled
        try:
            raw = float(raw)
        except ValueError:
            return None, "not_a_number"
    if raw is None:
        return None, "not_supported"
    if isinstance(raw, bool) or not isinstance(raw, int | float):
        return None, "not_a_number"
    if isinstance(raw, float) and not math.isfinite(raw):
        return None, "not_a_number"
    if raw >= _BLANK_FROM or (raw in _BLANKS and raw * measure.scale > measure.high):
        return None, "blank"
    value = round(raw * measure.scale)
    if not measure.low <= value <= measure.high:
        return None, "out_of_range"
    return value, ""


def spelled_reason(text: str) -> str:
    """The reason that a null spelling stands for; empty for any other text."""
    return _SPELLINGS.get(text.strip().lower(), "")


def blank(value: float) -> bool:
    """Whether a float is one of DCGM's blank numbers, also after a store has rounded it (P17)."""
    return _BLANK_FROM <= value < math.inf or value in _BLANKS


def reason_code(raw: Any) -> str:
    """A reason as a code that may be stored: small letters and underscores, else `error`."""
    return _reason(raw) if type(raw) is str and len(raw) <= 32 else "error"


@lru_cache(maxsize=256)
def _reason(text: str) -> str:
    return text if _REASON.match(text) else "error"
