"""Words for what a driver tells of a card beside the four measures."""

from __future__ import annotations

from typing import Any

from django.utils.translation import gettext as _now
from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy

from monitoring.selectors.details import Detail
from monitoring.web.words import reason

# name → label, unit, divisor, decimals
LABELS: dict[str, tuple[Any, str, int, int]] = {
    "sm_clock_mhz": (_("SM clock"), "MHz", 1, 0),
    "memory_clock_mhz": (_("Memory clock"), "MHz", 1, 0),
    "throttle_reasons": (_("Clocks held down by"), "", 1, 0),
    "tensor_activity_percent": (_("Tensor core activity"), "%", 1, 0),
    "memory_activity_percent": (_("Memory interface activity"), "%", 1, 0),
    "memory_temperature_celsius": (_("Memory temperature"), "°C", 1, 0),
    "thermal_margin_celsius": (_("Margin before it slows down"), "°C", 1, 0),
    "slowdown_celsius": (_("Slows down from"), "°C", 1, 0),
    "fan_percent": (_("Fan"), "%", 1, 0),
    "power_averaged": (_("Power is the mean of a second"), "", 1, 0),
    "energy_joules": (_("Energy since the driver was loaded"), "kWh", 3_600_000, 1),
    "pcie_generation": (_("PCIe generation now"), "", 1, 0),
    "pcie_generation_max": (_("PCIe generation, most"), "", 1, 0),
    "pcie_lanes": (_("PCIe lanes now"), "", 1, 0),
    "pcie_lanes_max": (_("PCIe lanes, most"), "", 1, 0),
    "pcie_received_kib_s": (_("PCIe received"), "MiB/s", 1024, 1),
    "pcie_sent_kib_s": (_("PCIe sent"), "MiB/s", 1024, 1),
    "pcie_replays": (_("PCIe replays"), "", 1, 0),
    "nvlink_received_kib_s": (_("NVLink received"), "MiB/s", 1024, 1),
    "nvlink_sent_kib_s": (_("NVLink sent"), "MiB/s", 1024, 1),
    "fabric_state": (_("NVSwitch fabric"), "", 1, 0),
    "ecc_corrected": (_("ECC errors corrected since the driver was loaded"), "", 1, 0),
    "ecc_uncorrected": (_("ECC errors not corrected since the driver was loaded"), "", 1, 0),
    "ecc_uncorrected_for_life": (_("ECC errors not corrected in its life"), "", 1, 0),
    "ecc_threshold_exceeded": (_("ECC errors beyond what is tolerated"), "", 1, 0),
    "rows_remapped_correctable": (_("Rows remapped, correctable"), "", 1, 0),
    "rows_remapped_uncorrectable": (_("Rows remapped, uncorrectable"), "", 1, 0),
    "remap_pending": (_("Row remapping is pending"), "", 1, 0),
    "remap_failed": (_("Row remapping has failed"), "", 1, 0),
    "retired_pages": (_("Retired pages"), "", 1, 0),
    "retirement_pending": (_("Page retirement is pending"), "", 1, 0),
    "persistence_mode": (_("Persistence mode"), "", 1, 0),
    "shared_by": (_("Workloads that share it"), "", 1, 0),
}
THROTTLES: dict[str, Any] = {
    "idle": pgettext_lazy("clocks held down by", "idleness"),
    "application_clocks": _("clocks that were set"),
    "power_cap": _("the power limit"),
    "hardware_slowdown": _("the hardware"),
    "sync_boost": _("the slowest of its group"),
    "thermal_software": _("heat (driver)"),
    "thermal_hardware": _("heat (hardware)"),
    "power_brake": _("the power supply’s brake"),
    "display": _("the display"),
}
FABRIC: dict[str, Any] = {
    "not_supported": _("none"),
    "not_started": _("not started: CUDA fails on it"),
    "in_progress": _("being set up"),
    "completed": _("complete"),
}
# What calls for a look, and why (P14, P23, P32)
ADVICE: dict[tuple[str, Any], Any] = {
    ("remap_pending", True): _("takes effect at the next reset"),
    ("retirement_pending", True): _("takes effect at the next reset"),
    ("remap_failed", True): _("the card has to be replaced"),
    ("ecc_threshold_exceeded", True): _("the card has to be replaced"),
    ("fabric_state", "not_started"): _("look at the Fabric Manager on the node"),
    ("persistence_mode", False): _(
        "the driver unloads when idle: first looks take seconds, counters begin anew"
    ),
}


def detail_rows(details: list[Detail]) -> list[dict[str, Any]]:
    """Rows for people: label, value with its unit or why there is none, advice."""
    rows = []
    for one in details:
        label, unit, divisor, decimals = LABELS[one.name]
        value: Any = one.value
        row = {"label": label, "unit": unit, "decimals": decimals, "value": None, "text": "", "why": ""}
        if one.reason:
            row["why"] = reason(one.reason)
        elif isinstance(value, bool):
            row["text"] = _now("yes") if value else _now("no")
        elif isinstance(value, list):
            row["text"] = ", ".join(str(THROTTLES[word]) for word in value) or _now("nothing")
        elif isinstance(value, str):
            row["text"] = FABRIC.get(value, value)
        else:
            row["value"] = value / divisor if divisor > 1 else value
        advice = ADVICE.get((one.name, value if isinstance(value, bool | str) else None), "")
        if one.name == "ecc_uncorrected" and value:
            advice = _now("a reset is needed")
        rows.append({**row, "advice": advice})
    return rows
