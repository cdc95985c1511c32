"""What /proc says about processes: names, owners, groups, start times, markers. Linux only, no psutil
needed."""

from __future__ import annotations

import os
import pwd

MARKER = "GPUPOOL_JOB"


def stat(pid: int) -> tuple[str, int, int, int, int] | None:
    """(state, ppid, pgrp, session, start ticks since boot) of ``pid``; None when it is gone.

    The command in parentheses may hold blanks and parentheses, so fields are counted from the last one.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as handle:
            raw = handle.read().decode("latin-1")
    except OSError:
        return None
    fields = raw[raw.rfind(")") + 2 :].split()
    if len(fields) < 20:
        return None
    return fields[0], int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19])


def start_ticks(pid: int) -> int | None:
    """When ``pid`` began, in clock ticks since boot: with the pid it names one process for good."""
    found = stat(pid)
    return found[4] if found else None


def alive(pid: int | None, ticks: int | None) -> bool:
    """Whether that very process still runs (a zombie does not)."""
    found = stat(pid) if pid else None
    return bool(found and found[0] not in ("Z", "X") and (ticks is None or found[4] == ticks))


def name_of(pid: int) -> str:
    """The short command name (never its arguments); empty when it cannot be read."""
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as handle:
            return handle.read().strip()
    except OSError:
        return ""


def owner(pid: int) -> int | None:
    """The account's number; None when the process is gone."""
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None


def user_of(pid: int) -> str | None:
    """The owner's login, or its number without an account; None when the process is not visible."""
    try:
        uid = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def environment_mark(pid: int, name: str) -> str | None:
    """The value of one variable of a process; None when unreadable or not set."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as handle:
            data = handle.read(262144)
    except OSError:
        return None
    key = name.encode() + b"="
    for item in data.split(b"\0"):
        if item.startswith(key):
            return item[len(key) :].decode("utf-8", "replace")
    return None


def environment_marker(pid: int) -> str | None:
    """``allocation/member`` that a process was started for; None when unreadable or unmarked."""
    return environment_mark(pid, MARKER)


def descendants(root: int) -> set[int]:
    """All living processes below ``root`` (which is not among them)."""
    children: dict[int, list[int]] = {}
    for pid in pids():
        found = stat(pid)
        if found and found[0] not in ("Z", "X"):
            children.setdefault(found[1], []).append(pid)
    result: set[int] = set()
    todo = [root]
    while todo:
        for child in children.get(todo.pop(), []):
            if child not in result:
                result.add(child)
                todo.append(child)
    return result


def members(group: int | None, allocation: str, member: int) -> set[int]:
    """Living processes of a job without its shim: its process group, its session, or its marked
    environment."""
    marker = f"{allocation}/{member}"
    result = set()
    for pid in pids():
        found = stat(pid)
        if not found or found[0] in ("Z", "X") or pid == os.getpid():
            continue
        same_group = group is not None and group in (found[2], found[3])
        if same_group or environment_marker(pid) == marker:
            result.add(pid)
    return result
