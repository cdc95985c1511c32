"""One job of this node, as its folder says.

Everything about it lies in ``jobs/<allocation>.<member>`` so that any later agent can go on: ``job.json`` (what
to run), ``meta.json`` (who it is), ``run.json`` and ``exit.json`` (the shim's), ``stop.json``, ``reported.json``
(what the outbox was given: state, log offset, checkpoints), and a pair of files for each checkpoint (``hook``).
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

from pool.agent import devices, files, hook, procs
from pool.agent.collector import self_command, self_environment
from pool.agent.facts import boot_id
from pool.agent.logtail import LogTail
from pool.agent.nvml import utc_now
from pool.agent.outbox import Outbox
from pool.agent.shim import signal_number

START_SECONDS = 30.0
FETCH_SECONDS = 270.0
LOG_BACKLOG = 256


class Job:
    """One allocation's member on this node, as its folder says."""

    def __init__(self, folder: str, outbox: Outbox, log_limit: int) -> None:
        self.folder = folder
        self.outbox = outbox
        self.meta: dict[str, Any] = files.read_json(self.path("meta.json")) or {}
        self.allocation = str(self.meta.get("allocation") or "")
        self.member = int(self.meta.get("member") or 0)
        self.gpu_uuids: list[str] = list(self.meta.get("gpu_uuids") or [])
        self.reported: dict[str, Any] = files.read_json(self.path("reported.json")) or {}
        self.run: dict[str, Any] | None = files.read_json(self.path("run.json"))
        self.exit: dict[str, Any] | None = files.read_json(self.path("exit.json"))
        self.shim: subprocess.Popen[bytes] | None = None
        self.spawned_at = time.monotonic()
        self.kill_at: float | None = None
        self.stop_told = False
        self.on_end: Callable[[Job], None] = lambda _job: None
        self.over_share = 0
        self.asked: set[tuple[int, int | None]] = set()
        self.fetch_seconds = FETCH_SECONDS if self.meta.get("upload") else 0.0
        self.hooks: dict[str, subprocess.Popen[bytes] | None] = dict.fromkeys(self._cases())
        self.log = LogTail(self.path("output.log"), int(self.reported.get("offset") or 0), log_limit)

    def path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    @property
    def finished(self) -> bool:
        return self.exit is not None and self.reported.get("state") == self.exit.get("state")

    @property
    def pid(self) -> int | None:
        return self.run["pid"] if self.run else None

    @property
    def state(self) -> str:
        if self.exit is not None:
            return str(self.exit.get("state"))
        return "running" if self.run else "starting"

    def describe(self) -> dict[str, Any]:
        """The job as ``hello`` and ``job`` messages show it."""
        ended = self.exit or {}
        return {
            "allocation": self.allocation,
            "member": self.member,
            "state": self.state,
            "pid": self.pid,
            "started_at": self.run["started_at"] if self.run else None,
            "ended_at": ended.get("ended_at"),
            "exit_code": ended.get("exit_code"),
            "signal": ended.get("signal"),
            "error": ended.get("error"),
            "account": self.meta.get("account"),
        }

    def spawn(self) -> int:
        """Start the shim; it locks the folder, so a second one for the same job leaves by itself.

        Returns the end of a pipe that becomes readable when the job runs, and ends when the shim does.
        """
        news, tell = os.pipe()
        os.set_blocking(news, False)
        with open(self.path("shim.log"), "ab") as log:
            self.shim = subprocess.Popen(
                self_command("_shim", self.folder, str(tell)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env=self_environment(),
                pass_fds=(tell,),
                start_new_session=True,
            )
        os.close(tell)
        self.spawned_at = time.monotonic()
        return news

    def shim_alive(self) -> bool:
        if self.shim is not None:
            return self.shim.poll() is None
        return bool(self.run and procs.alive(self.run.get("shim_pid"), self.run.get("shim_ticks")))

    def give_up(self, state: str, code: str | None, detail: str, retryable: bool) -> None:
        """Write the end that the shim could not write; without a code it is no error."""
        record: dict[str, Any] = {"state": state, "ended_at": utc_now(), "exit_code": None, "signal": None}
        record["error"] = {"code": code, "detail": detail, "retryable": retryable} if code else None
        files.write_json(self.path("exit.json"), record)
        self.exit = record

    def look(self) -> None:
        """Bring ``run`` and ``exit`` up to date from the folder and from /proc."""
        if self.exit is not None:
            return
        if self.run is None:
            self.run = files.read_json(self.path("run.json"))
        self.exit = files.read_json(self.path("exit.json"))
        if self.exit is not None:
            self.run = self.run or files.read_json(self.path("run.json"))
            return
        if self.run is None:
            if self.meta.get("boot_id") != boot_id():
                self.give_up("failed_start", "node_rebooted", "the node restarted before the job began", True)
            elif self.shim is None:
                os.close(self.spawn())  # a start that the agent before did not finish: polling is enough
            elif self.shim.poll() not in (None, 3):
                self.give_up("failed_start", "shim_failed", f"shim ended with {self.shim.returncode}", True)
            elif time.monotonic() - self.spawned_at > START_SECONDS + self.fetch_seconds:
                self.give_up("failed_start", "start_timeout", "the job did not start in time", True)
            return
        if self.meta.get("hold"):
            devices.keep(self.folder)
        if self.run.get("boot_id") != boot_id():
            self.give_up("exited", "node_rebooted", "the node restarted while the job ran", True)
        elif not self.shim_alive():
            self._without_shim()

    def _without_shim(self) -> None:
        """The shim was killed: the agent does its duty until nothing of the job is left."""
        self.exit = files.read_json(self.path("exit.json"))  # it may have written this as its last act
        if self.exit is not None or self.run is None:
            return
        group = self.run["pid"] if self.run["pid"] != self.run.get("shim_pid") else None
        left = procs.members(group, self.allocation, self.member)
        now = time.monotonic()
        main_alive = procs.alive(self.run["pid"], self.run.get("ticks"))
        order = files.read_json(self.path("stop.json"))
        wall = self.meta.get("wall_seconds")
        over = wall and now - self.spawned_at > float(wall)
        if left and (order or over or not main_alive):
            if self.kill_at is None:
                grace = float((order or {}).get("grace_s") or 5.0)
                self.kill_at = now + grace
                self._signal(left, signal_number((order or {}).get("signal")))
            elif now >= self.kill_at:
                self._signal(left, signal.SIGKILL)
        if not left and not main_alive:
            self.give_up("exited", "exit_unknown", "the job ended while nobody watched it", False)

    @staticmethod
    def _signal(pids: set[int], number: int) -> None:
        for pid in pids:
            try:
                os.kill(pid, number)
            except OSError:
                continue

    def stop(self, signal_name: str, grace_s: float, error: dict[str, Any] | None = None) -> None:
        """Ask the shim to end the job. Asking again only shortens the grace. ``error``: why the node ends it."""
        order = {"signal": signal_name, "grace_s": grace_s, "at": utc_now()}
        if error is not None:
            if os.path.exists(self.path("stop.json")):
                return  # it ends already
            order["error"] = error
        files.write_json(self.path("stop.json"), order)
        self.look()
        if self.run and self.shim_alive():
            try:
                os.kill(self.run["shim_pid"], signal.SIGTERM)
            except OSError:
                pass
        self.stop_told = self.run is not None

    # -- checkpoints -----------------------------------------------------------------------------------------

    def _cases(self) -> list[str]:
        """Checkpoints that were ordered and not told yet, from the folder."""
        told = self.reported.get("checkpoints") or []
        names = os.listdir(self.folder) if os.path.isdir(self.folder) else []
        found = [name[11:-5] for name in names if name.startswith("checkpoint-") and name.endswith(".json")]
        return sorted(case for case in found if case not in told)

    def checkpoint(self, case: str, order: dict[str, Any]) -> None:
        """Tell the job to save itself: by a signal to its processes, or by a command beside it. Once per case."""
        path = self.path(hook.order_name(case))
        if os.path.exists(path) or self.finished:
            return
        files.write_json(path, order)
        self.hooks[case] = None
        self.look()
        if self.exit is not None or self.run is None:
            hook.write_result(self.folder, case, False, "the job does not run")
        elif order.get("kind") == "signal":
            hook.write_result(self.folder, case, *self._told_by_signal(order))
        else:
            self._spawn_hook(case)

    def _told_by_signal(self, order: dict[str, Any]) -> tuple[bool, str]:
        assert self.run is not None
        number = signal_number(order.get("signal"), signal.SIGUSR1)
        if self.run["pid"] == self.run.get("shim_pid"):
            return False, "a hold has no process to signal"
        try:
            os.killpg(self.run["pid"], number)
        except OSError as error:
            return False, str(error)
        return True, signal.Signals(number).name

    def _spawn_hook(self, case: str) -> None:
        with open(self.path("shim.log"), "ab") as log:
            self.hooks[case] = subprocess.Popen(
                self_command("_checkpoint", self.folder, case),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env=self_environment(),
                start_new_session=True,
            )

    def _report_checkpoints(self) -> None:
        """Tell how checkpoints went; one whose process is gone without a word is begun again."""
        for case, process in list(self.hooks.items()):
            result = files.read_json(self.path(hook.result_name(case)))
            if result is None:
                if self.exit is None and (process is None or process.poll() is not None):
                    self._spawn_hook(case)  # leaves at once where one from before still runs
                continue
            message = {"t": "checkpoint", "allocation": self.allocation, "member": self.member, "case": case}
            self.outbox.put(dict(message, **result))
            del self.hooks[case]
            self.reported.setdefault("checkpoints", []).append(case)
            files.write_json(self.path("reported.json"), self.reported, sync=False)

    def report(self) -> None:
        """Put what changed into the outbox: log first, then the state, so that the end comes last."""
        if self.finished:
            return
        if self.run is not None and not self.stop_told and os.path.exists(self.path("stop.json")):
            order = files.read_json(self.path("stop.json")) or {}
            self.stop(str(order.get("signal") or "SIGTERM"), float(order.get("grace_s") or 0))
        state = self.state
        if self.run is not None and self.reported.get("state") != "running":
            self.tell("running")  # also for a job that was over before anybody looked
        # While the installation is away, output waits in its own file rather than a second time in the
        # outbox.
        room = self.exit is not None or self.outbox.vital.waiting < LOG_BACKLOG
        for offset, size, text in self.log.read(final=self.exit is not None) if room else ():
            message = {"t": "log", "allocation": self.allocation, "member": self.member}
            self.outbox.put(dict(message, offset=offset, size=size, data=text))
            self.reported["offset"] = offset + size
            files.write_json(self.path("reported.json"), self.reported, sync=False)
        self._report_checkpoints()
        if self.exit is not None:
            devices.close(self.folder)  # before it is told: the next holder may come at once
            self.on_end(self)
            self.tell()
            self._scrub()
        elif state != self.reported.get("state"):
            self.tell()

    def tell(self, state: str | None = None) -> None:
        """Put the present state (or one that was passed through) into the outbox and remember that it was."""
        message = dict(self.describe(), t="job")
        if state == "running" and self.exit is not None:
            message.update(state=state, ended_at=None, exit_code=None, signal=None, error=None)
        self.outbox.put(message)
        self.reported["state"] = state or self.state
        files.write_json(self.path("reported.json"), self.reported, sync=False)

    def _scrub(self) -> None:
        """The environment may hold the person's secrets: it is not kept past the end."""
        try:
            os.unlink(self.path("job.json"))
        except FileNotFoundError:
            pass
        self.log.close()
        if self.shim is not None:
            self.shim.poll()
