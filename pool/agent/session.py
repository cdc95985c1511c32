"""What a person does in a lease from afar: one small process for each shell, copy or forwarded port.

It ends when its line to the agent does, when the job is stopped (signal, grace, SIGKILL) and when the job has ended,
and takes with it all that it started; only what a shell left in its background goes on, as long as the job. The line is
a socket with frames of ``length, kind, content`` (kinds: ``channel``). The parent stays what the agent is and only
watches; all that touches files, terminals and ports is done by a child as the job's own account.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from typing import Any

from pool.agent import files, procs, remote_files, remote_ports, remote_shell, shim
from pool.agent.channel import EXIT
from pool.agent.line import Line

LOOK_SECONDS = 0.2
KILL_AFTER_SECONDS = 3.0
DOERS = {
    "shell": remote_shell.run,
    "get": remote_files.send,
    "put": remote_files.take,
    "forward": remote_ports.run,
}


def main(folder: str, handle: int) -> int:
    """Carry out the order that comes first on the line."""
    line = Line(socket.socket(fileno=handle))
    kind, content = line.read()
    order = json.loads(content.decode("utf-8"))
    meta = files.read_json(os.path.join(folder, "meta.json")) or {}
    job = files.read_json(os.path.join(folder, "job.json"))
    ended = os.path.exists(os.path.join(folder, "exit.json"))
    doer = DOERS.get(str(order.get("kind")))
    if doer is None or (order.get("kind") != "get" and (job is None or ended)):
        line.error("job_ended", "the job does not run any more")
        return 1
    shim.become_subreaper()
    pid = os.fork()
    if pid == 0:
        _child(doer, line, order, meta, job or {})
    line.socket.close()
    running = job is not None and not ended
    return _watch(pid, folder, running, stays=order.get("kind") == "shell")


def _child(doer: Any, line: Line, order: dict[str, Any], meta: dict[str, Any], job: dict[str, Any]) -> None:
    """As the account, in the work folder. Never returns."""
    code = 1
    try:
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        os.setsid()
        account = meta["account_ids"]
        marked = int(order.get("marked_at") or 0)
        shim.become(account)
        os.chdir(meta["work_dir"])
        os.umask(0o022)
        code = int(doer(line, order, job, meta, marked))
        line.write(EXIT, json.dumps({"code": code}).encode())
    except (BrokenPipeError, ConnectionError):
        pass  # nobody listens any more
    except remote_files.Trouble as trouble:
        line.error(trouble.code, str(trouble))
    except Exception as error:
        line.error("session_failed", str(error))
    finally:
        os._exit(0 if code == 0 else 1)


def _watch(pid: int, folder: str, while_running: bool, stays: bool) -> int:
    """Wait for the child and all below it; end them when the job is stopped or over. What a person left running in
    the background of a shell ``stays`` until then, and this process with it."""
    deadline: float | None = None
    while True:
        try:
            ended, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return 0
        if ended == pid and not stays:
            _kill(signal.SIGHUP)
            pid, deadline = 0, time.monotonic() + KILL_AFTER_SECONDS
        if deadline is None and while_running:
            order = files.read_json(os.path.join(folder, "stop.json"))
            if order is not None:
                grace = order.get("grace_s")
                _kill(signal.SIGHUP)
                _kill(signal.SIGTERM)
                deadline = time.monotonic() + (KILL_AFTER_SECONDS if grace is None else float(grace))
            elif os.path.exists(os.path.join(folder, "exit.json")):
                _kill(signal.SIGHUP)
                deadline = time.monotonic() + KILL_AFTER_SECONDS
        if deadline is not None and time.monotonic() >= deadline:
            _kill(signal.SIGKILL)
        if not ended:
            time.sleep(LOOK_SECONDS)


def _kill(number: int) -> None:
    for pid in procs.descendants(os.getpid()):
        try:
            os.kill(pid, number)
        except OSError:
            continue
