"""A checkpoint command of one job: a small process beside the job that outlives the agent.

Runs the command in the job's folder, environment and account, its output in the job's log, for so many seconds
at most and no longer than the job may live. Order: ``checkpoint-CASE.json`` (made by the agent: kind, signal,
run, seconds); result: ``checkpointed-CASE.json`` (ok, exit_code, detail), written once.
"""

from __future__ import annotations

import fcntl
import os
import signal
import time
from typing import Any

from pool.agent import files
from pool.agent.shim import exec_child

LOOK_SECONDS = 0.2
KILL_AFTER_SECONDS = 5.0


def order_name(case: str) -> str:
    """The file of an order."""
    return f"checkpoint-{case}.json"


def result_name(case: str) -> str:
    """The file of its result."""
    return f"checkpointed-{case}.json"


def write_result(folder: str, case: str, ok: bool, detail: str = "", exit_code: int | None = None) -> None:
    """Keep how it went."""
    files.write_json(
        os.path.join(folder, result_name(case)), {"ok": ok, "detail": detail, "exit_code": exit_code}
    )


def main(folder: str, case: str) -> int:
    """Run the command of one case; a second process for the same case leaves at once."""
    lock = os.open(os.path.join(folder, f"{order_name(case)}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return 3
    os.set_inheritable(lock, False)
    if os.path.exists(os.path.join(folder, result_name(case))):
        return 3
    job = files.read_json(os.path.join(folder, "job.json"))
    order = files.read_json(os.path.join(folder, order_name(case)))
    if job is None or order is None:
        write_result(folder, case, False, "the job is over")
        return 1
    write_result(folder, case, *_run(folder, job, order))
    return 0


def _run(folder: str, job: dict[str, Any], order: dict[str, Any]) -> tuple[bool, str, int | None]:
    """(ok, detail, exit code) of the command; its whole group ends with it."""
    wanted = dict(job, argv=["/bin/sh", "-c", str(order.get("run") or "")])
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        exec_child(wanted, folder, write_end)
    os.close(write_end)
    problem = os.read(read_end, 1024)
    os.close(read_end)
    if problem:
        os.waitpid(pid, 0)
        return False, problem.decode("utf-8", "replace"), None
    deadline = time.monotonic() + float(order.get("seconds") or 0)
    why = ""
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            break
        stopped = os.path.exists(os.path.join(folder, "stop.json"))
        if not why and (stopped or time.monotonic() >= deadline):
            why = "the job was stopped" if stopped else "it took too long"
            _signal(pid, signal.SIGTERM)
            deadline = time.monotonic() + KILL_AFTER_SECONDS
        elif why and time.monotonic() >= deadline:
            _signal(pid, signal.SIGKILL)
        time.sleep(LOOK_SECONDS)
    _signal(pid, signal.SIGKILL)  # what it left behind in its group
    code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
    return code == 0 and not why, why, code


def _signal(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except OSError:
        pass
