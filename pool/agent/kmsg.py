"""NVIDIA's XID reports from the kernel log, read as they come (``/dev/kmsg``, where it may be read)."""

from __future__ import annotations

import errno
import os
import re
from typing import Any

XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)(?:, (.*))?")
PID = re.compile(r"\bpid='?(\d+)")


def parse(line: str) -> dict[str, Any] | None:
    """{bus, xid, pid, text} of one kernel line, or None. ``text`` is bounded and holds what the driver
    wrote."""
    found = XID.search(line)
    if not found:
        return None
    rest = (found.group(3) or "").strip()
    pid = PID.search(rest)
    return {
        "bus": found.group(1),
        "xid": int(found.group(2)),
        "pid": int(pid.group(1)) if pid else None,
        "text": rest[:300],
    }


def bus_key(bus: str | None) -> tuple[int, int, int] | None:
    """(domain, bus, device) of a PCI address in any of the spellings of NVML and of the kernel."""
    if not bus:
        return None
    parts = bus.split(".")[0].split(":")
    try:
        numbers = [int(part, 16) for part in parts]
    except ValueError:
        return None
    if len(numbers) == 2:
        numbers.insert(0, 0)
    return (numbers[0], numbers[1], numbers[2]) if len(numbers) == 3 else None


class KernelLog:
    """Follows the kernel log from now on. ``read`` never blocks and never raises."""

    def __init__(self, path: str = "/dev/kmsg") -> None:
        self._rest = ""
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(self._fd, 0, os.SEEK_END)
        except OSError:
            self._fd = -1

    @property
    def readable(self) -> bool:
        return self._fd >= 0

    def read(self) -> list[dict[str, Any]]:
        """The XID reports since the last call."""
        found = []
        for _ in range(1000):
            if self._fd < 0:
                break
            try:
                data = os.read(self._fd, 8192)
            except OSError as error:
                if error.errno == errno.EPIPE:  # records were overwritten before we read them
                    continue
                break
            if not data:
                break
            text = self._rest + data.decode("utf-8", "replace")
            lines = text.split("\n")
            self._rest = lines.pop()[-4096:]
            for line in lines:
                report = parse(line)
                if report:
                    found.append(report)
        return found

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
