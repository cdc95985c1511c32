"""Fractions that are limits: a CUDA MPS daemon for the cards and the account of fractional work, while there is any.

A daemon serves one user at a time and makes the next one wait, so each account has a daemon of its own, on its own pipe
folder and under that very account: work of two people on one card never waits for, and never falls with, the other's.
The daemon's defaults cap every client, whatever a job does to its own environment; the environment names the same
limits (a client can only lower them). What runs is noted in files: the next agent goes on with it, and ends a daemon
that no job needs any more.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import signal
import subprocess
import time
from typing import Any, Iterable

from pool.agent import files, procs
from pool.agent.accounts import Account

log = logging.getLogger("gpupool.agent")
PROGRAM = "nvidia-cuda-mps-control"
SECONDS = 5.0
LONGEST_SOCKET = 80
MARK = "GPUPOOL_MPS"


def program() -> str | None:
    """The control program of this node, None where it has none."""
    return shutil.which(os.environ.get("GPUPOOL_MPS_CONTROL") or PROGRAM)


def capability() -> dict[str, Any]:
    """Whether fractions can be limited here, and what is missing."""
    return {"ok": program() is not None, "reason": None if program() else "no_mps_control"}


def wanted(spec: dict[str, Any]) -> bool:
    """Whether this is a fraction of whole cards: MIG slices have limits of their own."""
    charge = int(spec.get("charge_milli") or 0)
    return bool(spec.get("gpu_uuids")) and not spec.get("mig_uuids") and 0 < charge < 1000


def shares(spec: dict[str, Any]) -> tuple[int, int]:
    """(percent of the threads, MiB of memory or 0 for no limit) that each card gives this work."""
    percent = max(1, min(100, -(-int(spec["charge_milli"]) // 10)))
    return percent, int(spec.get("gpu_mem_limit_mib") or 0)


class Daemons:
    """The daemons of this node. Keys are made of cards and account."""

    def __init__(self, state_dir: str) -> None:
        self.root = os.path.join(os.path.abspath(state_dir), "mps")
        if len(self.root) > LONGEST_SOCKET:  # the pipe's path has to fit into a socket address
            self.root = os.path.join("/tmp", f"gpupool-mps-{os.stat(state_dir).st_ino}")
        os.makedirs(self.root, mode=0o711, exist_ok=True)
        if os.lstat(self.root).st_uid != os.geteuid():
            raise PermissionError(f"{self.root} belongs to someone else")

    def folder(self, key: str) -> str:
        return os.path.join(self.root, key)

    def ensure(self, spec: dict[str, Any], account: Account) -> tuple[str, dict[str, str]]:
        """(key, variables for the job) of a daemon that runs; raises ``OSError`` where it cannot be started."""
        uuids = sorted(str(uuid) for uuid in spec["gpu_uuids"])
        key = hashlib.sha256("\n".join([account.name, *uuids]).encode()).hexdigest()[:12]
        folder = self.folder(key)
        pipe, logs = os.path.join(folder, "pipe"), os.path.join(folder, "log")
        for path in (folder, pipe, logs):
            os.makedirs(path, mode=0o700, exist_ok=True)
            if account.switch:
                os.chown(path, account.uid, account.gid)
        record = {
            "uuids": uuids,
            "account": {
                "name": account.name,
                "uid": account.uid,
                "gid": account.gid,
                "switch": account.switch,
            },
        }
        known = files.read_json(os.path.join(self.root, f"{key}.json")) or {}
        limits = dict(known.get("limits") or {})
        limits[str(spec.get("limit_name") or "")] = list(shares(spec))
        record["limits"] = limits
        files.write_json(os.path.join(self.root, f"{key}.json"), record)
        if self.pid(key) is None:
            self._control(key, record, ["-d"], None)
            deadline = time.monotonic() + SECONDS
            while self.pid(key) is None and time.monotonic() < deadline:
                time.sleep(0.02)
            if self.pid(key) is None:
                raise OSError(f"{PROGRAM} did not start: {self._last_words(logs)}")
        self._set_limits(key, record)
        return key, {"CUDA_MPS_PIPE_DIRECTORY": pipe, "CUDA_MPS_LOG_DIRECTORY": logs}

    def _set_limits(self, key: str, record: dict[str, Any]) -> None:
        """The daemon's defaults: the largest share that any work of this account has on these cards."""
        limits = list(record["limits"].values())
        lines = [f"set_default_active_thread_percentage {max(one[0] for one in limits)}"]
        if all(one[1] for one in limits):
            most = max(one[1] for one in limits)
            lines += [
                f"set_default_device_pinned_mem_limit {number} {most}M"
                for number in range(len(record["uuids"]))
            ]
        self._control(key, record, [], "\n".join(lines) + "\n")

    def pid(self, key: str) -> int | None:
        """The daemon's process, None where none runs."""
        try:
            with open(os.path.join(self.folder(key), "pipe", f"{PROGRAM}.pid")) as handle:
                pid = int(handle.read().strip())
        except (OSError, ValueError):
            return None
        return pid if procs.alive(pid, None) and procs.environment_mark(pid, MARK) == key else None

    def _control(self, key: str, record: dict[str, Any], words: list[str], lines: str | None) -> str:
        """Run the control program as the daemon's account: to start it, or with lines of commands."""
        found = program()
        if found is None:
            raise OSError(f"{PROGRAM} is not on this node")
        account = record["account"]
        folder = self.folder(key)
        environment = {
            "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
            "CUDA_VISIBLE_DEVICES": ",".join(record["uuids"]),
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_MPS_PIPE_DIRECTORY": os.path.join(folder, "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": os.path.join(folder, "log"),
            MARK: key,
        }

        def switch() -> None:
            if account["switch"]:
                os.initgroups(account["name"], account["gid"])
                os.setgid(account["gid"])
                os.setuid(account["uid"])

        try:
            done = subprocess.run(
                [found, *words],
                input=lines.encode() if lines is not None else None,
                stdin=subprocess.DEVNULL if lines is None else None,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd="/",
                env=environment,
                timeout=SECONDS,
                preexec_fn=switch,
                start_new_session=True,
            )
        except subprocess.SubprocessError as error:
            raise OSError(f"{PROGRAM}: {error}") from error
        return done.stdout.decode("utf-8", "replace")

    def release(self, key: str, name: str, needed: bool) -> None:
        """One piece of work ended: its limit goes; the daemon too, when nothing else needs it."""
        path = os.path.join(self.root, f"{key}.json")
        record = files.read_json(path)
        if record is None:
            return
        record["limits"].pop(name, None)
        try:
            if needed and record["limits"]:
                files.write_json(path, record)
                self._set_limits(key, record)
            else:
                self.end(key, record)
        except OSError as error:
            log.error("mps: %s", error)

    def end(self, key: str, record: dict[str, Any]) -> None:
        """End a daemon with its servers; by signals where it does not listen."""
        pid = self.pid(key)
        if pid is not None:
            below = procs.descendants(pid)
            try:
                self._control(key, record, [], "quit -t 1\n")
            except OSError as error:
                log.info("mps: %s", error)
            deadline = time.monotonic() + SECONDS / 2
            while procs.alive(pid, None) and time.monotonic() < deadline:
                time.sleep(0.02)
            for left in (pid, *below):
                if procs.alive(left, None) and procs.environment_mark(left, MARK) == key:
                    os.kill(left, signal.SIGKILL)
        shutil.rmtree(self.folder(key), ignore_errors=True)
        try:
            os.unlink(os.path.join(self.root, f"{key}.json"))
        except FileNotFoundError:
            pass

    def sweep(self, needed: Iterable[str]) -> None:
        """End daemons that no living job needs: what an agent before left behind."""
        keep = set(needed)
        for name in os.listdir(self.root):
            key = name[:-5]
            if name.endswith(".json") and key not in keep:
                record = files.read_json(os.path.join(self.root, name)) or {}
                if record.get("account"):
                    self.end(key, record)

    def _last_words(self, logs: str) -> str:
        try:
            with open(os.path.join(logs, "control.log"), encoding="utf-8", errors="replace") as handle:
                return handle.read()[-300:].strip()
        except OSError:
            return "no log"


def over_share(rows: list[list[Any]], allocation: str, uuids: list[str], limit_mib: int) -> dict[str, int]:
    """{card: MiB} where this work's processes use more memory than its share, with 2 % and 64 MiB for contexts."""
    most = limit_mib + limit_mib // 50 + 64
    used: dict[str, int] = {}
    for gpu_uuid, mig_uuid, _at, _values, _missing, processes in rows:
        if mig_uuid is None and gpu_uuid in uuids:
            mine = [one.get("mem_mib") or 0 for one in processes if one.get("allocation") == allocation]
            if sum(mine) > most:
                used[gpu_uuid] = sum(mine)
    return used
