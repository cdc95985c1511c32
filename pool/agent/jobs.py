"""The jobs of this node: started through their shims, adopted again after a restart, reported, stopped.

Everything about a job lies in its folder ``jobs/<allocation>.<member>`` so that any later agent can go on:
``job.json`` (what to run), ``meta.json`` (who it is), ``run.json`` and ``exit.json`` (the shim's),
``stop.json``, ``reported.json`` (what the outbox was given: state and log offset). ``poll`` compares the
files with what was reported and puts the difference into the outbox; it never waits.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Callable
from typing import Any

from pool.agent import accounts, environment, files, procs
from pool.agent.collector import self_command, self_environment
from pool.agent.facts import boot_id
from pool.agent.logtail import LogTail
from pool.agent.nvml import utc_now
from pool.agent.outbox import Outbox
from pool.agent.shim import signal_number

log = logging.getLogger("gpupool.agent")
SAFE = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,80}$")
KEEP_SECONDS = 7 * 86400
TELL_SECONDS = 86400
START_SECONDS = 30.0
LOG_BACKLOG = 256


class StartRefused(Exception):
    """The order cannot be carried out here; the job message carries ``code``."""

    def __init__(self, code: str, detail: str, retryable: bool = False) -> None:
        super().__init__(detail)
        self.error = {"code": code, "detail": detail, "retryable": retryable}


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
            elif time.monotonic() - self.spawned_at > START_SECONDS:
                self.give_up("failed_start", "start_timeout", "the job did not start in time", True)
            return
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

    def stop(self, signal_name: str, grace_s: float) -> None:
        """Ask the shim to end the job. Asking again only shortens the grace."""
        files.write_json(self.path("stop.json"), {"signal": signal_name, "grace_s": grace_s, "at": utc_now()})
        self.look()
        if self.run and self.shim_alive():
            try:
                os.kill(self.run["shim_pid"], signal.SIGTERM)
            except OSError:
                pass
        self.stop_told = self.run is not None

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
        if self.exit is not None:
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


class Jobs:
    """All jobs of this node."""

    def __init__(
        self, state_dir: str, work_root: str, outbox: Outbox, job_account: str | None = None
    ) -> None:
        self.root = os.path.join(state_dir, "jobs")
        self.work_root = work_root
        self.outbox = outbox
        self.job_account = job_account
        self.log_limit = 8 * 1024 * 1024
        self.account_map: dict[str, str] = {}
        self.jobs: dict[tuple[str, int], Job] = {}
        self.watch: Callable[[int], None] = os.close  # what becomes of a new shim's pipe

    def adopt(self) -> None:
        """Take over every job folder. Log positions follow the messages that still wait in the outbox."""
        queued: dict[tuple[str, int], int] = {}
        for message in self.outbox.vital.messages():
            if message.get("t") == "log":
                key = (message["allocation"], message["member"])
                queued[key] = max(queued.get(key, 0), message["offset"] + message["size"])
        for name in sorted(os.listdir(self.root)):
            job = Job(os.path.join(self.root, name), self.outbox, self.log_limit)
            if not job.allocation:  # the agent died while making the folder: nothing was started
                shutil.rmtree(job.folder, ignore_errors=True)
                continue
            key = (job.allocation, job.member)
            if queued.get(key, 0) > job.log.offset:
                job.log.offset = queued[key]
            self.jobs[key] = job

    def start(self, allocation: str, member: int, spec: dict[str, Any]) -> Job | None:
        """Carry out a start order; the second order for the same member changes nothing.

        A refusal is reported as ``failed_start`` with its code and needs no folder.
        """
        known = self.jobs.get((allocation, member))
        if known is not None:
            return known
        try:
            job = self._make(allocation, member, spec)
        except (StartRefused, accounts.AccountError) as refusal:
            error = (
                refusal.error
                if isinstance(refusal, StartRefused)
                else {"code": refusal.code, "detail": refusal.detail, "retryable": False}
            )
            self.refuse(allocation, member, error)
            return None
        except OSError as problem:
            error = {"code": "node_storage", "detail": str(problem), "retryable": True}
            self.refuse(allocation, member, error)
            return None
        self.jobs[(allocation, member)] = job
        job.report()
        self.watch(job.spawn())
        return job

    def refuse(self, allocation: str, member: int, error: dict[str, Any]) -> None:
        """Report that a member was not started here and why."""
        message = {"t": "job", "allocation": allocation, "member": member, "state": "failed_start"}
        message.update(
            pid=None, started_at=None, ended_at=utc_now(), exit_code=None, signal=None, error=error
        )
        self.outbox.put(message)

    def _make(self, allocation: str, member: int, spec: dict[str, Any]) -> Job:
        if not SAFE.match(allocation):
            raise StartRefused("bad_order", "the allocation's id is not usable as a folder name")
        hold = bool(spec.get("hold"))
        argv = [str(part) for part in spec.get("argv") or []]
        if not argv and spec.get("command"):
            argv = ["/bin/sh", "-c", str(spec["command"])]
        if not argv and not hold:
            raise StartRefused("bad_order", "neither a command nor a hold")
        if any("\0" in part for part in argv):
            raise StartRefused("bad_order", "the command holds a NUL character")
        wanted = spec.get("system_account") or self.account_map.get(str(spec.get("user") or ""))
        account = accounts.resolve(wanted, self.job_account)
        name = str(spec.get("workdir_name") or allocation)
        if not SAFE.match(name):
            raise StartRefused("bad_order", "the work folder's name is not usable")
        work_dir = os.path.join(self.work_root, name)
        os.makedirs(work_dir, mode=0o700, exist_ok=True)
        found = os.lstat(work_dir)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid not in (os.geteuid(), account.uid):
            # Never hand one person's files to another, whatever name the order carries.
            raise StartRefused("workdir_not_accessible", "the work folder belongs to another account")
        if account.switch:
            os.chown(work_dir, account.uid, account.gid)
        folder = os.path.join(self.root, f"{allocation}.{member}")
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder, mode=0o700)
        order = {
            "argv": argv,
            "hold": hold,
            "env": environment.build(spec, account, allocation, member, work_dir),
            "account": {
                "name": account.name,
                "uid": account.uid,
                "gid": account.gid,
                "switch": account.switch,
            },
            "cwd": work_dir,
            "wall_seconds": spec.get("wall_seconds"),
            "grace_s": spec.get("grace_s"),
        }
        files.write_json(os.path.join(folder, "job.json"), order, sync=False)
        meta = {"allocation": allocation, "member": member, "boot_id": boot_id(), "at": utc_now()}
        meta.update(gpu_uuids=spec.get("gpu_uuids") or [], mig_uuids=spec.get("mig_uuids") or [])
        meta.update(account=account.name, wall_seconds=spec.get("wall_seconds"), hold=hold)
        files.write_json(os.path.join(folder, "meta.json"), meta)
        return Job(folder, self.outbox, self.log_limit)

    def stop(self, allocation: str, member: int, signal_name: str, grace_s: float) -> None:
        """Carry out a stop order. One for a job that never came here is answered with its end."""
        job = self.jobs.get((allocation, member))
        if job is None:
            self._tombstone(allocation, member)
        elif job.finished:
            job.tell()
        else:
            job.stop(signal_name, grace_s)

    def _tombstone(self, allocation: str, member: int) -> None:
        """Remember a job that was stopped before it came: a start that is late finds it ended."""
        if not SAFE.match(allocation):
            return
        folder = os.path.join(self.root, f"{allocation}.{member}")
        os.makedirs(folder, mode=0o700, exist_ok=True)
        meta = {"allocation": allocation, "member": member, "boot_id": boot_id(), "at": utc_now()}
        files.write_json(os.path.join(folder, "meta.json"), meta)
        job = Job(folder, self.outbox, self.log_limit)
        job.give_up("exited", None, "", False)
        job.report()
        self.jobs[(allocation, member)] = job

    def poll(self) -> None:
        """Compare every unfinished job with its folder; trouble with one stops none of the others."""
        for job in list(self.jobs.values()):
            if not job.finished:
                try:
                    job.look()
                    job.report()
                except (OSError, ValueError, KeyError, TypeError) as error:
                    log.error("job %s.%s: %r", job.allocation, job.member, error)

    def active(self) -> list[Job]:
        return [job for job in self.jobs.values() if job.exit is None]

    def describe(self) -> list[dict[str, Any]]:
        """Jobs for ``hello``: every unfinished one and those that ended within a day."""
        newest = time.time() - TELL_SECONDS
        return [
            job.describe()
            for job in self.jobs.values()
            if job.exit is None or os.path.getmtime(job.path("exit.json")) > newest
        ]

    def owner_of(self, pid: int) -> Job | None:
        """The job that a process belongs to: by its session, else by its marked environment."""
        found = procs.stat(pid)
        active = self.active()
        for job in active:
            if found and job.run and job.run["pid"] in (found[2], found[3], pid):
                return job
        marker = procs.environment_marker(pid) if found and active else None
        for job in active:
            if marker == f"{job.allocation}/{job.member}":
                return job
        return None

    def forget_old(self) -> None:
        """Remove folders of jobs that ended a week ago."""
        oldest = time.time() - KEEP_SECONDS
        for key, job in list(self.jobs.items()):
            if job.finished and os.path.getmtime(job.path("exit.json")) < oldest:
                shutil.rmtree(job.folder, ignore_errors=True)
                del self.jobs[key]
