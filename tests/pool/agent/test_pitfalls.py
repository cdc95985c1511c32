"""Traps of NVML and of the driver (facts/pitfalls.json), each by its id, with a stand-in for the library."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from pool.agent import collector, nvml_more
from pool.agent.jobs import Jobs
from pool.agent.kmsg import parse as kernel_line
from pool.agent.nvml import Nvml, NvmlDown
from pool.agent.outbox import Outbox
from pool.agent.telemetry import Telemetry
from tests.samples import needs_real, real

MIB = 1024 * 1024


class Error(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value


class Library:
    """One card; what a test does not set is not supported."""

    NVMLError = Error
    NVML_SUCCESS = 0
    NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_NO_PERMISSION, NVML_ERROR_GPU_IS_LOST = 3, 4, 15
    NVML_ERROR_RESET_REQUIRED, NVML_ERROR_FUNCTION_NOT_FOUND, NVML_ERROR_ARGUMENT_VERSION_MISMATCH = (
        16,
        13,
        25,
    )
    NVML_ERROR_NO_DATA, NVML_ERROR_LIBRARY_NOT_FOUND, NVML_ERROR_DRIVER_NOT_LOADED = 21, 12, 9
    NVML_ERROR_LIB_RM_VERSION_MISMATCH = 18
    NVML_TEMPERATURE_GPU = NVML_CLOCK_SM = 0
    NVML_CLOCK_MEM, nvmlMemory_v2 = 2, 2
    NVML_GPM_METRICS_GET_VERSION, NVML_GPM_METRIC_SM_UTIL = 1, 2
    NVML_GPM_METRIC_ANY_TENSOR_UTIL, NVML_GPM_METRIC_DRAM_BW_UTIL = 5, 10

    def __init__(self, **answers: Any) -> None:
        self.answers: dict[str, Any] = {
            "nvmlInit": None,
            "nvmlShutdown": None,
            "nvmlDeviceGetCount": 1,
            "nvmlDeviceGetHandleByIndex": "card",
            "nvmlDeviceGetUUID": "GPU-1",
            "nvmlDeviceGetName": "NVIDIA H100 80GB HBM3",
            "nvmlDeviceGetComputeRunningProcesses_v3": [],
            "nvmlDeviceGetGraphicsRunningProcesses_v3": [],
            **answers,
        }
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml"):
            raise AttributeError(name)

        def call(*arguments: Any, **more: Any) -> Any:
            self.calls.append(name)
            answer = self.answers.get(name, Error(3))
            if callable(answer):
                answer = answer(*arguments)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call


def row(session: Nvml) -> tuple[dict[str, Any], dict[str, str], list[Any]]:
    ((_, _, _, values, missing, processes),) = session.sample()
    return values, missing, processes


def field(number: int, value: int) -> Any:
    return SimpleNamespace(fieldId=number, nvmlReturn=0, valueType=3, value=SimpleNamespace(ullVal=value))


def test_p09_the_kind_of_the_power_stays_with_it() -> None:
    session = Nvml(Library(nvmlDeviceGetPowerUsage=300_000, nvmlDeviceGetFieldValues=[field(185, 295_010)]))
    values, _, _ = row(session)
    assert (values["power_mw"], values["power_averaged"]) == (295_010, 1)
    for name, architecture, kind in (
        ("NVIDIA H100 80GB HBM3", 9, 1),
        ("NVIDIA A100-SXM4-80GB", 7, 0),
        ("NVIDIA A10", 7, 1),
        ("Tesla V100-SXM2-32GB", 5, 0),
    ):
        library = Library(
            nvmlDeviceGetPowerUsage=300_000, nvmlDeviceGetName=name, nvmlDeviceGetArchitecture=architecture
        )
        values, _, _ = row(Nvml(library))
        assert (values["power_mw"], values["power_averaged"]) == (300_000, kind), name


def test_p10_a_counter_that_fell_gives_no_rate_and_marks_a_new_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(nvml_more.time, "monotonic", lambda: clock[0])
    library = Library(nvmlDeviceGetTotalEnergyConsumption=5_000_000)
    session = Nvml(library)
    assert "settling" not in row(session)[0]
    clock[0] += 10
    library.answers["nvmlDeviceGetTotalEnergyConsumption"] = 7_000
    assert row(session)[0]["settling"] == 1
    clock[0] += 61
    library.answers["nvmlDeviceGetTotalEnergyConsumption"] = 900_000
    assert "settling" not in row(session)[0]
    further = session.further
    assert further.rate("u", "nvlink_tx_kib_s", 1000) is None
    clock[0] += 10
    assert further.rate("u", "nvlink_tx_kib_s", 6000) == 500
    clock[0] += 10
    assert further.rate("u", "nvlink_tx_kib_s", 10) is None, "never a negative one"
    clock[0] += 10
    assert further.rate("u", "nvlink_tx_kib_s", 110) == 10


def test_p05_the_second_version_of_the_memory_call_is_asked_first() -> None:
    def memory(handle: Any, *version: Any) -> Any:
        return SimpleNamespace(total=150754820096, used=17782800384, free=132329242624, reserved=643825664)

    values, missing, _ = row(Nvml(Library(nvmlDeviceGetMemoryInfo=memory)))
    assert (values["mem_total"], values["mem_used"], values["mem_reserved"]) == (143771, 16959, 614)
    old = SimpleNamespace(total=16 * 1024 * MIB, used=500 * MIB)
    values, missing, _ = row(Nvml(Library(nvmlDeviceGetMemoryInfo=old)))
    assert values["mem_used"] == 500 and missing["mem_reserved"] == "not_supported"


def test_p20_processes_that_cannot_be_read_are_named_as_unknown() -> None:
    values, missing, processes = row(Nvml(Library(nvmlDeviceGetComputeRunningProcesses_v3=Error(4))))
    assert processes == [] and missing["processes"] == "not_permitted"
    hidden = SimpleNamespace(pid=999_999_999, usedGpuMemory=0xFFFFFFFFFFFFFFFF)
    _, missing, processes = row(Nvml(Library(nvmlDeviceGetComputeRunningProcesses_v3=[hidden])))
    assert "processes" not in missing
    assert processes == [{"pid": 999_999_999, "name": "", "user": None, "mem_mib": None}]


def test_p20_the_share_of_a_process_is_its_newest() -> None:
    used = SimpleNamespace(pid=42, usedGpuMemory=512 * MIB)
    shares = [
        SimpleNamespace(pid=42, timeStamp=stamp, smUtil=share)
        for stamp, share in ((10, 5), (30, 71), (20, 9))
    ]
    library = Library(nvmlDeviceGetComputeRunningProcesses_v3=[used], nvmlDeviceGetProcessUtilization=shares)
    _, _, processes = row(Nvml(library))
    assert (processes[0]["sm"], processes[0]["mem_mib"]) == (71, 512)


def test_p23_the_first_question_may_take_long_and_persistence_is_told() -> None:
    assert collector.FIRST_TIMEOUT >= 10
    values, _, _ = row(Nvml(Library(nvmlDeviceGetPersistenceMode=0)))
    assert values["persistence"] == 0


@pytest.mark.parametrize(("code", "reason"), [(15, "gpu_lost"), (16, "reset_required"), (999, "error")])
def test_p24_a_card_in_trouble_has_its_reason_and_the_library_is_opened_anew(
    monkeypatch: pytest.MonkeyPatch, code: int, reason: str
) -> None:
    clock = [1000.0]
    monkeypatch.setattr("pool.agent.nvml.time.monotonic", lambda: clock[0])
    library = Library(nvmlDeviceGetUtilizationRates=Error(code))
    session = Nvml(library)
    assert row(session)[1]["util"] == reason
    clock[0] += 11
    session.sample()
    assert library.calls.count("nvmlInit") == 2 and library.calls.count("nvmlShutdown") == 1


def test_p24_a_lost_card_keeps_its_row_and_settles_when_it_is_back() -> None:
    library = Library()
    session = Nvml(library)
    session.inventory()
    library.answers["nvmlDeviceGetCount"] = 0
    ((uuid, _, _, values, missing, _),) = session.sample()
    assert (uuid, values, set(missing.values())) == ("GPU-1", {}, {"gpu_lost"})
    library.answers["nvmlDeviceGetCount"] = 1
    assert row(session)[0]["settling"] == 1, "its driver started anew (P02)"


@pytest.mark.parametrize(
    ("code", "reason"), [(18, "driver_mismatch"), (9, "no_driver"), (12, "no_driver"), (999, "nvml_error")]
)
def test_p24_a_library_that_does_not_open_says_why(code: int, reason: str) -> None:
    with pytest.raises(NvmlDown) as caught:
        Nvml(Library(nvmlInit=Error(code))).inventory()
    assert caught.value.reason == reason


def test_p03_p35_sm_activity_of_a_card_and_of_its_instances_between_two_samples() -> None:
    class Metrics:
        def __init__(self) -> None:
            self.metrics = [SimpleNamespace(metricId=0, nvmlReturn=0, value=0.0) for _ in range(8)]

    def get(ask: Any) -> Any:
        for metric in ask.metrics[: ask.numMetrics]:
            metric.value = {2: 47.52, 5: 130.0, 10: 33.0}[metric.metricId]
            metric.nvmlReturn = 3 if metric.metricId == 10 else 0
        return ask

    library = Library(
        nvmlGpmQueryDeviceSupport=SimpleNamespace(isSupportedDevice=1),
        nvmlGpmSampleAlloc=lambda: object(),
        nvmlGpmSampleGet=None,
        nvmlGpmMigSampleGet=None,
        nvmlGpmMetricsGet=get,
        nvmlGpmSampleFree=None,
    )
    library.c_nvmlGpmMetricsGet_t = Metrics  # type: ignore[attr-defined]
    session = Nvml(library)
    values, missing, _ = row(session)
    assert "sm" not in values and missing["sm"] == "first_reading"
    values, missing, _ = row(session)
    assert (values["sm"], values["tensor"]) == (47.5, 100.0) and "dram" not in values and "sm" not in missing
    part: tuple[dict[str, Any], dict[str, str]] = ({}, {"sm": "not_supported"})
    session.further.activity("card", "GPU-1", 3, *part)
    session.further.activity("card", "GPU-1", 3, *part)
    assert part[0]["sm"] == 47.5 and library.calls.count("nvmlGpmMigSampleGet") == 2
    without = Nvml(Library(nvmlGpmQueryDeviceSupport=SimpleNamespace(isSupportedDevice=0)))
    values, missing, _ = row(without)
    assert "sm" not in values and missing["sm"] == "not_supported"


@needs_real
def test_p16_the_kernel_log_has_the_code_and_its_process() -> None:
    reports = [
        found for line in real("dmesg_xid119_excerpt.log").splitlines() if (found := kernel_line(line))
    ]
    assert len(reports) == 5 and {(r["xid"], r["bus"], r["pid"]) for r in reports} == {
        (119, "0000:9b:00", 4242)
    }
    assert reports[0]["text"].startswith("pid=4242, name=nvidia-smi, Timeout after 6s")


def test_p16_xids_of_nvml_count_only_where_the_log_cannot_be_read(tmp_path: Any) -> None:
    os.makedirs(tmp_path / "jobs")
    telemetry = Telemetry(Jobs(str(tmp_path), str(tmp_path), Outbox(str(tmp_path / "outbox"))))
    assert telemetry.xid_events([], None) == []
    (event,) = telemetry.xid_events([], [{"gpu_uuid": "GPU-1", "xid": 79}])
    assert (event["kind"], event["gpu_uuid"], event["data"]) == ("xid", "GPU-1", {"xid": 79, "via": "nvml"})


def test_p16_events_of_nvml_are_taken_without_waiting() -> None:
    told = [SimpleNamespace(eventType=8, device="card", eventData=code) for code in (79, 79)]
    other = SimpleNamespace(eventType=1, device="card", eventData=0)
    queue = [told[0], other, told[1], Error(10)]
    library = Library(
        nvmlEventSetCreate="set", nvmlDeviceRegisterEvents=None, nvmlEventSetWait_v2=lambda *_: queue.pop(0)
    )
    session = Nvml(library)
    session.sample()
    session.xids()
    queue[:] = [told[0], other, told[1], Error(10)]
    assert session.xids() == [{"gpu_uuid": "GPU-1", "xid": 79}] * 2
