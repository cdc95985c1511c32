"""The line formats of ``nvidia-smi``: CSV queries, ``-L``, ``mig -lgi`` and ``mig -lgipp``."""

from __future__ import annotations

import re
from typing import Any

from pool.agent.smi_cells import number, present

FIELDS = (
    "index",
    "uuid",
    "name",
    "pci.bus_id",
    "serial",
    "memory.total",
    "memory.used",
    "memory.free",
    "temperature.gpu",
    "utilization.gpu",
    "power.draw",
    "power.limit",
    "clocks.sm",
    "clocks.mem",
    "fan.speed",
)
APP_FIELDS = ("pid", "process_name", "gpu_uuid", "used_gpu_memory")
_MEASURES = {
    "memory.total": ("mem_total", 1),
    "memory.used": ("mem_used", 1),
    "memory.free": ("mem_free", 1),
    "temperature.gpu": ("temp", 1),
    "utilization.gpu": ("util", 1),
    "power.draw": ("power_mw", 1000),
    "power.limit": ("power_limit_mw", 1000),
    "clocks.sm": ("sm_clock", 1),
    "clocks.mem": ("mem_clock", 1),
    "fan.speed": ("fan", 1),
}
_UUID = re.compile(r"GPU-[0-9a-fA-F-]{8,}\Z")
_BAD = re.compile(r"device handle for GPU\s*([0-9a-fA-F:.]+):", re.IGNORECASE)
_CARD = re.compile(r"GPU (\d+): (.+) \(UUID: (GPU-[0-9a-fA-F-]+)\)")
_MIG = re.compile(r"\s+MIG (\S+)\s+Device\s+(\d+): \(UUID: (MIG-[^)]+)\)")
_INSTANCE = re.compile(r"\|\s+(\d+)\s+MIG (\S+)\s+(\d+)\s+(\d+)\s+(\d+):(\d+)\s+\|")
_POSSIBLE = re.compile(r"GPU\s+(\d+) Profile ID\s+(\d+) Placements?\s*: \{([\d,]*)\}:(\d+)")


def cards(text: str, fields: tuple[str, ...] = FIELDS) -> tuple[list[dict[str, Any]], list[str]]:
    """(cards that answered, PCI addresses of those that did not) of a query without header.

    A line counts when it has as many cells as fields and a UUID; the exit status is a hint only (pitfall P25).
    """
    found, failed = [], []
    for line in text.splitlines():
        bad = _BAD.search(line)
        if bad:
            failed.append(bad.group(1).rstrip(":"))
            continue
        cells = dict(zip(fields, (cell.strip() for cell in line.split(","))))
        if len(line.split(",")) != len(fields) or not _UUID.match(cells.get("uuid", "")):
            continue
        values: dict[str, Any] = {}
        missing = {"sm": "not_supported", "throttle": "not_supported"}
        for field, (measure, factor) in _MEASURES.items():
            value, reason = number(cells.get(field))
            if value is None:
                missing[measure] = reason
            else:
                values[measure] = round(value * factor)
        found.append(
            {
                "uuid": cells["uuid"],
                "index": int(number(cells.get("index"))[0] or 0),
                "name": present(cells.get("name")) or "",
                "bus": present(cells.get("pci.bus_id")),
                "serial": present(cells.get("serial")),
                "minor": None,
                "mig_capable": False,
                "mig_enabled": False,
                "pcie": None,
                "values": values,
                "missing": missing,
                "slices": [],
                "processes": [],
            }
        )
    return found, failed


def apps(text: str) -> dict[str, list[dict[str, Any]]]:
    """Card's UUID → its processes, of ``--query-compute-apps``. A program's name may hold commas: the pid is read
    from the left, UUID and memory from the right. A name that the tool does not know is empty."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in text.splitlines():
        left, _, rest = line.partition(",")
        name, uuid, memory = ([*rest.rsplit(",", 2), "", ""])[:3]
        uuid = uuid.strip()
        if not left.strip().isdigit() or not _UUID.match(uuid):
            continue
        size = number(memory)[0]
        shown = present(name) or ""
        found.setdefault(uuid, []).append(
            {
                "pid": int(left),
                "name": shown.split(" ")[0].rsplit("/", 1)[-1]
                if "," not in shown
                else shown.rsplit("/", 1)[-1],
                "mem_mib": None if size is None else int(size),
            }
        )
    return found


def listed(text: str) -> dict[str, list[dict[str, Any]]]:
    """Card's UUID → its MIG devices {device, profile, uuid} in the tool's order, of ``-L``.

    The device number shifts when a sibling goes: it is read together with the XML of the same moment only, and the
    MIG UUID is the key.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    parent = ""
    for line in text.splitlines():
        card = _CARD.match(line)
        if card:
            parent = card.group(3)
            found[parent] = []
            continue
        part = _MIG.match(line)
        if part and parent:
            found[parent].append(
                {"device": int(part.group(2)), "profile": part.group(1), "uuid": part.group(3)}
            )
    return found


def instances(text: str) -> dict[tuple[int, int], tuple[int, int]]:
    """(card's index, GPU instance) → (start, size) in memory slots, of the table of ``mig -lgi``."""
    return {(int(row[0]), int(row[3])): (int(row[4]), int(row[5])) for row in _INSTANCE.findall(text)}


def placements(text: str) -> dict[tuple[int, int], tuple[tuple[int, ...], int]]:
    """(card's index, profile id) → (possible starts, size), of ``mig -lgipp``, in both of its spellings."""
    return {
        (int(card), int(profile)): (tuple(int(n) for n in starts.split(",") if n), int(size))
        for card, profile, starts, size in _POSSIBLE.findall(text)
    }
