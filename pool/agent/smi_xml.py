"""The XML of ``nvidia-smi -q -x``, schemas 10 to 13, as values and reasons."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from typing import Any

from pool.agent.smi_cells import number, present, yes

THROTTLE_BITS = {
    "gpu_idle": 0x1,
    "applications_clocks_setting": 0x2,
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake_slowdown": 0x80,
    "display_clocks_setting": 0x100,
}
FABRIC = {"not started": 1, "in progress": 2, "completed": 3}
# Measure → (paths, first that is there; factor to the unit of messages).
_CELLS: dict[str, tuple[tuple[str, ...], float]] = {
    "util": (("utilization/gpu_util",), 1),
    "mem_total": (("fb_memory_usage/total",), 1),
    "mem_used": (("fb_memory_usage/used",), 1),
    "mem_free": (("fb_memory_usage/free",), 1),
    "mem_reserved": (("fb_memory_usage/reserved",), 1),
    "temp": (("temperature/gpu_temp",), 1),
    "tlimit": (("temperature/gpu_temp_tlimit",), 1),
    "slowdown_c": (("temperature/gpu_temp_slow_threshold",), 1),
    "mem_temp": (("temperature/memory_temp",), 1),
    "sm_clock": (("clocks/sm_clock",), 1),
    "mem_clock": (("clocks/mem_clock",), 1),
    "fan": (("fan_speed",), 1),
    "power_limit_mw": (
        (
            "gpu_power_readings/current_power_limit",
            "power_readings/enforced_power_limit",
            "power_readings/power_limit",
        ),
        1000,
    ),
    "pcie_gen": (("pci/pci_gpu_link_info/pcie_gen/current_link_gen",), 1),
    "pcie_gen_max": (("pci/pci_gpu_link_info/pcie_gen/max_link_gen",), 1),
    "pcie_width": (("pci/pci_gpu_link_info/link_widths/current_link_width",), 1),
    "pcie_width_max": (("pci/pci_gpu_link_info/link_widths/max_link_width",), 1),
    "pcie_replays": (("pci/replay_counter",), 1),
    "pcie_tx_kib_s": (("pci/tx_util",), 1000 / 1024),
    "pcie_rx_kib_s": (("pci/rx_util",), 1000 / 1024),
    "remap_corr": (("remapped_rows/remapped_row_corr",), 1),
    "remap_uncorr": (("remapped_rows/remapped_row_unc",), 1),
}
_FLAGS = {
    "remap_pending": ("remapped_rows/remapped_row_pending",),
    "remap_failure": ("remapped_rows/remapped_row_failure",),
    "retired_pending": ("retired_pages/pending_retirement", "retired_pages/pending_blacklist"),
    "ecc_threshold": ("ecc_errors/aggregate/sram_threshold_exceeded",),
    "persistence": ("persistence_mode",),
}
# The kind of the power is kept with it: the mean of a second (1) or of an instant (0); the plain name does not say.
_POWER = (
    ("gpu_power_readings/average_power_draw", 1),
    ("gpu_power_readings/instant_power_draw", 0),
    ("gpu_power_readings/power_draw", None),
    ("power_readings/power_draw", None),
)
_CARD_ALWAYS = ("util", "mem_total", "mem_used", "mem_reserved", "temp", "power_mw", "sm_clock", "throttle")


def parse(text: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """({driver, cuda}, cards) of one document; raises ValueError where it is none.

    Lines before the document (warnings) are left out. A card without a UUID cannot be told from others and is left
    out too.
    """
    begin = text.find("<?xml")
    begin = text.find("<nvidia_smi_log") if begin < 0 else begin
    end = text.rfind("</nvidia_smi_log>")
    if begin < 0 or end < 0 or "<!ENTITY" in text:
        raise ValueError("not a document of nvidia-smi")
    try:
        root = ElementTree.fromstring(text[begin : end + len("</nvidia_smi_log>")])
    except ElementTree.ParseError as error:
        raise ValueError("not a document of nvidia-smi") from error
    node = {
        "driver": present(root.findtext("driver_version")),
        "cuda": present(root.findtext("cuda_version")),
    }
    cards = []
    for index, element in enumerate(root.findall("gpu")):
        uuid = (element.findtext("uuid") or "").strip()
        if uuid.startswith("GPU-"):
            cards.append(_card(index, uuid, element))
    return node, cards


def _first(element: Any, paths: tuple[str, ...]) -> tuple[str | None, str]:
    """The first cell that is there, and the path it has."""
    for path in paths:
        text = element.findtext(path)
        if text is not None:
            return text, path
    return None, ""


def _card(index: int, uuid: str, element: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for measure, (paths, factor) in _CELLS.items():
        _take(values, missing, measure, _first(element, paths)[0], factor)
    for measure, flags in _FLAGS.items():
        flag = yes(_first(element, flags)[0])
        if flag is None:
            missing[measure] = "not_supported"
        else:
            values[measure] = flag
    _power(element, values, missing)
    _throttle(element, values, missing)
    _ecc(element, values, missing)
    retired = [
        number(element.findtext(f"retired_pages/{kind}/retired_count"))[0]
        for kind in ("multiple_single_bit_retirement", "double_bit_retirement")
    ]
    if None in retired:
        missing["retired_pages"] = "not_supported"
    else:
        values["retired_pages"] = int(sum(retired))  # type: ignore[arg-type]
    state = FABRIC.get((element.findtext("fabric/state") or "").strip().lower())
    if state is not None:
        values["fabric_state"] = state
    missing["sm"] = "not_supported"
    missing.setdefault("energy_mj", "not_supported")
    mode = (element.findtext("mig_mode/current_mig") or "").strip()
    generation, width = values.get("pcie_gen_max"), values.get("pcie_width_max")
    return {
        "uuid": uuid,
        "index": index,
        "name": present(element.findtext("product_name")) or "",
        "bus": present(element.findtext("pci/pci_bus_id")) or present(element.get("id")),
        "serial": present(element.findtext("serial")),
        "minor": number(element.findtext("minor_number"))[0],
        "mig_capable": mode in ("Enabled", "Disabled"),
        "mig_enabled": mode == "Enabled",
        "pcie": {"gen": generation, "width": width} if generation and width else None,
        "values": values,
        "missing": missing,
        "slices": [_slice(part) for part in element.findall("mig_devices/mig_device")],
        "processes": _processes(element),
    }


def _take(
    values: dict[str, Any], missing: dict[str, str], measure: str, text: str | None, factor: float = 1
) -> None:
    value, reason = number(text)
    if value is not None:
        values[measure] = round(value * factor)
    elif text is not None or measure in _CARD_ALWAYS:
        missing[measure] = reason


def _power(element: Any, values: dict[str, Any], missing: dict[str, str]) -> None:
    for path, kind in _POWER:
        text = element.findtext(path)
        value, reason = number(text)
        if value is not None:
            values["power_mw"] = round(value * 1000)
            if kind is not None:
                values["power_averaged"] = kind
            missing.pop("power_mw", None)
            return
        missing.setdefault("power_mw", reason)


def _throttle(element: Any, values: dict[str, Any], missing: dict[str, str]) -> None:
    """Old name ``clocks_throttle_reasons``, new name ``clocks_event_reasons`` (pitfall P13)."""
    for name in ("clocks_event_reason", "clocks_throttle_reason"):
        reasons = element.find(name + "s")
        if reasons is None:
            continue
        known = {child.tag[len(name) + 1 :]: (child.text or "").strip() for child in reasons}
        if any(text in ("Active", "Not Active") for text in known.values()):
            values["throttle"] = sum(
                bit for cell, bit in THROTTLE_BITS.items() if known.get(cell) == "Active"
            )
            return
    missing["throttle"] = "not_supported"


def _ecc(element: Any, values: dict[str, Any], missing: dict[str, str]) -> None:
    """Sums of the counters by kind: volatile ones begin with the driver, aggregate ones are for life (P14)."""
    for measure, branch, word in (
        ("ecc_corr", "volatile", "_correctable"),
        ("ecc_uncorr", "volatile", "_uncorrectable"),
        ("ecc_uncorr_total", "aggregate", "_uncorrectable"),
    ):
        found = []
        part = element.find("ecc_errors/" + branch)
        for child in part if part is not None else []:
            if word in child.tag:
                found.append(number(child.text)[0])
        old = "double_bit/total" if word == "_uncorrectable" else "single_bit/total"
        if not found and part is not None:
            found.append(number(part.findtext(old))[0])
        known = [value for value in found if value is not None]
        if known:
            values[measure] = int(sum(known))
        else:
            missing[measure] = "not_supported"


def _slice(part: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    missing = {"util": "not_supported", "sm": "not_supported"}
    for measure in ("mem_total", "mem_used", "mem_reserved", "mem_free"):
        _take(values, missing, measure, part.findtext(_CELLS[measure][0][0]))
    return {
        "device": int(number(part.findtext("index"))[0] or 0),
        "gi": _whole(part.findtext("gpu_instance_id")),
        "ci": _whole(part.findtext("compute_instance_id")),
        "values": values,
        "missing": missing,
    }


def _whole(text: str | None) -> int | None:
    value = number(text)[0]
    return None if value is None else int(value)


def _processes(element: Any) -> list[dict[str, Any]]:
    found = []
    for part in element.findall("processes/process_info"):
        pid = _whole(part.findtext("pid"))
        if pid is None:
            continue
        found.append(
            {
                "pid": pid,
                "name": (present(part.findtext("process_name")) or "").split(" ")[0].rsplit("/", 1)[-1],
                "mem_mib": _whole(part.findtext("used_memory")),
                "gi": _whole(part.findtext("gpu_instance_id")),
            }
        )
    return found
