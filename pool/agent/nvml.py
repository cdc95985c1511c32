"""NVML through ``pynvml``, one guard around each query. Runs in the collector's child process only.

Every measure is a value or a coded reason why not (``not_supported``, ``not_permitted``, ``gpu_lost``,
``reset_required``, ``error``); a missing one is never 0, and the library's unsigned maxima are missing
values. Units: percent, MiB, degrees Celsius, milliwatt, MHz, millijoule. Identity is the UUID. A card that
was seen once and is no longer enumerated keeps its row, with every measure ``gpu_lost``.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from typing import Any

from pool.agent import procs
from pool.agent.nvml_more import Events, Further
from pool.agent.readings import MIB, ULL_MAX, Missing, NvmlDown, checked, lost_row, numa_of, utc_now

__all__ = ["Missing", "Nvml", "NvmlDown", "checked", "load", "utc_now"]

REINIT_SECONDS = 600
REINIT_AFTER_ERROR = 10


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


class Nvml:
    """One NVML session. Methods raise ``NvmlDown`` only; everything smaller is a coded reason in the
    answer."""

    def __init__(self, library: Any) -> None:
        self.lib = library
        self._open_since = 0.0
        self._known: dict[str, dict[str, Any]] = {}
        self._bad = False
        self.Missing = Missing
        self.further = Further(self)
        self.events = Events(self)
        self._watched: set[str] = set()
        self._lost: set[str] = set()
        self._reasons = {
            library.NVML_ERROR_NOT_SUPPORTED: "not_supported",
            library.NVML_ERROR_NO_PERMISSION: "not_permitted",
            library.NVML_ERROR_GPU_IS_LOST: "gpu_lost",
            library.NVML_ERROR_RESET_REQUIRED: "reset_required",
            library.NVML_ERROR_FUNCTION_NOT_FOUND: "not_supported",
            library.NVML_ERROR_ARGUMENT_VERSION_MISMATCH: "not_supported",
            library.NVML_ERROR_NO_DATA: "not_supported",
        }
        self._down = {
            library.NVML_ERROR_LIBRARY_NOT_FOUND: "no_driver",
            library.NVML_ERROR_DRIVER_NOT_LOADED: "no_driver",
            library.NVML_ERROR_NO_PERMISSION: "not_permitted",
            library.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "driver_mismatch",
        }

    # -- session ---------------------------------------------------------------------------------------------

    def ensure(self) -> None:
        """Open the library, or open it anew ten seconds after an error and every ten minutes (a lost card
        may be back)."""
        now = time.monotonic()
        age = now - self._open_since
        if self._open_since and age < (REINIT_AFTER_ERROR if self._bad else REINIT_SECONDS):
            return
        if self._open_since:
            self.events.close()
            self._watched = set()
            self.further.forget()
            try:
                self.lib.nvmlShutdown()
            except self.lib.NVMLError:
                pass
            self._open_since = 0.0
        try:
            self.lib.nvmlInit()
        except self.lib.NVMLError as error:
            raise NvmlDown(self._down.get(error.value, "nvml_error")) from error
        self._open_since = now
        self._bad = False

    def guard(self, query: Callable[[], Any]) -> Any:
        """The value of one query; ``Missing`` with its reason for whatever goes wrong."""
        try:
            return query()
        except self.lib.NVMLError as error:
            reason = self._reasons.get(error.value, "error")
            if reason in ("gpu_lost", "reset_required", "error"):
                self._bad = True
            raise Missing(reason) from error
        except Missing:
            raise
        except (
            Exception
        ) as error:  # a binding that is older or newer than the driver must not end the collector
            raise Missing("not_supported") from error

    def maybe(self, query: Callable[[], Any], default: Any = None) -> Any:
        try:
            return self.guard(query)
        except Missing:
            return default

    def _handles(self) -> list[Any]:
        try:
            count = self.guard(self.lib.nvmlDeviceGetCount)
        except Missing as error:
            self._bad = True
            raise NvmlDown("nvml_error") from error
        found = []
        for index in range(count):
            handle = self.maybe(lambda index=index: self.lib.nvmlDeviceGetHandleByIndex(index))
            if handle is not None:
                found.append((index, handle))
        return found

    # -- inventory -------------------------------------------------------------------------------------------

    def inventory(self) -> dict[str, Any]:
        """Driver, CUDA version and every card that answers, in index order."""
        self.ensure()
        lib = self.lib
        cuda = self.maybe(lib.nvmlSystemGetCudaDriverVersion)
        handles = [
            (i, h, self.maybe(lambda h=h: _text(lib.nvmlDeviceGetUUID(h)))) for i, h in self._handles()
        ]
        by_bus = {}
        for _, handle, uuid in handles:
            bus = self.maybe(lambda handle=handle: _text(lib.nvmlDeviceGetPciInfo(handle).busId).lower())
            if uuid and bus:
                by_bus[bus] = uuid
        cards = [self._card(index, handle, uuid, by_bus) for index, handle, uuid in handles if uuid]
        for card in cards:
            self._known[card["uuid"]] = card
        return {
            "driver": self.maybe(lambda: _text(lib.nvmlSystemGetDriverVersion())),
            "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None,
            "gpus": cards,
        }

    def _card(self, index: int, handle: Any, uuid: str, by_bus: dict[str, str]) -> dict[str, Any]:
        lib = self.lib
        memory = self.maybe(lambda: lib.nvmlDeviceGetMemoryInfo(handle))
        total = self.maybe(lambda: checked(memory.total, ULL_MAX)) if memory is not None else None
        generation = self.maybe(lambda: checked(lib.nvmlDeviceGetMaxPcieLinkGeneration(handle)))
        width = self.maybe(lambda: checked(lib.nvmlDeviceGetMaxPcieLinkWidth(handle)))
        bus_id = self.maybe(lambda: _text(lib.nvmlDeviceGetPciInfo(handle).busId))
        return {
            "uuid": uuid,
            "index": index,
            "name": self.maybe(lambda: _text(lib.nvmlDeviceGetName(handle)), ""),
            "memory_mib": total // MIB if total is not None else None,
            "pci_bus_id": bus_id,
            "numa": numa_of(bus_id),
            "serial": self.maybe(lambda: _text(lib.nvmlDeviceGetSerial(handle))),
            "minor": self.maybe(lambda: checked(lib.nvmlDeviceGetMinorNumber(handle))),
            "mig": self._mig(handle),
            "nvlink": self._nvlink(handle, uuid, by_bus),
            "pcie": {"gen": generation, "width": width} if generation and width else None,
            "power_limit_mw": self.maybe(lambda: checked(lib.nvmlDeviceGetEnforcedPowerLimit(handle))),
        }

    def _mig_mode(self, handle: Any) -> bool | None:
        """True, False, or None on a card without MIG."""
        mode = self.maybe(lambda: self.lib.nvmlDeviceGetMigMode(handle))
        return bool(mode[0]) if mode is not None else None

    def _mig_handles(self, handle: Any) -> list[Any]:
        lib = self.lib
        found = []
        for number in range(self.maybe(lambda: lib.nvmlDeviceGetMaxMigDeviceCount(handle), 0)):
            part = self.maybe(lambda number=number: lib.nvmlDeviceGetMigDeviceHandleByIndex(handle, number))
            if part is not None:
                found.append(part)
        return found

    def _mig(self, handle: Any) -> dict[str, Any]:
        lib = self.lib
        enabled = self._mig_mode(handle)
        slices = []
        for part in self._mig_handles(handle) if enabled else []:
            uuid = self.maybe(lambda part=part: _text(lib.nvmlDeviceGetUUID(part)))
            if not uuid:
                continue
            name = self.maybe(lambda part=part: _text(lib.nvmlDeviceGetName(part)), "")
            match = re.search(r"MIG (\S+)$", name)
            gi = self.maybe(lambda part=part: checked(lib.nvmlDeviceGetGpuInstanceId(part)))
            info = self.maybe(
                lambda gi=gi: lib.nvmlGpuInstanceGetInfo(lib.nvmlDeviceGetGpuInstanceById(handle, gi))
            )
            slices.append(
                {
                    "uuid": uuid,
                    "profile": match.group(1) if match else None,
                    "gi": gi,
                    "ci": self.maybe(lambda part=part: checked(lib.nvmlDeviceGetComputeInstanceId(part))),
                    "memory_mib": self.maybe(
                        lambda part=part: checked(lib.nvmlDeviceGetMemoryInfo(part).total, ULL_MAX) // MIB
                    ),
                    # Placement is readable by root alone; without it the installation keeps what it knew.
                    "start": int(info.placement.start) if info is not None else None,
                    "size": int(info.placement.size) if info is not None else None,
                }
            )
        return {"capable": enabled is not None, "enabled": bool(enabled), "slices": slices}

    def _nvlink(self, handle: Any, uuid: str, by_bus: dict[str, str]) -> dict[str, Any] | None:
        lib = self.lib
        links, peers = 0, set()
        for number in range(getattr(lib, "NVML_NVLINK_MAX_LINKS", 18)):
            if not self.maybe(lambda number=number: lib.nvmlDeviceGetNvLinkState(handle, number), 0):
                continue
            links += 1
            bus = self.maybe(
                lambda number=number: _text(
                    lib.nvmlDeviceGetNvLinkRemotePciInfo(handle, number).busId
                ).lower()
            )
            if bus in by_bus and by_bus[bus] != uuid:
                peers.add(by_bus[bus])
        return {"links": links, "peers": sorted(peers)} if links else None

    # -- samples ---------------------------------------------------------------------------------------------

    def sample(self) -> list[list[Any]]:
        """One row per card and per MIG slice: [gpu uuid, mig uuid | None, time, values, missing,
        processes]."""
        self.ensure()
        rows: list[list[Any]] = []
        seen = set()
        for _, handle in self._handles():
            uuid = self.maybe(lambda handle=handle: _text(self.lib.nvmlDeviceGetUUID(handle)))
            if uuid is None:
                continue
            seen.add(uuid)
            if uuid in self._lost:
                self._lost.discard(uuid)
                self.further.returned(uuid)
            rows.extend(self._card_rows(handle, uuid))
        for uuid in self._known:
            if uuid not in seen:
                self._bad = True
                self._lost.add(uuid)
                rows.append(lost_row(uuid))
        return rows

    def xids(self) -> list[dict[str, Any]]:
        """XIDs that NVML told since the last call: [{gpu_uuid, xid}]."""
        handles = {}
        for _, handle in self._handles():
            uuid = self.maybe(lambda handle=handle: _text(self.lib.nvmlDeviceGetUUID(handle)))
            if uuid is not None:
                handles[uuid] = handle
        if not handles.keys() <= self._watched:
            found = self.events.take()
            self.events.close()
            self.events.open(list(handles.values()))
            self._watched = set(handles)
            return found
        return self.events.take()

    def read(self, queries: dict[str, Callable[[], int]]) -> tuple[dict[str, Any], dict[str, str]]:
        values: dict[str, Any] = {}
        missing: dict[str, str] = {}
        for measure, query in queries.items():
            try:
                values[measure] = self.guard(query)
            except Missing as error:
                missing[measure] = error.reason
        return values, missing

    def _memory(self, handle: Any, values: dict[str, Any], missing: dict[str, str]) -> None:
        """Total, used and reserved apart (MiB); an old driver's single call counts the reserve as used."""
        lib = self.lib
        try:
            memory = self.guard(lambda: lib.nvmlDeviceGetMemoryInfo(handle, version=lib.nvmlMemory_v2))
        except Missing:
            try:
                memory = self.guard(lambda: lib.nvmlDeviceGetMemoryInfo(handle))
            except Missing as error:
                missing.update(dict.fromkeys(("mem_used", "mem_total", "mem_reserved"), error.reason))
                return
        for measure, field in (("mem_total", "total"), ("mem_used", "used"), ("mem_reserved", "reserved")):
            number = getattr(memory, field, None)
            if number is None or not 0 <= int(number) < ULL_MAX:
                missing[measure] = "not_supported"
            else:
                values[measure] = int(number) // MIB

    def _card_rows(self, handle: Any, uuid: str) -> list[list[Any]]:
        lib = self.lib
        at = utc_now()
        values, missing = self.read(
            {
                "util": lambda: checked(lib.nvmlDeviceGetUtilizationRates(handle).gpu, 101),
                "temp": lambda: checked(lib.nvmlDeviceGetTemperature(handle, lib.NVML_TEMPERATURE_GPU), 1000),
                "power_mw": lambda: checked(lib.nvmlDeviceGetPowerUsage(handle)),
                "power_limit_mw": lambda: checked(lib.nvmlDeviceGetEnforcedPowerLimit(handle)),
                "sm_clock": lambda: checked(lib.nvmlDeviceGetClockInfo(handle, lib.NVML_CLOCK_SM)),
                "mem_clock": lambda: checked(lib.nvmlDeviceGetClockInfo(handle, lib.NVML_CLOCK_MEM)),
                "throttle": lambda: checked(lib.nvmlDeviceGetCurrentClocksThrottleReasons(handle), ULL_MAX),
                "ecc_uncorr": lambda: checked(lib.nvmlDeviceGetTotalEccErrors(handle, 1, 0), ULL_MAX),
                "energy_mj": lambda: checked(lib.nvmlDeviceGetTotalEnergyConsumption(handle), ULL_MAX),
            }
        )
        missing["sm"] = missing.get("util", "not_supported")
        self._memory(handle, values, missing)
        self.further.card(handle, uuid, values, missing)
        self.further.activity(handle, uuid, None, values, missing)
        processes = self._processes(handle, missing)
        self.further.process_activity(handle, uuid, processes)
        rows = [[uuid, None, at, values, missing, processes]]
        if self._mig_mode(handle):
            for part in self._mig_handles(handle):
                slice_uuid = self.maybe(lambda part=part: _text(lib.nvmlDeviceGetUUID(part)))
                if slice_uuid is None:
                    continue
                # Busy time is not measured of a slice, SM activity by GPM only; temperature and power are the board's.
                part_values: dict[str, Any] = {}
                part_missing = {"util": "not_supported", "sm": "not_supported"}
                self._memory(part, part_values, part_missing)
                instance = self.maybe(lambda part=part: checked(self.lib.nvmlDeviceGetGpuInstanceId(part)))
                if instance is not None:
                    self.further.activity(handle, uuid, instance, part_values, part_missing)
                rows.append(
                    [uuid, slice_uuid, at, part_values, part_missing, self._processes(part, part_missing)]
                )
        return rows

    def _processes(self, handle: Any, missing: dict[str, str]) -> list[dict[str, Any]]:
        """Compute and graphics processes by pid. What cannot be read is unknown, not none (pitfall P20)."""
        lib = self.lib
        found: dict[int, dict[str, Any]] = {}
        for query in (
            lib.nvmlDeviceGetComputeRunningProcesses_v3,
            lib.nvmlDeviceGetGraphicsRunningProcesses_v3,
        ):
            try:
                entries = self.guard(lambda query=query: query(handle))
            except Missing as error:
                if error.reason != "not_supported" or query is lib.nvmlDeviceGetComputeRunningProcesses_v3:
                    missing["processes"] = error.reason
                continue
            for entry in entries:
                memory = entry.usedGpuMemory
                if memory is not None and not 0 <= int(memory) < ULL_MAX:
                    memory = None
                pid = int(entry.pid)
                found[pid] = {
                    "pid": pid,
                    "name": procs.name_of(pid),
                    "user": procs.user_of(pid),
                    "mem_mib": int(memory) // MIB if memory is not None else None,
                }
        return [found[pid] for pid in sorted(found)]


def load() -> Any:
    """The vendored or installed ``pynvml`` module; ``NvmlDown`` where it cannot even be imported."""
    try:
        import pynvml
    except Exception as error:
        raise NvmlDown("no_binding") from error
    if os.environ.get("GPUPOOL_NO_NVML"):
        raise NvmlDown("switched_off")
    return pynvml
