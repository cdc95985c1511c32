"""The jobs of this node: started through their shims, adopted again after a restart, reported, stopped.

``poll`` compares the jobs' folders with what was reported and puts the difference into the outbox; it never waits.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import stat
import time
from collections.abc import Callable
from typing import Any

from pool.agent import accounts, containers, devices, environment, files, mps, procs, transfer, workspace
from pool.agent.facts import boot_id
from pool.agent.job import Job
from pool.agent.nvml import utc_now
from pool.agent.outbox import Outbox

log = logging.getLogger("gpupool.agent")
SAFE = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,80}$")
KEEP_SECONDS = 7 * 86400
KEEP_WORK_SECONDS = 30 * 86400
LOOKS_OVER = 2
OVER_GRACE = 10.0
TELL_SECONDS = 86400


class StartRefused(Exception):
    """The order cannot be carried out here; the job message carries ``code``."""

    def __init__(self, code: str, detail: str, retryable: bool = False) -> None:
        super().__init__(detail)
        self.error = {"code": code, "detail": detail, "retryable": retryable}


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
        self.daemons = mps.Daemons(state_dir)
        self.device_files: Callable[[list[str]], list[str]] = lambda _uuids: []
        self.indexes: Callable[[], dict[str, int]] = dict  # card → index, as the driver counts now

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
            self._keep(key, job)
        self.daemons.sweep(str(job.meta.get("mps")) for job in self.active() if job.meta.get("mps"))

    def _keep(self, key: tuple[str, int], job: Job) -> None:
        job.on_end = self._ended
        self.jobs[key] = job

    def _ended(self, job: Job) -> None:
        """Before its end is told: what was set up for it alone is taken down, as the next holder may come at once."""
        key = job.meta.get("mps")
        if key:
            others = any(one.meta.get("mps") == key for one in self.active() if one is not job)
            self.daemons.release(str(key), f"{job.allocation}.{job.member}", others)

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
        self._keep((allocation, member), job)
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
        image = str(spec.get("image") or "")
        argv = [str(part) for part in spec.get("argv") or []]
        if not argv and spec.get("command") and not image:
            argv = ["/bin/sh", "-c", str(spec["command"])]
        if not argv and not hold and not image:
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
        daemon, variables, argv = self._surroundings(
            spec, account, (allocation, member), work_dir, argv, bool(image)
        )
        folder = os.path.join(self.root, f"{allocation}.{member}")
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder, mode=0o700)
        order = {
            "argv": argv,
            "hold": hold,
            "env": variables,
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
        if spec.get("upload"):
            mark = transfer.mark_path(self.root, name)
            order["upload"] = dict(spec["upload"], state=os.path.dirname(self.root), mark=mark)
        files.write_json(os.path.join(folder, "job.json"), order, sync=False)
        meta = {"allocation": allocation, "member": member, "boot_id": boot_id(), "at": utc_now()}
        meta.update(gpu_uuids=spec.get("gpu_uuids") or [], mig_uuids=spec.get("mig_uuids") or [])
        meta.update(account=account.name, wall_seconds=spec.get("wall_seconds"), hold=hold)
        meta.update(account_ids=order["account"], work_dir=work_dir, work_name=name)
        meta.update(upload=bool(spec.get("upload")), mps=daemon)
        meta.update(gpu_mem_limit_mib=int(spec.get("gpu_mem_limit_mib") or 0) if mps.wanted(spec) else 0)
        meta.update(over_share=str(spec.get("over_share") or "notice"), health=spec.get("health") or None)
        meta.update(container=f"gpupool-{allocation}.{member}" if image else None)
        meta.update(left=str(spec.get("left") or "name"), work_limit_mib=int(spec.get("work_limit_mib") or 0))
        files.write_json(os.path.join(folder, "meta.json"), meta)
        if hold and account.switch:
            self._open_devices(folder, spec, account)
        return Job(folder, self.outbox, self.log_limit)

    def _surroundings(
        self,
        spec: dict[str, Any],
        account: accounts.Account,
        key: tuple[str, int],
        work_dir: str,
        argv: list[str],
        image: bool,
    ) -> tuple[str | None, dict[str, str], list[str]]:
        """(MPS daemon, environment, command) of a job."""
        name = f"{key[0]}.{key[1]}"
        daemon, more = self._limited(spec, account, name)
        variables = environment.build(spec, account, key[0], key[1], work_dir, more)
        if not image:
            return daemon, variables, argv
        variables = {name: value for name, value in variables.items() if not containers.steers(name)}
        try:
            wanted = dict(spec, container_folders=sorted(more.values()))
            argv = containers.command(wanted, f"gpupool-{name}", work_dir, variables, self.indexes())
        except containers.NoContainers as problem:
            if daemon:
                self.daemons.release(
                    daemon, name, any(one.meta.get("mps") == daemon for one in self.active())
                )
            raise StartRefused(problem.code, str(problem)) from problem
        return daemon, variables, argv

    def _limited(
        self, spec: dict[str, Any], account: accounts.Account, name: str
    ) -> tuple[str | None, dict[str, str]]:
        """(daemon, variables) for a fraction where this node has MPS; without it the share is watched only."""
        if not mps.wanted(spec) or mps.program() is None:
            return None, {}
        try:
            return self.daemons.ensure(dict(spec, limit_name=name), account)
        except OSError as problem:
            raise StartRefused("mps_not_started", str(problem), retryable=True) from problem

    def _open_devices(self, folder: str, spec: dict[str, Any], account: accounts.Account) -> None:
        """The person works on the cards directly: whole ones are theirs alone meanwhile."""
        uuids = [str(uuid) for uuid in spec.get("gpu_uuids") or []]
        if spec.get("mig_uuids") or int(spec.get("charge_milli") or 0) < 1000 * len(uuids):
            return
        try:
            devices.open_to(folder, self.device_files(uuids), account.uid, account.gid)
        except OSError as problem:
            devices.close(folder)
            shutil.rmtree(folder, ignore_errors=True)  # else the next agent would take it for one to start
            raise StartRefused("device_not_opened", str(problem), retryable=True) from problem

    def stop(self, allocation: str, member: int, signal_name: str, grace_s: float) -> None:
        """Carry out a stop order. One for a job that never came here is answered with its end."""
        job = self.jobs.get((allocation, member))
        if job is None:
            self._tombstone(allocation, member)
        elif job.finished:
            job.tell()
        else:
            job.stop(signal_name, grace_s)

    def checkpoint(self, allocation: str, member: int, order: dict[str, Any]) -> None:
        """Carry out a checkpoint order; one for a job that is not here is answered so."""
        case = str(order.get("case") or "")
        if not SAFE.match(case):
            return
        job = self.jobs.get((allocation, member))
        if job is None:
            message = {"t": "checkpoint", "allocation": allocation, "member": member, "case": case}
            self.outbox.put(dict(message, ok=False, detail="the job is not here", exit_code=None))
        else:
            job.checkpoint(case, order)

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
        self._keep((allocation, member), job)

    def poll(self) -> None:
        """Compare every unfinished job with its folder; trouble with one stops none of the others."""
        for job in list(self.jobs.values()):
            if not job.finished:
                try:
                    job.look()
                    job.report()
                except (OSError, ValueError, KeyError, TypeError) as error:
                    log.error("job %s.%s: %r", job.allocation, job.member, error)

    def judge_shares(self, rows: list[list[Any]]) -> list[tuple[Job, dict[str, int], bool]]:
        """Fractions that use more memory than their share now: (job, {card: MiB}, first time). By the lease's policy
        the work is ended after two looks in a row."""
        found = []
        for job in self.active():
            limit = int(job.meta.get("gpu_mem_limit_mib") or 0)
            used = mps.over_share(rows, job.allocation, job.gpu_uuids, limit) if limit else {}
            if not used:
                job.over_share = 0
                continue
            job.over_share += 1
            found.append((job, used, job.over_share == 1))
            if job.over_share >= LOOKS_OVER and job.meta.get("over_share") == "stop":
                detail = ", ".join(f"{uuid}: {mib} MiB of {limit}" for uuid, mib in sorted(used.items()))
                job.stop("SIGTERM", OVER_GRACE, {"code": "over_share", "detail": detail, "retryable": False})
        return found

    def end_left(self, job: Job, found: dict[str, dict[str, Any]]) -> list[int]:
        """After a hold: its person's processes that are still on its cards are asked to end, and ended at the next
        look, where the lease's policy says so (they are named either way). Never somebody else's. Gives those hit."""
        account = job.meta.get("account_ids") or {}
        if not job.meta.get("hold") or job.exit is None or job.meta.get("left") != "stop":
            return []
        hit = []
        for pid in {int(one["pid"]) for item in found.values() for one in item.get("procs") or []}:
            owner, ticks = procs.owner(pid), procs.start_ticks(pid)
            if owner is None or owner == 0 or owner != account.get("uid") or pid == os.getpid():
                continue
            number = signal.SIGKILL if (pid, ticks) in job.asked else signal.SIGTERM
            job.asked.add((pid, ticks))
            try:
                os.kill(pid, number)
                hit.append(pid)
            except OSError:
                continue
        return hit

    def folders_over(self) -> list[tuple[Job, int]]:
        """Jobs whose work folder is larger than allowed, with its MiB. Reads the disk: not for the event loop."""
        over = []
        for job in self.active():
            limit = int(job.meta.get("work_limit_mib") or 0)
            if limit and job.run is not None:
                size = workspace.size_mib(str(job.meta.get("work_dir")), limit)
                if size > limit:
                    over.append((job, size))
        return over

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
        if not found or not active:
            return None
        marker = procs.environment_marker(pid)
        for job in active:
            if marker == f"{job.allocation}/{job.member}":
                return job
        daemon = procs.environment_mark(pid, mps.MARK)  # its server counts as the first job's that uses it
        return next((job for job in active if daemon and job.meta.get("mps") == daemon), None)

    def forget_old(self) -> None:
        """Remove folders of jobs that ended a week ago, and work folders that nothing used for a month."""
        oldest = time.time() - KEEP_SECONDS
        for key, job in list(self.jobs.items()):
            if job.finished and os.path.getmtime(job.path("exit.json")) < oldest:
                shutil.rmtree(job.folder, ignore_errors=True)
                del self.jobs[key]
        used = {str(job.meta.get("work_name")) for job in self.jobs.values()}
        for name in workspace.unused(self.work_root, used, time.time() - KEEP_WORK_SECONDS):
            shutil.rmtree(os.path.join(self.work_root, name), ignore_errors=True)  # follows no link
            try:
                os.unlink(transfer.mark_path(self.root, name))
            except OSError:
                pass
