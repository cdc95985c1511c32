"""dcgm-exporter's series of all generations as readings. Pure.

Old names and new ones, labels in every spelling (pitfall P18), blank numbers (P17), rows repeated per pod, job or vGPU
(kept once, the workloads as a list). Of a card with MIG instances, board values are printed once per instance: they
count once, the largest of them (P04); memory in use is added up; and the card's activity is that of its instances,
weighted by their compute slices (P03). Fields whose unit differs by driver (NVLink totals) are not read (P31).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from monitoring.engine.measures import blank
from monitoring.sources.reading import Metric, Reading, Scrape
from pool.engine.mig import geometry_for_product

# Series (without DCGM_FI_DEV_ or DCGM_FI_PROF_) → measure, factor to the unit of messages.
DEVICE: dict[str, tuple[str, float]] = {
    "GPU_UTIL": ("util", 1),
    "FB_USED": ("mem_used", 1),
    "FB_FREE": ("mem_free", 1),
    "FB_TOTAL": ("mem_total", 1),
    "FB_RESERVED": ("mem_reserved", 1),
    "GPU_TEMP": ("temp", 1),
    "MEMORY_TEMP": ("mem_temp", 1),
    "SLOWDOWN_TEMP": ("slowdown_c", 1),
    "FAN_SPEED": ("fan", 1),
    "POWER_USAGE": ("power_mw", 1000),
    "POWER_MGMT_LIMIT": ("power_limit_mw", 1000),
    "ENFORCED_POWER_LIMIT": ("power_limit_mw", 1000),
    "TOTAL_ENERGY_CONSUMPTION": ("energy_mj", 1),
    "SM_CLOCK": ("sm_clock", 1),
    "MEM_CLOCK": ("mem_clock", 1),
    "CLOCK_THROTTLE_REASONS": ("throttle", 1),
    "CLOCKS_EVENT_REASONS": ("throttle", 1),
    "PCIE_REPLAY_COUNTER": ("pcie_replays", 1),
    "PCIE_LINK_GEN": ("pcie_gen", 1),
    "PCIE_LINK_WIDTH": ("pcie_width", 1),
    "PCIE_MAX_LINK_GEN": ("pcie_gen_max", 1),
    "PCIE_MAX_LINK_WIDTH": ("pcie_width_max", 1),
    "ECC_SBE_VOL_TOTAL": ("ecc_corr", 1),
    "ECC_DBE_VOL_TOTAL": ("ecc_uncorr", 1),
    "ECC_DBE_AGG_TOTAL": ("ecc_uncorr_total", 1),
    "CORRECTABLE_REMAPPED_ROWS": ("remap_corr", 1),
    "UNCORRECTABLE_REMAPPED_ROWS": ("remap_uncorr", 1),
    "ROW_REMAP_PENDING": ("remap_pending", 1),
    "ROW_REMAP_FAILURE": ("remap_failure", 1),
    "RETIRED_PENDING": ("retired_pending", 1),
}
PROFILING: dict[str, tuple[str, float]] = {
    "SM_ACTIVE": ("sm", 100),
    "GR_ENGINE_ACTIVE": ("gr", 100),
    "PIPE_TENSOR_ACTIVE": ("tensor", 100),
    "DRAM_ACTIVE": ("dram", 100),
    "PCIE_TX_BYTES": ("pcie_tx_kib_s", 1 / 1024),
    "PCIE_RX_BYTES": ("pcie_rx_kib_s", 1 / 1024),
}
_OLD = {"GPU_UTILIZATION": "GPU_UTIL", "TOTAL_ENERGY_CONSUMPTION": "TOTAL_ENERGY_CONSUMPTION"}
NAMES: dict[str, tuple[str, float]] = (
    {f"DCGM_FI_DEV_{name}": to for name, to in DEVICE.items()}
    | {f"DCGM_FI_PROF_{name}": to for name, to in PROFILING.items()}
    | {f"dcgm_{name.lower()}": to for name, to in DEVICE.items()}
    | {f"dcgm_{old.lower()}": DEVICE[name] for old, name in _OLD.items()}
)
XID, XID_OLD, XID_COUNT = "DCGM_FI_DEV_XID_ERRORS", "dcgm_xid_errors", "DCGM_EXP_XID_ERRORS_COUNT"
OF_INSTANCES = frozenset({"sm", "gr", "tensor", "dram", "mem_used", "mem_free", "mem_reserved", "mem_total"})
ACTIVITY = ("sm", "tensor", "dram")
_UUID = re.compile(r"GPU-[0-9a-fA-F]{8}-[0-9a-fA-F-]{4,60}\Z")


def label(labels: dict[str, str], *names: str) -> str:
    """The first of the labels that says something; `-` is a blank by option of the exporter."""
    for name in names:
        text = labels.get(name, "")
        if text and text != "-":
            return text
    return ""


def scrape(series: Iterable[Metric], into: Scrape, *, target_labels: bool = False) -> None:
    """Add dcgm's series to `into`. With `target_labels` (a Prometheus server's answer) plain pod labels may be those
    of the exporter itself."""
    for one in series:
        known = NAMES.get(one.name)
        if known is None and one.name not in (XID, XID_OLD, XID_COUNT):
            continue
        labels = one.labels
        uuid = label(labels, "UUID", "uuid", "gpu_uuid")
        if not _UUID.match(uuid) or "nvlink" in labels or "nvswitch" in labels:
            into.problems["not_a_gpu"] += 1
            continue
        instance = label(labels, "GPU_I_ID", "gpu_i_id")
        key = (uuid, int(instance) if instance.isdecimal() else None)
        reading = into.readings.get(key)
        if reading is None:
            reading = into.readings[key] = Reading(uuid, key[1])
        _describe(reading, one, into, target_labels)
        if known is None:
            _xid(reading, one)
        else:
            _measure(reading, known[0], one.value, known[1])


def _describe(reading: Reading, one: Metric, into: Scrape, target_labels: bool) -> None:
    labels = one.labels
    reading.profile = reading.profile or label(labels, "GPU_I_PROFILE", "gpu_i_profile")
    reading.model = reading.model or label(labels, "modelName", "model_name", "modelname")
    number = label(labels, "gpu")
    if reading.index is None and number.isdecimal():
        reading.index = int(number)
    if host := label(labels, "exported_Hostname", "exported_hostname", "Hostname", "hostname"):
        reading.hosts.add(host)
    into.driver = into.driver or label(labels, "DCGM_FI_DRIVER_VERSION")
    if one.at_ms is not None:
        reading.at_ms = max(reading.at_ms or 0, one.at_ms)
    work = workload(labels, target_labels=target_labels)
    if work and work not in reading.workloads:
        reading.workloads.append(work)


def workload(labels: dict[str, str], *, target_labels: bool) -> dict[str, str]:
    """{namespace, pod, container} or {job} that a row names; empty where it names none.

    The plain labels of a Prometheus server's answer may be the exporter's own pod, which is no workload.
    """
    if job := label(labels, "hpc_job"):
        return {"job": job}
    found = {
        "namespace": label(labels, "exported_namespace", "pod_namespace"),
        "pod": label(labels, "exported_pod", "pod_name"),
        "container": label(labels, "exported_container", "container_name"),
    }
    if not found["pod"]:
        plain = {name: label(labels, name) for name in ("namespace", "pod", "container")}
        if target_labels and "exporter" in plain["pod"] + plain["container"]:
            return {}
        found = plain
    return {name: text[:253] for name, text in found.items() if text} if found["pod"] else {}


def _measure(reading: Reading, measure: str, value: float | None, factor: float) -> None:
    if value is None:
        reading.missing.setdefault(measure, "error")
    elif blank(value):
        reading.missing.setdefault(measure, "blank")
    else:
        scaled = value * factor
        before = reading.values.get(measure)
        # The same row once per pod or job: equal, or of two moments (P04); the larger one stands.
        if before is None or math.isnan(before) or scaled > before:
            reading.values[measure] = scaled
        reading.missing.pop(measure, None)


def _xid(reading: Reading, one: Metric) -> None:
    if one.value is None or blank(one.value) or not 0 <= one.value < 100_000:
        return
    if one.name == XID_COUNT:
        code = label(one.labels, "xid")
        if code.isdecimal():
            reading.xid_counts[int(code)] = max(reading.xid_counts.get(int(code), 0), int(one.value))
    else:
        reading.xid = max(reading.xid or 0, int(one.value))


def settle(into: Scrape) -> None:
    """Make cards of their instances, and derive what was told in parts. Call once, when all series were read."""
    for reading in into.readings.values():
        _derive(reading)
    parents: dict[str, list[Reading]] = {}
    for (uuid, instance), reading in into.readings.items():
        if instance is not None:
            parents.setdefault(uuid, []).append(reading)
    for uuid, parts in parents.items():
        card = into.readings.setdefault((uuid, None), Reading(uuid))
        _card_of(card, parts)


def _derive(reading: Reading) -> None:
    values, missing = reading.values, reading.missing
    engine = values.pop("gr", None)
    if engine is not None:
        values.setdefault("sm", engine)
        missing.pop("sm", None)
    elif "gr" in missing:
        missing.setdefault("sm", missing.pop("gr"))
    if "sm" not in values:
        # No profiling here: a GeForce card, a vGPU, or a module that failed to load (pitfall P28).
        missing.setdefault("sm", "not_supported")
    used, free = values.get("mem_used"), values.get("mem_free")
    if "mem_total" not in values and used is not None and free is not None:
        values["mem_total"] = used + free + (values.get("mem_reserved") or 0)


def _card_of(card: Reading, parts: list[Reading]) -> None:
    """Board values once, memory in use added up, activity weighted by compute slices."""
    for part in parts:
        card.model = card.model or part.model
        card.index = part.index if card.index is None else card.index
        card.hosts |= part.hosts
        if part.at_ms is not None:
            card.at_ms = max(card.at_ms or 0, part.at_ms)
        if part.xid is not None:
            card.xid = max(card.xid or 0, part.xid)
        for code, count in part.xid_counts.items():
            card.xid_counts[code] = max(card.xid_counts.get(code, 0), count)
        for name in [n for n in part.values if n not in OF_INSTANCES and n != "util"]:
            value = part.values.pop(name)
            before = card.values.get(name)
            if value is not None:
                card.values[name] = value if before is None else max(before, value)
        for name, reason in part.missing.items():
            if name not in OF_INSTANCES and name not in card.values:
                card.missing.setdefault(name, reason)
    card.values.pop("util", None)
    card.missing["util"] = "not_measurable"
    used = [part.values.get("mem_used") for part in parts]
    if "mem_used" not in card.values and None not in used:
        card.values["mem_used"] = sum(value or 0 for value in used)
    table = geometry_for_product(card.model)
    whole = table.compute_slices if table is not None else 7
    for name in ACTIVITY:
        shares = [part.values.get(name) for part in parts]
        if None in shares:
            card.missing[name] = "not_measurable"
            continue
        card.values[name] = (
            sum((share or 0) * slices(part) for share, part in zip(shares, parts, strict=True)) / whole
        )
        card.missing.pop(name, None)
    for part in parts:
        part.missing["util"] = "not_measurable"


def slices(part: Reading) -> int:
    """Compute slices of a MIG profile: `3g.20gb` has 3, `1c.2g.10gb` (a part of an instance) counts as its instance."""
    found = re.search(r"(\d+)g\.", part.profile)
    return int(found.group(1)) if found else 1
