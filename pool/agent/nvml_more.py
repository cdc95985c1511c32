"""NVML's further measures of one card: rates, counters, errors, limits, SM activity, XID events.

Each is a value or a coded reason, as in ``nvml``. Rates come from counters read twice (KiB per second); a counter that
fell was reset and gives no rate. ``sm``, ``tensor`` and ``dram`` are GPM figures (Hopper and later; percent of the time
between two samples), also for MIG slices, which NVML measures in no other way.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

from pool.agent.readings import checked

SETTLE_SECONDS = 60.0
AVERAGING_FROM = 7  # NVML_DEVICE_ARCH_AMPERE: power is the mean of a second, except on GA100
GA100_NAMES = ("A100", "A800", "A30", "A30X", "A100X")
NVLINK_TX, NVLINK_RX, MEMORY_TEMP, POWER_AVERAGE = 138, 139, 82, 185
ALL_LINKS = 0xFFFFFFFF
GPM = {
    "sm": "NVML_GPM_METRIC_SM_UTIL",
    "tensor": "NVML_GPM_METRIC_ANY_TENSOR_UTIL",
    "dram": "NVML_GPM_METRIC_DRAM_BW_UTIL",
}


class Further:
    """Remembers counters, samples and times between two readings; one for each NVML session."""

    def __init__(self, session: Any) -> None:
        self.nvml = session
        self.lib = session.lib
        self._counters: dict[tuple[str, str], tuple[float, int]] = {}
        self._settle: dict[str, float] = {}
        self._energy: dict[str, int] = {}
        self._gpm: dict[tuple[str, int | None], Any] = {}
        self._no_gpm: set[str] = set()
        self._process_seen: dict[str, int] = {}

    # -- one card --------------------------------------------------------------------------------------------

    def card(self, handle: Any, uuid: str, values: dict[str, Any], missing: dict[str, str]) -> None:
        """Add what else NVML knows of the card to ``values`` and ``missing``."""
        lib, read = self.lib, self.nvml.read
        found, without = read(
            {
                "fan": lambda: checked(lib.nvmlDeviceGetFanSpeed(handle)),
                "ecc_corr": lambda: checked(lib.nvmlDeviceGetTotalEccErrors(handle, 0, 0)),
                "ecc_uncorr_total": lambda: checked(lib.nvmlDeviceGetTotalEccErrors(handle, 1, 1)),
                "pcie_gen": lambda: checked(lib.nvmlDeviceGetCurrPcieLinkGeneration(handle)),
                "pcie_width": lambda: checked(lib.nvmlDeviceGetCurrPcieLinkWidth(handle)),
                "pcie_gen_max": lambda: checked(lib.nvmlDeviceGetMaxPcieLinkGeneration(handle)),
                "pcie_width_max": lambda: checked(lib.nvmlDeviceGetMaxPcieLinkWidth(handle)),
                "pcie_replays": lambda: checked(lib.nvmlDeviceGetPcieReplayCounter(handle)),
                "pcie_tx_kib_s": lambda: _kib(lib.nvmlDeviceGetPcieThroughput(handle, 0)),
                "pcie_rx_kib_s": lambda: _kib(lib.nvmlDeviceGetPcieThroughput(handle, 1)),
                "slowdown_c": lambda: checked(lib.nvmlDeviceGetTemperatureThreshold(handle, 1)),
                "tlimit": lambda: int(lib.nvmlDeviceGetMarginTemperature(handle)),
                "persistence": lambda: int(bool(lib.nvmlDeviceGetPersistenceMode(handle))),
                "fabric_state": lambda: self._fabric(handle),
                "ecc_threshold": lambda: self._threshold(handle),
                "retired_pages": lambda: self._retired(handle),
                "retired_pending": lambda: int(bool(lib.nvmlDeviceGetRetiredPagesPendingStatus(handle))),
            }
        )
        values.update(found)
        missing.update(without)
        self._remapped(handle, values, missing)
        self._fields(handle, uuid, values, missing)
        if "power_averaged" not in values and "power_mw" in values:
            kind = self.nvml.maybe(lambda: self._averages(handle))
            if kind is not None:
                values["power_averaged"] = kind
        self._settling(uuid, values)

    def _remapped(self, handle: Any, values: dict[str, Any], missing: dict[str, str]) -> None:
        names = ("remap_corr", "remap_uncorr", "remap_pending", "remap_failure")
        try:
            rows = self.nvml.guard(lambda: self.lib.nvmlDeviceGetRemappedRows(handle))
        except self.nvml.Missing as error:
            missing.update(dict.fromkeys(names, error.reason))
            return
        values.update(zip(names, (int(rows[0]), int(rows[1]), int(bool(rows[2])), int(bool(rows[3])))))

    def _fabric(self, handle: Any) -> int:
        info = self.lib.c_nvmlGpuFabricInfo_t()
        self.lib.nvmlDeviceGetGpuFabricInfo(handle, ctypes.byref(info))
        state = int(info.state)
        if not state:  # not supported: no NVSwitch here
            raise self.nvml.Missing("not_supported")
        return state

    def _threshold(self, handle: Any) -> int:
        status = self.lib.c_nvmlEccSramErrorStatus_v1_t()
        status.version = self.lib.nvmlEccSramErrorStatus_v1
        self.lib.nvmlDeviceGetSramEccErrorStatus(handle, ctypes.byref(status))
        return int(bool(status.bThresholdExceeded))

    def _retired(self, handle: Any) -> int:
        return sum(len(self.lib.nvmlDeviceGetRetiredPages(handle, cause)) for cause in (0, 1))

    def _averages(self, handle: Any) -> int:
        name = self.lib.nvmlDeviceGetName(handle)
        words = (name.decode() if isinstance(name, bytes) else str(name)).replace("-", " ").split()
        old = any(word in GA100_NAMES for word in words)
        return int(self.lib.nvmlDeviceGetArchitecture(handle) >= AVERAGING_FROM and not old)

    def _fields(self, handle: Any, uuid: str, values: dict[str, Any], missing: dict[str, str]) -> None:
        wanted = [MEMORY_TEMP, POWER_AVERAGE, (NVLINK_TX, ALL_LINKS), (NVLINK_RX, ALL_LINKS)]
        answers = self.nvml.maybe(lambda: self.lib.nvmlDeviceGetFieldValues(handle, wanted))
        found = {}
        for answer in answers if answers is not None else []:
            if int(answer.nvmlReturn) == 0:
                found[int(answer.fieldId)] = _field(answer)
        if MEMORY_TEMP in found and found[MEMORY_TEMP]:
            values["mem_temp"] = found[MEMORY_TEMP]
        else:
            missing["mem_temp"] = "not_supported"
        if found.get(POWER_AVERAGE):
            values["power_mw"], values["power_averaged"] = found[POWER_AVERAGE], 1
            missing.pop("power_mw", None)
        for field, name in ((NVLINK_TX, "nvlink_tx_kib_s"), (NVLINK_RX, "nvlink_rx_kib_s")):
            if field not in found:
                missing[name] = "not_supported"
                continue
            rate = self.rate(uuid, name, found[field])
            if rate is None:
                missing[name] = "first_reading"
            else:
                values[name] = rate

    def rate(self, uuid: str, name: str, counter: int) -> int | None:
        """The counter's growth per second since the last reading; None at the first and after a reset."""
        now = time.monotonic()
        last = self._counters.get((uuid, name))
        self._counters[uuid, name] = (now, counter)
        if last is None or counter < last[1] or now <= last[0]:
            return None
        return round((counter - last[1]) / (now - last[0]))

    # -- the first minute of a driver ------------------------------------------------------------------------

    def returned(self, uuid: str) -> None:
        """The card was away: its driver started anew, and what it shows for a minute is no work."""
        self._settle[uuid] = time.monotonic() + SETTLE_SECONDS

    def _settling(self, uuid: str, values: dict[str, Any]) -> None:
        energy = values.get("energy_mj")
        if energy is not None:
            if energy < self._energy.get(uuid, 0):  # counted since the driver was loaded
                self.returned(uuid)
            self._energy[uuid] = energy
        if time.monotonic() < self._settle.get(uuid, 0.0):
            values["settling"] = 1

    # -- GPM: activity of SMs --------------------------------------------------------------------------------

    def activity(
        self, handle: Any, uuid: str, instance: int | None, values: dict[str, Any], missing: dict[str, str]
    ) -> None:
        """``sm``, ``tensor`` and ``dram`` in percent since the last sample, of the card or of one MIG instance."""
        if uuid in self._no_gpm:
            return
        if (uuid, None) not in self._gpm and instance is None:
            support = self.nvml.maybe(lambda: self.lib.nvmlGpmQueryDeviceSupport(handle))
            if support is None or not support.isSupportedDevice:
                self._no_gpm.add(uuid)
                return
        sample = self.nvml.maybe(lambda: self._gpm_sample(handle, instance))
        before = self._gpm.get((uuid, instance))
        self._gpm[uuid, instance] = sample
        if before is None or sample is None:
            missing["sm"] = "first_reading" if sample is not None else "not_supported"
        else:
            figures = self.nvml.maybe(lambda: self._gpm_figures(before, sample), {})
            values.update(figures)
            if "sm" in figures:
                missing.pop("sm", None)
        if before is not None:
            self.nvml.maybe(lambda: self.lib.nvmlGpmSampleFree(before))

    def _gpm_sample(self, handle: Any, instance: int | None) -> Any:
        sample = self.lib.nvmlGpmSampleAlloc()
        if instance is None:
            self.lib.nvmlGpmSampleGet(handle, sample)
        else:
            self.lib.nvmlGpmMigSampleGet(handle, instance, sample)
        return sample

    def _gpm_figures(self, before: Any, sample: Any) -> dict[str, float]:
        lib = self.lib
        ask = lib.c_nvmlGpmMetricsGet_t()
        ask.version = lib.NVML_GPM_METRICS_GET_VERSION
        ask.numMetrics = len(GPM)
        ask.sample1, ask.sample2 = before, sample
        for place, constant in enumerate(GPM.values()):
            ask.metrics[place].metricId = getattr(lib, constant)
        lib.nvmlGpmMetricsGet(ask)
        return {
            name: round(min(100.0, max(0.0, ask.metrics[place].value)), 1)
            for place, name in enumerate(GPM)
            if ask.metrics[place].nvmlReturn == 0
        }

    def forget(self) -> None:
        """The library was opened anew: samples of the old session are worth nothing."""
        self._gpm.clear()
        self._no_gpm.clear()

    # -- processes -------------------------------------------------------------------------------------------

    def process_activity(self, handle: Any, uuid: str, processes: list[dict[str, Any]]) -> None:
        """Each process' share of SM time in percent (``sm``), where the driver keeps it; absent elsewhere."""
        if not processes:
            return
        since = self._process_seen.get(uuid, 0)
        latest: dict[int, Any] = {}
        for one in self.nvml.maybe(lambda: self.lib.nvmlDeviceGetProcessUtilization(handle, since), []):
            if int(one.pid) not in latest or one.timeStamp > latest[int(one.pid)].timeStamp:
                latest[int(one.pid)] = one
        if latest:
            self._process_seen[uuid] = max(int(one.timeStamp) for one in latest.values())
        for process in processes:
            one = latest.get(process["pid"])
            if one is not None and 0 <= int(one.smUtil) <= 100:
                process["sm"] = int(one.smUtil)


