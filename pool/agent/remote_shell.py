"""A shell, or one command, on a terminal of its own inside a lease."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import struct
import termios
from typing import Any

from pool.agent import containers
from pool.agent.channel import DATA, END, INPUT, PIECE, RESIZE
from pool.agent.line import Line

NO_SHELLS = ("nologin", "false", "")


def run(line: Line, order: dict[str, Any], job: dict[str, Any], meta: dict[str, Any], _marked: int) -> int:
    """The exit code of the shell, 128 + n for one that signal n ended."""
    environment = dict(job["env"], TERM=str(order.get("term") or "xterm")[:40])
    argv = [str(word) for word in order.get("argv") or []]
    shell = environment.get("SHELL") or "/bin/sh"
    if os.path.basename(shell) in NO_SHELLS or not os.access(shell, os.X_OK):
        shell = "/bin/bash" if os.access("/bin/bash", os.X_OK) else "/bin/sh"
        environment["SHELL"] = shell
    command = argv or [shell, "-i"]
    if meta.get("container"):  # inside the image, beside its own command
        command = [str(containers.program()), "exec", "--interactive", "--tty", str(meta["container"])]
        command += argv or ["/bin/sh"]
    pid, master = pty.fork()
    if pid == 0:
        try:
            os.execvpe(command[0], command, environment)
        except OSError as error:
            os.write(2, f"{command[0]}: {error.strerror}\r\n".encode())
        finally:
            os._exit(127)
    _resize(master, order)
    return _pump(line, pid, master)


def _resize(master: int, size: dict[str, Any]) -> None:
    rows, columns = int(size.get("rows") or 24), int(size.get("cols") or 80)
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", rows & 0xFFFF, columns & 0xFFFF, 0, 0))


def _pump(line: Line, pid: int, master: int) -> int:
    """Between the line and the terminal until the shell has ended and its last words were sent."""
    while True:
        ready, _, _ = select.select([line.fileno(), master], [], [])
        if master in ready:
            try:
                data = os.read(master, PIECE)
            except OSError:  # EIO: no process has the terminal open any more
                data = b""
            if not data:
                break
            line.write(DATA, data)
        if line.fileno() in ready:
            try:
                kind, content = line.read()
            except ConnectionError:
                os.kill(pid, signal.SIGHUP)
                raise
            if kind == INPUT:
                _write_all(master, content)
            elif kind == RESIZE:
                _resize(master, json.loads(content.decode("utf-8")))
            elif kind == END:
                os.write(master, b"\x04")
    _, status = os.waitpid(pid, 0)
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def _write_all(master: int, content: bytes) -> None:
    while content:
        content = content[os.write(master, content) :]
