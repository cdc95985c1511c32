"""``nvidia-smi`` in place of NVML, where the library is not there or fits no binding.

Reads the XML of schemas 10 to 13 (``-q -x``), and the CSV query where the XML cannot be read. Same rows as ``nvml``:
a value or a coded reason, UUIDs as identity. One broken card, a warning line or a non-zero exit never hides the
others (pitfall P25): what is there is parsed. MIG slices have no UUID in the XML; it comes from ``-L``,
which has the same device numbers. Calls are single shots: the tool's loop mode can turn bad from the second sample on.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import Any

from pool.agent import procs, smi_csv, smi_xml
from pool.agent.readings import NvmlDown, lost_row, numa_of, utc_now

FIRST_TIMEOUT = 15.0  # without persistence mode the driver loads at the first query
TIMEOUT = 7.0
OUTPUT_LIMIT = 16 * 1024 * 1024
FAILURES = (
    ("version mismatch", "driver_mismatch"),
    ("couldn't communicate with the nvidia driver", "no_driver"),
    ("driver is not loaded", "no_driver"),
    ("no devices were found", "no_devices"),
    ("command not found", "not_found"),
    ("insufficient permissions", "not_permitted"),
)


def program() -> str | None:
    """Path of the tool, or None: the one named by GPUPOOL_NVIDIA_SMI, or the first of the search path."""
    named = os.environ.get("GPUPOOL_NVIDIA_SMI")
    if named is not None:
        return named if os.access(named, os.X_OK) else None
    return shutil.which("nvidia-smi")


def failure(text: str) -> str | None:
    """The state that a whole failure's words stand for: driver_mismatch, no_driver, no_devices, not_found,
    not_permitted; None when the text is no such failure."""
    head = text[:2000].lower()
    for words, code in FAILURES:
        if words in head:
            return code
    return None


class NvidiaSmi:
    """One tool, asked anew each time. Methods raise ``NvmlDown`` only."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._known: dict[str, dict[str, Any]] = {}
        self._mig: dict[str, dict[int, dict[str, Any]]] = {}
        self._instances: dict[str, list[Any]] = {}
        self._fresh = True

    def _run(self, *arguments: str) -> str:
        limit = FIRST_TIMEOUT if self._fresh else TIMEOUT
        try:
            done = subprocess.run(
                [self.path, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=limit,
                check=False,
                env=dict(os.environ, LC_ALL="C"),
            )
        except FileNotFoundError as error:
            raise NvmlDown("not_found") from error
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NvmlDown("collector_down") from error
        self._fresh = False
        return done.stdout[:OUTPUT_LIMIT].decode("utf-8", "replace")

    def _cards(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """What one call tells: of the node, and of each card that answers."""
        text = self._run("-q", "-x")
        try:
            return smi_xml.parse(text)
        except ValueError:
            reason = failure(text)
        if reason is not None:
            raise NvmlDown(reason)
        text = self._run("--query-gpu=" + ",".join(smi_csv.FIELDS), "--format=csv,noheader,nounits")
        cards, _ = smi_csv.cards(text)
        if not cards:
            raise NvmlDown(failure(text) or "nvml_error")
        apps = smi_csv.apps(self._run("--query-compute-apps=" + ",".join(smi_csv.APP_FIELDS), "--format=csv"))
        for card in cards:
            card["processes"] = apps.get(card["uuid"], [])
        return {}, cards

    def _name_slices(self, cards: list[dict[str, Any]]) -> None:
        """Read the MIG UUIDs anew when instances came or went: device numbers shift then (pitfall P22)."""
        now = {card["uuid"]: [part["gi"] for part in card["slices"]] for card in cards if card["mig_enabled"]}
        if now != self._instances:
            listed = smi_csv.listed(self._run("-L")) if now else {}
            self._mig = {
                uuid: {item["device"]: item for item in items}
                for uuid, items in listed.items()
                if uuid in now
            }
            self._instances = now

    def inventory(self) -> dict[str, Any]:
        """Driver, CUDA version and every card that answers, as ``Nvml.inventory``."""
        node, cards = self._cards()
        self._name_slices(cards)
        places = smi_csv.instances(self._run("mig", "-lgi")) if self._instances else {}
        possible = smi_csv.placements(self._run("mig", "-lgipp")) if self._instances else {}
        found = []
        for card in cards:
            mig = {
                "capable": card["mig_capable"],
                "enabled": card["mig_enabled"],
                "slices": self._slices(card, places),
            }
            if card["mig_enabled"]:
                mig["possible"] = [
                    [profile, list(starts), size]
                    for (index, profile), (starts, size) in sorted(possible.items())
                    if index == card["index"]
                ]
            found.append(
                {
                    "uuid": card["uuid"],
                    "index": card["index"],
                    "name": card["name"],
                    "memory_mib": card["values"].get("mem_total"),
                    "pci_bus_id": card["bus"],
                    "numa": numa_of(card["bus"]),
                    "serial": card["serial"],
                    "minor": card["minor"],
                    "mig": mig,
                    "nvlink": None,
                    "pcie": card["pcie"],
                    "power_limit_mw": card["values"].get("power_limit_mw"),
                }
            )
        self._known.update({card["uuid"]: card for card in found})
        return {"driver": node.get("driver"), "cuda": node.get("cuda"), "gpus": found}

    def _slices(
        self, card: dict[str, Any], places: dict[tuple[int, int], tuple[int, int]]
    ) -> list[dict[str, Any]]:
        found = []
        for part in card["slices"]:
            listed = self._mig.get(card["uuid"], {}).get(part["device"])
            if listed is None:
                continue
            start, size = places.get((card["index"], part["gi"]), (None, None))
            found.append(
                {
                    "uuid": listed["uuid"],
                    "profile": listed["profile"],
                    "gi": part["gi"],
                    "ci": part["ci"],
                    "memory_mib": part["values"].get("mem_total"),
                    "start": start,
                    "size": size,
                }
            )
        return found

    def sample(self) -> list[list[Any]]:
        """One row per card and per MIG slice, as ``Nvml.sample``; a known card that is not told of is lost."""
        _, cards = self._cards()
        self._name_slices(cards)
        at = utc_now()
        rows: list[list[Any]] = []
        for card in cards:
            rows.append([card["uuid"], None, at, card["values"], card["missing"], _seen(card["processes"])])
            for part in card["slices"]:
                listed = self._mig.get(card["uuid"], {}).get(part["device"])
                if listed is not None:
                    own = [one for one in card["processes"] if one.get("gi") == part["gi"]]
                    rows.append(
                        [card["uuid"], listed["uuid"], at, part["values"], part["missing"], _seen(own)]
                    )
        seen = {card["uuid"] for card in cards}
        rows.extend(lost_row(uuid) for uuid in self._known if uuid not in seen)
        return rows

    def xids(self) -> list[dict[str, Any]]:
        """The tool tells no XIDs; the kernel log does."""
        return []


def _seen(processes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Processes by what /proc knows of them; the tool's own name where the process is not visible from here."""
    return [
        {
            "pid": one["pid"],
            "name": procs.name_of(one["pid"]) or one["name"],
            "user": procs.user_of(one["pid"]),
            "mem_mib": one["mem_mib"],
        }
        for one in processes
    ]
