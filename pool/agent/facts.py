"""Facts about the machine from /proc and the standard library; load figures as differences between
readings."""

from __future__ import annotations

import os
import platform
import socket
import uuid
from typing import Any

MIB = 1024 * 1024


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as handle:
            return handle.read()
    except OSError:
        return ""


def boot_id() -> str:
    """Changes with each boot of the machine; empty where the kernel does not say."""
    return _read("/proc/sys/kernel/random/boot_id").strip()


def machine_id(state_dir: str) -> str:
    """The machine's own id, or one made once and kept in the state folder."""
    for path in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        found = _read(path).strip()
        if found:
            return found
    path = os.path.join(state_dir, "machine-id")
    found = _read(path).strip()
    if not found:
        found = uuid.uuid4().hex
        with open(path, "w") as handle:
            handle.write(found + "\n")
    return found


def _meminfo() -> dict[str, int]:
    """/proc/meminfo in KiB."""
    result = {}
    for line in _read("/proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        parts = rest.split()
        if parts and parts[0].isdigit():
            result[name] = int(parts[0])
    return result


def _os_name() -> str:
    for line in _read("/etc/os-release").splitlines():
        if line.startswith("PRETTY_NAME="):
            return line.split("=", 1)[1].strip().strip('"')
    return platform.system()


def _cpu_model() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.lower().startswith(("model name", "hardware", "cpu model")):
            return line.partition(":")[2].strip()
    return platform.machine()


def cpu_count() -> int:
    """Cores this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return os.cpu_count() or 1


def machine() -> dict[str, Any]:
    """Operating system, kernel, processor and memory: what ``hello`` reports besides NVML's part."""
    total = _meminfo().get("MemTotal")
    return {
        "os": _os_name(),
        "kernel": platform.release(),
        "arch": platform.machine(),
        "cpu_model": _cpu_model(),
        "cpu_milli": cpu_count() * 1000,
        "memory_mib": total // 1024 if total else None,
    }


def hostname() -> str:
    return socket.gethostname()


class HostLoad:
    """Processor and memory use of the whole machine between two calls of ``read``."""

    def __init__(self) -> None:
        self._last: tuple[int, int, int] | None = None

    def read(self) -> dict[str, Any]:
        """{cpu: percent busy, iowait: percent, mem_used_mib}; a figure that cannot be known is absent."""
        result: dict[str, Any] = {}
        fields = _read("/proc/stat").split("\n", 1)[0].split()[1:]
        if len(fields) >= 5:
            numbers = [int(field) for field in fields[:8]]
            total, idle, wait = sum(numbers), numbers[3], numbers[4]
            if self._last is not None and total > self._last[0]:
                span = total - self._last[0]
                waited = max(0, wait - self._last[2])
                busy = max(0, span - max(0, idle - self._last[1]) - waited)
                result["cpu"] = round(100.0 * busy / span, 1)
                result["iowait"] = round(100.0 * waited / span, 1)
            self._last = (total, idle, wait)
        memory = _meminfo()
        if "MemTotal" in memory and "MemAvailable" in memory:
            result["mem_used_mib"] = (memory["MemTotal"] - memory["MemAvailable"]) // 1024
        return result
