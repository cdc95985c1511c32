"""What a card's driver tells beside the measures of the wall: clocks, throttling, links, errors. Last values only.

One table for the card's page and the API. A value that its source never told of is left out; one that was due and did
not come has a reason, as all of them have once the last sample is too old.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from monitoring.engine.tiles import NO_DATA_MS
from monitoring.engine.waste import HW_SLOWDOWN, HW_THERMAL, POWER_BRAKE, POWER_CAP, SW_THERMAL
from monitoring.models import GpuState

THROTTLES = {
    0x1: "idle",
    0x2: "application_clocks",
    POWER_CAP: "power_cap",
    HW_SLOWDOWN: "hardware_slowdown",
    0x10: "sync_boost",
    SW_THERMAL: "thermal_software",
    HW_THERMAL: "thermal_hardware",
    POWER_BRAKE: "power_brake",
    0x100: "display",
}
"""NVML's clock event reasons by bit (P13): idle, clocks that were set and the power cap are no faults."""

FABRIC = {0: "not_supported", 1: "not_started", 2: "in_progress", 3: "completed"}

# Told name (with its unit) → stored name, divisor
_TABLE: dict[str, tuple[str, int]] = {
    "sm_clock_mhz": ("sm_clock", 1),
    "memory_clock_mhz": ("mem_clock", 1),
    "throttle_reasons": ("throttle", 1),
    "tensor_activity_percent": ("tensor", 10),
    "memory_activity_percent": ("dram", 10),
    "memory_temperature_celsius": ("mem_temp", 1),
    "thermal_margin_celsius": ("tlimit", 1),
    "slowdown_celsius": ("slowdown_c", 1),
    "fan_percent": ("fan", 10),
    "power_averaged": ("power_averaged", 1),
    "energy_joules": ("energy_mj", 1000),
    "pcie_generation": ("pcie_gen", 1),
    "pcie_generation_max": ("pcie_gen_max", 1),
    "pcie_lanes": ("pcie_width", 1),
    "pcie_lanes_max": ("pcie_width_max", 1),
    "pcie_received_kib_s": ("pcie_rx_kib_s", 1),
    "pcie_sent_kib_s": ("pcie_tx_kib_s", 1),
    "pcie_replays": ("pcie_replays", 1),
    "nvlink_received_kib_s": ("nvlink_rx_kib_s", 1),
    "nvlink_sent_kib_s": ("nvlink_tx_kib_s", 1),
    "fabric_state": ("fabric_state", 1),
    "ecc_corrected": ("ecc_corr", 1),
    "ecc_uncorrected": ("ecc_uncorr", 1),
    "ecc_uncorrected_for_life": ("ecc_uncorr_total", 1),
    "ecc_threshold_exceeded": ("ecc_threshold", 1),
    "rows_remapped_correctable": ("remap_corr", 1),
    "rows_remapped_uncorrectable": ("remap_uncorr", 1),
    "remap_pending": ("remap_pending", 1),
    "remap_failed": ("remap_failure", 1),
    "retired_pages": ("retired_pages", 1),
    "retirement_pending": ("retired_pending", 1),
    "persistence_mode": ("persistence", 1),
    "shared_by": ("shared", 1),
}
_FLAGS = frozenset(
    {
        "power_averaged",
        "ecc_threshold_exceeded",
        "remap_pending",
        "remap_failed",
        "retirement_pending",
        "persistence_mode",
    }
)

Value = int | float | bool | str | list[str] | None


@dataclass(frozen=True, slots=True)
class Detail:
    """One value, or None with the reason why there is none."""

    name: str
    value: Value
    reason: str = ""


def details_of(state: GpuState, *, at: datetime) -> list[Detail]:
    """The details of a last state, in the order of the table."""
    stored = {**state.more, "sm_clock": state.sm_clock_mhz, "throttle": state.throttle}
    stale = at - state.at > timedelta(milliseconds=NO_DATA_MS)
    out = []
    for name, (key, divisor) in _TABLE.items():
        raw = stored.get(key)
        if raw is not None:
            out.append(Detail(name, None, "stale") if stale else Detail(name, _told(name, raw, divisor)))
        elif key in state.missing:
            out.append(Detail(name, None, "stale" if stale else state.missing[key]))
    return out


def _told(name: str, raw: int, divisor: int) -> Value:
    if name == "throttle_reasons":
        return [word for bit, word in THROTTLES.items() if raw & bit]
    if name == "fabric_state":
        return FABRIC.get(raw, str(raw))
    if name in _FLAGS:
        return bool(raw)
    return raw if divisor == 1 else round(raw / divisor, 1)
