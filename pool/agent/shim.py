"""The small process between the agent and one job: it outlives the agent and holds what must not be lost.

It starts the command in a session of its own under the job's account, keeps the wall-clock limit, carries
out a stop (signal, grace, SIGKILL, verified gone), adopts what the command leaves behind, and writes two
files into the job's folder, both atomic: ``run.json`` once the command runs, ``exit.json`` when nothing of
it is left. It imports little (it is paid for by every job) and sleeps in ``sigtimedwait``: no polling.

Job folder: ``job.json`` (made by the agent: argv | hold, env, account, cwd, wall_seconds), ``lock``,
``output.log``, ``stop.json`` (made by the agent: signal, grace_s), ``run.json``, ``exit.json``.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import time
from typing import Any

from pool.agent import files, procs

WATCHED = {signal.SIGCHLD, signal.SIGTERM}
LEFTOVER_GRACE = 5.0
DEFAULT_GRACE = 10.0
LOOK_SECONDS = 0.5
PR_SET_CHILD_SUBREAPER = 36


def _iso(moment: float) -> str:
    whole = int(moment)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole)) + f".{int((moment - whole) * 1000):03d}Z"


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as handle:
            return handle.read().strip()
    except OSError:
        return ""


def become_subreaper() -> None:
    """Orphans of the job become children of the shim, so that none escapes a stop. Best effort."""
    try:
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    except Exception:  # no ctypes or no prctl: the group and the environment marker still find the job
        return


def signal_number(name: Any, default: int = signal.SIGTERM) -> int:
    """SIGUSR1, USR1 or 10 as a number; ``default`` for what this system does not know."""
    if isinstance(name, int):
        return name
    text = str(name or "").upper()
    text = text if text.startswith("SIG") else f"SIG{text}"
    found = getattr(signal, text, None)
    return int(found) if isinstance(found, signal.Signals) else default


def become(account: dict[str, Any]) -> None:
    """Change to the job's account for good; never stays root. Without a switch it is the agent's own already."""
    if account["switch"]:
        os.initgroups(account["name"], account["gid"])
        os.setgid(account["gid"])
        os.setuid(account["uid"])
        if os.getuid() == 0 or os.geteuid() == 0:
            raise PermissionError("still root after the switch")


def exec_child(job: dict[str, Any], folder: str, report: int) -> None:
    """In the forked child: upload, account, folder, streams, signals, exec. Never returns."""
    stage = "exec"
    try:
        os.setsid()
        upload = None
        if job.get("upload"):
            from pool.agent import transfer

            stage = "upload"
            upload = transfer.fetch(job["upload"], folder)
        log = os.open(os.path.join(folder, "output.log"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        null = os.open("/dev/null", os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        stage = "account"
        become(job["account"])
        stage = "workdir"
        os.chdir(job["cwd"])
        os.umask(0o022)
        if upload is not None:
            stage = "upload"
            upload.unpack()
        stage = "exec"
        for number in (signal.SIGPIPE, signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.execvpe(job["argv"][0], job["argv"], job["env"])
    except BaseException as error:  # whatever it is, the parent must learn it and this copy must not live on
        code = getattr(error, "errno", None)
        os.write(report, f"{stage}:{code}:{error}".encode("utf-8", "replace")[:400])
    finally:
        os._exit(127)


class Shim:
    """One job from start to verified end."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.job: dict[str, Any] = files.read_json(os.path.join(folder, "job.json"))
        self.pid = 0
        self.status: int | None = None
        self.stop_reason: str | None = None
        self.started = time.time()

    def path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def write_exit(self, state: str, **more: Any) -> None:
        record = {
            "state": state,
            "ended_at": _iso(time.time()),
            "exit_code": None,
            "signal": None,
            "error": None,
        }
        record.update(more)
        files.write_json(self.path("exit.json"), record)

    def start(self) -> bool:
        """Fork and exec the command; False (and ``exit.json``) when it could not be started."""
        if self.job.get("hold"):
            self.pid = 0
        else:
            read_end, write_end = os.pipe()
            self.pid = os.fork()
            if self.pid == 0:
                os.close(read_end)
                exec_child(self.job, self.folder, write_end)
            os.close(write_end)
            problem = self._first_words(read_end)
            os.close(read_end)
            if problem:
                os.waitpid(self.pid, 0)
                stage, number, detail = problem.decode("utf-8", "replace").split(":", 2)
                codes = {
                    "account": "account_switch_failed",
                    "workdir": "workdir_not_accessible",
                    "upload": "upload_not_unpacked",
                }
                code = codes.get(stage, "command_not_found" if number == "2" else "command_not_started")
                retryable = stage == "upload" and number != "None"  # the network or the disk, not the archive
                error = {"code": code, "detail": detail, "retryable": retryable}
                self.write_exit("failed_start", error=error)
                return False
        own = os.getpid()
        files.write_json(
            self.path("run.json"),
            {
                "pid": self.pid or own,
                "ticks": procs.start_ticks(self.pid or own),
                "shim_pid": own,
                "shim_ticks": procs.start_ticks(own),
                "boot_id": _boot_id(),
                "started_at": _iso(self.started),
            },
        )
        return True

    def _first_words(self, read_end: int) -> bytes:
        """What went wrong before the command ran; empty once it does. A stop ends a long fetch of its upload."""
        problem = b""
        while True:
            if self.job.get("upload") and not select.select([read_end], [], [], LOOK_SECONDS)[0]:
                if os.path.exists(self.path("stop.json")):
                    os.killpg(self.pid, signal.SIGKILL)
                    return b"upload:None:stopped while the upload was fetched"
                continue
            part = os.read(read_end, 1024)
            if not part:
                return problem
            problem += part

    def reap(self) -> None:
        """Collect every child that ended; remember the command's own status."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.pid:
                self.status = status

    def remaining(self) -> set[int]:
        return procs.descendants(os.getpid())

    def signal_all(self, number: int) -> None:
        """The command's group first (one call, no race), then whoever left it."""
        if self.pid:
            try:
                os.killpg(self.pid, number)
            except OSError:
                pass
        for pid in self.remaining():
            found = procs.stat(pid)
            if found and found[2] != self.pid:
                try:
                    os.kill(pid, number)
                except OSError:
                    pass

    def wait(self, until: float | None) -> int:
        """Sleep until a watched signal (its number) or the monotonic moment ``until`` (0)."""
        timeout = 3600.0 if until is None else max(0.0, until - time.monotonic())
        info = signal.sigtimedwait(WATCHED, timeout)
        return info.si_signo if info else 0

    def end(self, number: int, grace: float) -> None:
        """Signal, wait ``grace`` seconds, kill, and wait until nothing of the job is left."""
        self.signal_all(number)
        deadline = time.monotonic() + grace
        while True:
            self.reap()
            if not self.remaining():
                self.reap()  # the last one may have ended between the two looks
                return
            now = time.monotonic()
            if now >= deadline:
                self.signal_all(signal.SIGKILL)
                deadline = now + 1.0
            got = self.wait(min(deadline, now + 1.0))
            if got == signal.SIGTERM:
                order = files.read_json(self.path("stop.json")) or {}
                deadline = min(deadline, time.monotonic() + float(order.get("grace_s") or 0))

    def run(self) -> int:
        """The whole life; returns the shim's own exit status."""
        wall = self.job.get("wall_seconds")
        limit = time.monotonic() + float(wall) if wall else None
        why: dict[str, Any] | None = None
        while True:
            self.reap()
            if self.status is not None:
                if self.remaining():
                    self.end(signal.SIGTERM, LEFTOVER_GRACE)
                break
            got = self.wait(limit)
            if got == signal.SIGTERM or os.path.exists(self.path("stop.json")):
                order = files.read_json(self.path("stop.json")) or {}
                self.stop_reason = "stopped"
                why = order.get("error")
                grace = order.get("grace_s")
                self.end(signal_number(order.get("signal")), DEFAULT_GRACE if grace is None else float(grace))
                break
            if limit is not None and time.monotonic() >= limit:
                self.stop_reason = "wall_limit"
                self.end(signal.SIGTERM, float(self.job.get("grace_s") or DEFAULT_GRACE))
                break
        code, number = None, None
        if self.status is not None:
            code = os.WEXITSTATUS(self.status) if os.WIFEXITED(self.status) else None
            number = os.WTERMSIG(self.status) if os.WIFSIGNALED(self.status) else None
        elif self.job.get("hold"):
            code = 0
        error = why
        if self.stop_reason == "wall_limit":
            error = {"code": "wall_limit", "detail": f"ended after {wall} s", "retryable": False}
        self.write_exit("exited", exit_code=code, signal=number, error=error, stopped=self.stop_reason)
        return 0


def main(folder: str, tell: int = -1) -> int:
    """Run the job in ``folder``; a second shim for the same folder leaves at once.

    ``tell`` is a pipe to the agent: one byte once the job runs, and its end is ours. The job never has it.
    """
    if tell >= 0:
        os.set_inheritable(tell, False)
    lock = os.open(os.path.join(folder, "lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return 3
    if os.path.exists(os.path.join(folder, "run.json")) or os.path.exists(os.path.join(folder, "exit.json")):
        return 3
    os.set_inheritable(lock, False)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    shim = Shim(folder)
    if shim.job is None:
        return 4
    become_subreaper()
    if not shim.start():
        return 1
    if tell >= 0:
        try:
            os.write(tell, b"r")
        except OSError:
            pass  # the agent is gone; the next one reads the folder
    return shim.run()
