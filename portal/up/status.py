"""status.json: what runs, for the portal's operations page; and the pids that the next start must not meet
again."""

import contextlib
import json
import os
import signal
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from portal.up.layout import write_atomically
from portal.up.process import Child

INCIDENTS_KEPT = 50


def iso(moment: float | None) -> str | None:
    """UTC text of a moment in epoch seconds."""
    return None if moment is None else datetime.fromtimestamp(moment, UTC).isoformat(timespec="seconds")


def process_mark(pid: int) -> str | None:
    """What tells a process from a later one with the same number: its start in clock ticks (Linux)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return text.rpartition(")")[2].split()[19]


class StatusFile:
    """Writes the state of all children whenever it changed.

    Shape: {"supervisor": {pid, mark}, "address", "demo", "state", "since", "children": [{name, pid, mark,
    state, restarts, since, last_exit, last_exit_at}], "incidents": [{at, process, text}]}; times are UTC ISO
    texts.
    """

    def __init__(self, path: Path, *, address: str, demo: bool) -> None:
        self.path = path
        self.head: dict[str, Any] = {
            "supervisor": {"pid": os.getpid(), "mark": process_mark(os.getpid())},
            "address": address,
            "demo": demo,
            "since": iso(time.time()),
        }
        self.state = "starting"
        self.incidents: list[dict[str, Any]] = []
        self._last = ""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            self.incidents = list(json.loads(path.read_text()).get("incidents", []))[-INCIDENTS_KEPT:]

    def incident(self, process: str, text: str) -> None:
        """Remember a crash; the last fifty are kept across starts."""
        self.incidents = [*self.incidents, {"at": iso(time.time()), "process": process, "text": text}][
            -INCIDENTS_KEPT:
        ]

    def write(self, children: list[Child]) -> None:
        """Write the file if anything differs from what is there."""
        offset = time.time() - time.monotonic()
        children_now = [
            {
                "name": child.name,
                "pid": child.pid,
                "mark": process_mark(child.pid) if child.pid else None,
                "state": child.state,
                "restarts": child.restarts,
                "since": iso(child.started_at + offset) if child.pid else None,
                "last_exit": child.last_exit,
                "last_exit_at": iso(child.last_exit_at),
            }
            for child in children
        ]
        body = {**self.head, "state": self.state, "children": children_now, "incidents": self.incidents}
        text = json.dumps(body, indent=1, ensure_ascii=False)
        if text != self._last:
            with contextlib.suppress(OSError):  # a full disk must not bring the installation down
                write_atomically(self.path, text + "\n")
                self._last = text


def end_leftovers(path: Path) -> list[str]:
    """End what a killed supervisor left running, by the pids of its status file; gives the names that were
    ended.

    Only processes that are provably the same (number and start time) are touched. Waits up to five seconds.
    """
    try:
        before = json.loads(path.read_text())
        rows = [
            (p["name"], int(p["pid"]), p["mark"])
            for p in before["children"]
            if p.get("pid") and p.get("mark")
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    if not sys.platform.startswith("linux"):
        return []
    left = [(name, pid, mark) for name, pid, mark in rows if process_mark(pid) == mark and name != "postgres"]
    for _, pid, _ in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    for sig, patience in ((None, 3.0), (signal.SIGKILL, 2.0)):
        limit = time.monotonic() + patience
        for _, pid, mark in left:
            if sig is not None and process_mark(pid) == mark:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, sig)
        while time.monotonic() < limit and any(process_mark(pid) == mark for _, pid, mark in left):
            time.sleep(0.02)
    return [name for name, _, _ in left]
