"""Series of nvidia_gpu_exporter (`nvidia_smi_…`) as readings. Pure.

That exporter tells base units: bytes, watts, hertz, ratios of 1. Its UUIDs have no `GPU-` in front. Strings come from
the labels of the info series only: it turns names into numbers (`nvidia_smi_name 200`, pitfall P27).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from monitoring.engine.measures import blank
from monitoring.sources.reading import Metric, Reading, Scrape

PREFIX = "nvidia_smi_"
_MIB, _MHZ = 1 / 1024 / 1024, 1e-6
NAMES: dict[str, tuple[str, float]] = {
    "utilization_gpu_ratio": ("util", 100),
    "memory_total_bytes": ("mem_total", _MIB),
    "memory_used_bytes": ("mem_used", _MIB),
    "memory_free_bytes": ("mem_free", _MIB),
    "memory_reserved_bytes": ("mem_reserved", _MIB),
    "temperature_gpu": ("temp", 1),
    "temperature_memory": ("mem_temp", 1),
    "temperature_gpu_tlimit": ("tlimit", 1),
    "fan_speed_ratio": ("fan", 100),
    "enforced_power_limit_watts": ("power_limit_mw", 1000),
    "clocks_current_sm_clock_hz": ("sm_clock", _MHZ),
    "clocks_current_memory_clock_hz": ("mem_clock", _MHZ),
    "clocks_event_reasons_active": ("throttle", 1),
    "clocks_throttle_reasons_active": ("throttle", 1),
    "pcie_link_gen_current": ("pcie_gen", 1),
    "pcie_link_gen_max": ("pcie_gen_max", 1),
    "pcie_link_width_current": ("pcie_width", 1),
    "pcie_link_width_max": ("pcie_width_max", 1),
    "ecc_errors_corrected_volatile_total": ("ecc_corr", 1),
    "ecc_errors_uncorrected_volatile_total": ("ecc_uncorr", 1),
    "ecc_errors_uncorrected_aggregate_total": ("ecc_uncorr_total", 1),
    "ecc_errors_uncorrected_aggregate_sram_threshold_exceeded": ("ecc_threshold", 1),
    "remapped_rows_correctable": ("remap_corr", 1),
    "remapped_rows_uncorrectable": ("remap_uncorr", 1),
    "remapped_rows_pending": ("remap_pending", 1),
    "remapped_rows_failure": ("remap_failure", 1),
    "fabric_state": ("fabric_state", 1),
    "persistence_mode": ("persistence", 1),
}
# The kind of the power stays with it (pitfall P09): the mean of a second before the plain one.
POWER = {"power_draw_average_watts": 1, "power_draw_watts": None, "power_draw_instant_watts": 0}
_HEX = re.compile(r"[0-9a-fA-F]{8}-[0-9a-fA-F-]{4,60}\Z")


def scrape(series: Iterable[Metric], into: Scrape) -> None:
    """Add the exporter's series to `into`."""
    power: dict[str, dict[str, float]] = {}
    memory: dict[tuple[str, str], float] = {}
    seen: dict[str, dict[str, str]] = {}
    mig: set[str] = set()
    counted: set[str] = set()
    mine: dict[str, Reading] = {}
    for one in series:
        name = one.name.removeprefix(PREFIX)
        if name == "command_exit_code" and one.value:
            into.problems["exit_code"] += 1  # a hint: what was told is still read (pitfall P25)
        if name == one.name or not one.labels.get("uuid"):
            continue
        uuid = one.labels["uuid"]
        uuid = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
        if not _HEX.match(uuid[4:]):
            into.problems["not_a_gpu"] += 1
            continue
        reading = mine[uuid] = into.readings.setdefault((uuid, None), Reading(uuid))
        if one.at_ms is not None:
            reading.at_ms = max(reading.at_ms or 0, one.at_ms)
        if name in NAMES:
            measure, factor = NAMES[name]
            if one.value is None or blank(one.value):
                reading.missing[measure] = "error" if one.value is None else "blank"
            else:
                reading.values[measure] = one.value * factor
        elif name in POWER and one.value is not None:
            power.setdefault(uuid, {})[name] = one.value
        elif name == "gpu_info":
            _info(reading, one.labels, into)
        elif name == "mig_mode_current" and one.value == 1:
            mig.add(uuid)
        elif name == "compute_apps":
            counted.add(uuid)
        elif name == "compute_app_info":
            seen.setdefault(uuid, {})[one.labels.get("pid", "")] = one.labels.get("process_name", "")
        elif name == "compute_app_used_memory_bytes" and one.value is not None:
            memory[uuid, one.labels.get("pid", "")] = one.value * _MIB
    for uuid, told in power.items():
        _power(mine[uuid], told)
    for uuid, reading in mine.items():
        reading.missing.setdefault("sm", "not_supported")
        if "util" not in reading.values:
            reading.missing.setdefault("util", "not_measurable" if uuid in mig else "not_supported")
        if uuid in counted or uuid in seen:
            reading.processes = [
                {"pid": int(pid), "name": program, "mem_mib": memory.get((uuid, pid))}
                for pid, program in sorted(seen.get(uuid, {}).items())
                if pid.isdecimal()
            ]


def _info(reading: Reading, labels: dict[str, str], into: Scrape) -> None:
    reading.model = labels.get("name", "")
    into.driver = into.driver or labels.get("driver_version", "")
    if labels.get("index", "").isdecimal():
        reading.index = int(labels["index"])


def _power(reading: Reading, told: dict[str, float]) -> None:
    for name, kind in POWER.items():
        if name in told:
            reading.values["power_mw"] = told[name] * 1000
            if kind is not None:
                reading.values["power_averaged"] = kind
            return
