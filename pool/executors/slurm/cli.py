"""Slurm by its commands: here, or on a login host over ssh. Arguments are lists, never shell text of ours."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from pool.executors.base import RetryableFailure, TerminalFailure
from pool.executors.slurm import read, text
from pool.executors.slurm.read import Job, SlurmNode
from pool.executors.slurm.settings import SlurmSettings
from pool.executors.slurm.transport import Association, JobOrder

AWAY = (
    "unable to contact slurm controller",
    "connection refused",
    "connection timed out",
    "socket timed out",
    "zero bytes were transmitted",
    "communication connection failure",
    "connection reset",
    "slurmctld is in standby",
    "slurm backup controller in standby",
    "unable to establish controller",
    "unable to contact primary",
    "temporarily unable to accept job",
    "resource temporarily unavailable",
    "problem talking to the database",
    "unable to connect to database",
)
UNKNOWN_JOB = ("invalid job id", "job/step already completing or completed", "already completed", "not found")
REFUSALS = (
    ("invalid account", "account_unknown"),
    ("invalid qos", "qos_unknown"),
    ("invalid partition", "partition_unknown"),
    ("user not in group", "partition_forbidden"),
    ("invalid generic resource", "gres_unknown"),
    ("node configuration is not available", "nodes_do_not_fit"),
    ("invalid node name", "node_unknown"),
    ("time limit", "time_limit"),
    ("violates accounting", "slurm_limit"),
    ("reservation", "reservation_unusable"),
    ("invalid user id", "account_missing"),
    ("job script", "script_refused"),
)
NO_ACCOUNTING = (
    "accounting storage is disabled",
    "slurm accounting storage is disabled",
    "not running a database",
)
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/opt/slurm/bin"


class CommandLine:
    """`SlurmTransport` by `sbatch`, `squeue`, `sinfo`, `sacct`, `scancel`, `scontrol` and `sacctmgr`."""

    def __init__(self, settings: SlurmSettings) -> None:
        self.settings = settings
        self._version: tuple[int, int] | None = None

    def _run(self, words: Sequence[str], stdin: str | None = None, **more: str) -> str:
        """A command's output. Raises by what it says: away is retryable, the rest is not."""
        environment = {"PATH": os.environ.get("PATH") or PATH, "LANG": "C.UTF-8", "HOME": "/", **more}
        if self.settings.conf:
            environment["SLURM_CONF"] = self.settings.conf
        command = list(words)
        if self.settings.ssh_host:
            wait = str(max(1, int(self.settings.timeout_s / 2)))
            set_first = [f"{name}={value}" for name, value in more.items()]
            if self.settings.conf:
                set_first.append(f"SLURM_CONF={self.settings.conf}")
            remote = shlex.join(["env", *set_first, *words])
            options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={wait}"]
            command = ["ssh", *options, "--", self.settings.ssh_host, remote]
            environment["HOME"] = os.environ.get("HOME", "/")
        try:
            done = subprocess.run(
                command,
                input=stdin or "",
                capture_output=True,
                text=True,
                errors="replace",
                env=environment,
                timeout=self.settings.timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise RetryableFailure(
                "slurm_slow", f"{words[0]} took over {self.settings.timeout_s:g} s"
            ) from error
        except FileNotFoundError as error:
            raise TerminalFailure("command_missing", f"{command[0]} is not installed here") from error
        if done.returncode == 0:
            return done.stdout
        said = done.stderr.strip() or done.stdout.strip()
        if self.settings.ssh_host and done.returncode == 255:
            raise RetryableFailure("login_host_away", said[-500:])
        raise _failure(words[0], said, done.returncode)

    # -- reading ------------------------------------------------------------------------------------------

    def version(self) -> tuple[int, int]:
        """Of the controller, by its configuration; asked once."""
        self._run(["scontrol", "ping"]) if self._version else None
        if self._version is None:
            said = self._run(["scontrol", "show", "config"])
            line = next((row for row in said.splitlines() if row.startswith("SLURM_VERSION")), "")
            major, _dot, rest = line.partition("=")[2].strip().partition(".")
            if not major.isdecimal():
                raise TerminalFailure("version_unknown", line[:200])
            self._version = (int(major), int(rest.partition(".")[0] or 0))
        return self._version

    def jobs(self) -> list[Job]:
        """By `squeue --json`, where jobs that ended within MinJobAge are too."""
        return [read.job(row) for row in self._json(["squeue", "--json", "--states=all"], "jobs")]

    def find(self, uid: UUID, job_id: str) -> list[Job]:
        """By `squeue` in text: quick however many jobs there are."""
        out: dict[str, Job] = {}
        name, mark = f"{read.NAME}{uid}", f"{read.MARK}{uid}"
        for what in [f"--name={name}", *([f"--jobs={job_id}"] if job_id.isdecimal() else [])]:
            try:
                said = self._run(["squeue", "-h", "--states=all", "-o", "%A|%T|%N|%k|%j", what])
            except TerminalFailure as error:
                if any(text in error.detail.lower() for text in UNKNOWN_JOB):
                    continue
                raise
            for line in said.splitlines():
                ident, state, nodes, rest = [*line.split("|", 3), "", "", ""][:4]
                # Ids begin anew where a controller lost its state: so a number alone is nobody's name.
                if name in rest or mark in rest:
                    out[ident] = Job(ident, name, frozenset({state}), nodes=read.hosts(nodes))
        return list(out.values())

    def nodes(self) -> list[SlurmNode]:
        """By JSON where this version has it for nodes, else by text."""
        if self.version() >= (23, 2):
            return [read.node(row) for row in self._json(["scontrol", "show", "nodes", "--json"], "nodes")]
        try:
            rows = self._json(["sinfo", "--json"], "nodes")
        except TerminalFailure:
            return text.nodes_text(self._run(["scontrol", "-d", "-o", "show", "node"]))
        return [read.node(row) for row in rows]

    def _json(self, words: Sequence[str], key: str) -> list[dict[str, Any]]:
        try:
            answer = json.loads(self._run(words))
        except ValueError as error:
            raise TerminalFailure("answer_unreadable", f"{words[0]} did not answer in JSON") from error
        rows = answer.get(key)
        if not isinstance(rows, list):
            raise TerminalFailure("answer_unreadable", f"{words[0]} answered without {key}")
        return rows

    def history(
        self,
        *,
        names: Iterable[str] = (),
        ids: Iterable[str] = (),
        since: datetime,
        until: datetime | None = None,
    ) -> list[Job]:
        """By `sacct`, whole jobs alone."""
        words = [
            "sacct",
            "-a",
            "-X",
            "-n",
            "-P",
            "-D",
            "-o",
            text.SACCT_FIELDS,
            "-S",
            f"{since:%Y-%m-%dT%H:%M:%S}",
        ]
        if until is not None:
            words += ["-E", f"{until:%Y-%m-%dT%H:%M:%S}"]
        listed = list(names)
        if listed:
            words += [f"--name={','.join(listed)}"]
        numbers = list(ids)
        if numbers:
            words += ["-j", ",".join(numbers)]
        return text.accounted(self._run(words, SLURM_TIME_FORMAT="%s", TZ="UTC"))

    # -- doing --------------------------------------------------------------------------------------------

    def submit(self, order: JobOrder) -> str:
        """By `sbatch`, the script on its standard input."""
        said = self._run(sbatch_words(order), stdin=order.script)
        job_id = said.strip().partition(";")[0]
        if not job_id.isdecimal():
            raise RetryableFailure("answer_lost", f"sbatch said {said[:100]!r}")
        return job_id

    def cancel(self, job_id: str) -> None:
        """By `scancel`."""
        self._unknown_is_fine(["scancel", job_id])

    def signal(self, job_id: str, signal: str, *, everything: bool) -> None:
        """By `scancel --signal`."""
        whom = "--full" if everything else "--batch"
        self._unknown_is_fine(["scancel", f"--signal={signal.removeprefix('SIG')}", whom, job_id])

    def _unknown_is_fine(self, words: Sequence[str]) -> None:
        try:
            self._run(words)
        except TerminalFailure as error:
            if not any(text in error.detail.lower() for text in UNKNOWN_JOB):
                raise

    def prolong(self, job_id: str, minutes: int) -> None:
        """By `scontrol update`."""
        self._run(["scontrol", "update", f"JobId={job_id}", f"TimeLimit={minutes}"])

    def comment(self, job_id: str, text: str) -> None:
        """By `scontrol update`."""
        self._run(["scontrol", "update", f"JobId={job_id}", f"Comment={text}"])

    def drain(self, node: str, reason: str) -> None:
        """By `scontrol update`."""
        self._run(["scontrol", "update", f"NodeName={node}", "State=DRAIN", f"Reason={reason}"])

    def resume(self, node: str) -> None:
        """By `scontrol update`; one that is open already is no failure."""
        try:
            self._run(["scontrol", "update", f"NodeName={node}", "State=RESUME"])
        except TerminalFailure as error:
            if "invalid node state" not in error.detail.lower():
                raise

    def associations(self) -> list[Association]:
        """By `sacctmgr`."""
        said = self._run(["sacctmgr", "-n", "-P", "show", "assoc", "format=Account,User,Partition,GrpTRES"])
        out: dict[str, dict[str, int]] = {}
        for line in said.splitlines():
            account, user, partition, limits = [*line.split("|"), "", "", ""][:4]
            if account and not user and not partition:
                out[account] = {
                    name: n for name, n in read.trackable(limits).items() if name.startswith("gres/")
                }
        return [Association(account, limits) for account, limits in sorted(out.items())]

    def limit(self, account: str, limits: dict[str, int | None]) -> None:
        """By `sacctmgr modify account`."""
        text = ",".join(f"{name}={-1 if value is None else value}" for name, value in sorted(limits.items()))
        self._run(
            ["sacctmgr", "-i", "modify", "account", "where", f"name={account}", "set", f"GrpTRES={text}"]
        )


def sbatch_words(order: JobOrder) -> list[str]:
    """The command line of an order."""
    words = [
        "sbatch",
        "--parsable",
        f"--job-name={order.name}",
        f"--nodes={len(order.nodes)}",
        f"--nodelist={','.join(order.nodes)}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={order.cpus}",
        f"--mem={order.memory_mib}M",
        f"--chdir={order.folder}",
        f"--output={order.output}",
        "--open-mode=append",
        "--no-requeue",
    ]
    words.append(f"--time={order.minutes}" if order.minutes is not None else "--time=UNLIMITED")
    optional = {
        "--gres": order.gres,
        "--account": order.account,
        "--qos": order.qos,
        "--partition": order.partition,
        "--reservation": order.reservation,
        "--comment": order.comment,
        "--uid": order.user,
    }
    words += [f"{name}={value}" for name, value in optional.items() if value]
    return words


def _failure(command: str, said: str, code: int) -> RetryableFailure | TerminalFailure:
    text = said.lower()
    detail = said.replace("\n", " ")[-500:]
    if any(word in text for word in AWAY):
        return RetryableFailure("controller_away", detail)
    if any(word in text for word in NO_ACCOUNTING):
        return TerminalFailure("no_accounting", detail)
    if command == "sbatch":
        for word, found in REFUSALS:
            if word in text:
                return TerminalFailure(found, detail)
    return TerminalFailure("slurm_refused", f"{command}: {detail or f'exit code {code}'}")
