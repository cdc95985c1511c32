"""A process that imports Django once and forks the web server, the worker, beat and commands from it.

Importing the site takes one to two seconds of CPU; forked children share that work and most of its memory.
The supervisor talks to it over a datagram socket pair, one JSON object a message:

    supervisor → zygote   {"spawn": id, "role": str, "arguments": [...], "log": path, "death_signal": int}
    zygote → supervisor   {"loaded": true}, {"spawned": id, "pid": n}, {"exited": pid, "code": n}
    child → supervisor    {"report": id, ...}
"""

import json
import os
import select
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

from portal.up.accounts import die_with_parent
from portal.up.process import MESSAGE_LIMIT, open_log


def _load() -> None:
    """Import what the children need, so that each of them starts at once. Must not touch the database."""
    import django

    django.setup()
    import celery.apps.beat
    import celery.apps.worker  # noqa: F401
    import uvicorn
    from django.urls import get_resolver

    import portal.asgi
    import portal.celery  # noqa: F401

    portal.celery.app.loader.import_default_modules()
    portal.celery.app.finalize(auto=True)
    _ = get_resolver().url_patterns
    _ = uvicorn.Config


def _name_process(name: str) -> None:
    """Show the child's role in `ps -o comm` (Linux; at most 15 bytes)."""
    if sys.platform.startswith("linux"):
        import ctypes

        ctypes.CDLL(None).prctl(15, name[:15].encode(), 0, 0, 0)


def _child(control: socket.socket, request: dict[str, Any]) -> int:
    """The forked side: take leave of the zygote and run the role. Gives the exit code."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(sig, signal.SIG_DFL)
    log = open_log(Path(request["log"]))
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a log is read while it grows
    _name_process(f"gpupool-{request['role']}")
    for descriptor in request["closed"]:  # the pages' socket is the web server's alone
        os.close(descriptor)

    def report(**fields: Any) -> None:
        control.send(json.dumps({"report": request["spawn"], **fields}).encode())

    from portal.up.roles import run_role

    return run_role(request["role"], request["arguments"], report)


def _fork(control: socket.socket, request: dict[str, Any]) -> None:
    ask = die_with_parent(request["death_signal"])
    pid = os.fork()
    if pid:
        control.send(json.dumps({"spawned": request["spawn"], "pid": pid}).encode())
        return
    code = 1
    try:
        ask()
        code = _child(control, request)
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code & 0xFF)


def _reap(control: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        control.send(json.dumps({"exited": pid, "code": os.waitstatus_to_exitcode(status)}).encode())


def main() -> int:
    """Serve the supervisor until it is gone. The socket is the descriptor that GPUPOOL_UP_CONTROL names."""
    control = socket.socket(fileno=int(os.environ.pop("GPUPOOL_UP_CONTROL")))
    control.setblocking(True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    os.set_blocking(wake_read, False)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    parent = os.getppid()
    _name_process("gpupool-fork")
    _load()
    import gc

    gc.collect()
    gc.freeze()
    control.send(json.dumps({"loaded": True}).encode())
    while os.getppid() == parent:
        ready, _, _ = select.select([control.fileno(), wake_read], [], [], 2.0)
        if wake_read in ready:
            os.read(wake_read, 4096)
        _reap(control)
        if control.fileno() in ready:
            _fork(control, json.loads(control.recv(MESSAGE_LIMIT)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