class Events:
    """XIDs as NVML tells them: for nodes whose kernel log may not be read. ``take`` never waits."""

    XID = 8  # nvmlEventTypeXidCriticalError

    def __init__(self, session: Any) -> None:
        self.nvml, self.lib = session, session.lib
        self._set: Any = None

    def open(self, handles: list[Any]) -> None:
        """Watch these cards; a driver without events leaves it closed."""
        self._set = self.nvml.maybe(self.lib.nvmlEventSetCreate)
        for handle in handles if self._set is not None else []:
            self.nvml.maybe(
                lambda handle=handle: self.lib.nvmlDeviceRegisterEvents(handle, self.XID, self._set)
            )

    def close(self) -> None:
        if self._set is not None:
            self.nvml.maybe(lambda: self.lib.nvmlEventSetFree(self._set))
            self._set = None

    def take(self) -> list[dict[str, Any]]:
        """[{gpu_uuid, xid}] since the last call, at most 100."""
        found: list[dict[str, Any]] = []
        while self._set is not None and len(found) < 100:
            try:
                data = self.lib.nvmlEventSetWait_v2(self._set, 0)
            except Exception:  # a time-out is an error in NVML's words: nothing more to read
                break
            if not int(data.eventType) & self.XID:
                continue
            uuid = self.nvml.maybe(lambda data=data: self.lib.nvmlDeviceGetUUID(data.device))
            found.append(
                {"gpu_uuid": uuid.decode() if isinstance(uuid, bytes) else uuid, "xid": int(data.eventData)}
            )
        return found


def _kib(value: Any) -> int:
    """NVML's KB/s are thousands of bytes."""
    return checked(value) * 1000 // 1024


def _field(answer: Any) -> int:
    """The integer of a field value by its type (double, int, long, long long, signed)."""
    kind, value = int(answer.valueType), answer.value
    reads: dict[int, Callable[[], Any]] = {
        0: lambda: value.dVal,
        1: lambda: value.uiVal,
        2: lambda: value.ulVal,
        3: lambda: value.ullVal,
        4: lambda: value.sllVal,
        5: lambda: value.siVal,
        6: lambda: value.usVal,
    }
    return int(reads[kind]())
