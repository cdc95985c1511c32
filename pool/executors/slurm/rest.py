"""Slurm by slurmrestd, over a unix socket or HTTP(S), with a JWT where one is kept.

The newest version of the interface that both sides know is used. What a version cannot do (draining before v0.0.39,
signals to the whole job and the accounting before v0.0.40, limits) is done by the command line.
"""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterable
from datetime import datetime
from typing import Any
from urllib.parse import quote, urlencode, urlsplit
from uuid import UUID

from pool.executors.base import RetryableFailure, TerminalFailure
from pool.executors.slurm import read
from pool.executors.slurm.cli import REFUSALS, UNKNOWN_JOB, CommandLine
from pool.executors.slurm.read import Job, SlurmNode
from pool.executors.slurm.settings import SlurmSettings
from pool.executors.slurm.transport import Association, JobOrder

VERSIONS = ("v0.0.42", "v0.0.41", "v0.0.40", "v0.0.39", "v0.0.38", "v0.0.37", "v0.0.36")
LISTS = "v0.0.40"
"""From here on numbers are {set, infinite, number} and states are lists."""
MOST_BYTES = 512 * 1024 * 1024
JOB_PATH = "/usr/local/bin:/usr/bin:/bin"
NODE_BUSY = ("SLURM_PROTOCOL", "Unable to contact", "Connection refused", "timed out", "Zero Bytes")


class _Unix(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


class Rest:
    """`SlurmTransport` by slurmrestd."""

    def __init__(self, settings: SlurmSettings, token: str | None, commands: CommandLine) -> None:
        self.settings, self.token, self.commands = settings, token, commands
        self._api: str = ""
        self._slurm: tuple[int, int] = (0, 0)

    # -- HTTP ---------------------------------------------------------------------------------------------

    def _connection(self) -> http.client.HTTPConnection:
        where = urlsplit(self.settings.rest_url)
        wait = self.settings.timeout_s
        if where.scheme == "unix":
            return _Unix(where.path, wait)
        if where.scheme == "https":
            return http.client.HTTPSConnection(str(where.hostname), where.port, timeout=wait)
        return http.client.HTTPConnection(str(where.hostname), where.port, timeout=wait)

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        """Status and JSON of one request; `RetryableFailure` where nothing came back."""
        headers = {"Accept": "application/json", "X-SLURM-USER-NAME": self.settings.rest_user}
        if self.token:
            headers["X-SLURM-USER-TOKEN"] = self.token
        content = None
        if body is not None:
            content = json.dumps(body)
            headers["Content-Type"] = "application/json"
        connection = self._connection()
        try:
            connection.request(method, path, content, headers)
            answer = connection.getresponse()
            data = answer.read(MOST_BYTES)
        except TimeoutError as error:
            raise RetryableFailure(
                "slurm_slow", f"slurmrestd took over {self.settings.timeout_s:g} s"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise RetryableFailure("slurmrestd_away", f"{type(error).__name__}: {error}"[:300]) from error
        finally:
            connection.close()
        if answer.status == 401:
            raise TerminalFailure(
                "credential_refused", "slurmrestd does not accept the token: it may have expired"
            )
        try:
            found = json.loads(data) if data else {}
        except ValueError:
            found = {}
        return answer.status, found if isinstance(found, dict) else {}

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The answer of one call; raises by its errors."""
        status, found = self._ask(method, path, body)
        errors = [item for item in found.get("errors") or [] if isinstance(item, dict)]
        if status < 400 and not errors:
            return found
        said = "; ".join(_words(item) for item in errors)[:500] or f"HTTP {status}"
        if any(word.lower() in said.lower() for word in NODE_BUSY) or status in (502, 503, 504):
            raise RetryableFailure("controller_away", said)
        for word, code in REFUSALS:
            if word in said.lower():
                raise TerminalFailure(code, said)
        raise TerminalFailure("slurm_refused", said)

    @property
    def api(self) -> str:
        """The interface's version in use; found once."""
        if not self._api:
            for version in VERSIONS:
                status, found = self._ask("GET", f"/slurm/{version}/ping")
                if status == 200 and found.get("pings"):
                    self._api = version
                    meta = found.get("meta") or {}
                    told = (meta.get("slurm") or meta.get("Slurm") or {}).get("version") or {}
                    self._slurm = (read.number(told.get("major")) or 0, read.number(told.get("minor")) or 0)
                    break
                if status >= 500 and found.get("errors"):
                    raise RetryableFailure("controller_away", "; ".join(map(_words, found["errors"]))[:300])
            else:
                raise TerminalFailure("api_unknown", "slurmrestd speaks no version that is known here")
        return self._api

    # -- reading ------------------------------------------------------------------------------------------

    def version(self) -> tuple[int, int]:
        """As slurmrestd says of itself; raises where the controller behind it does not answer."""
        found = self._call("GET", f"/slurm/{self.api}/ping")
        if not any(_up(item) for item in found.get("pings") or []):
            raise RetryableFailure("controller_away", "slurmrestd answers, its controller does not")
        return self._slurm

    def jobs(self) -> list[Job]:
        """All jobs of the controller."""
        return [read.job(row) for row in self._call("GET", f"/slurm/{self.api}/jobs").get("jobs") or []]

    def find(self, uid: UUID, job_id: str) -> list[Job]:
        """Out of all jobs."""
        return [job for job in self.jobs() if job.uid == uid]

    def nodes(self) -> list[SlurmNode]:
        """All nodes."""
        return [read.node(row) for row in self._call("GET", f"/slurm/{self.api}/nodes").get("nodes") or []]

    def history(
        self,
        *,
        names: Iterable[str] = (),
        ids: Iterable[str] = (),
        since: datetime,
        until: datetime | None = None,
    ) -> list[Job]:
        """From slurmdbd behind slurmrestd, where this version filters; else by the command line."""
        if self.api < LISTS:
            return self.commands.history(names=names, ids=ids, since=since, until=until)
        numbers = [number for number in ids if number.isdecimal()]
        if numbers:
            rows = [
                row
                for number in numbers
                for row in self._call("GET", f"/slurmdb/{self.api}/job/{number}").get("jobs") or []
            ]
            return [job for job in map(read.accounted_json, rows) if job.id in numbers]
        asked: dict[str, str] = {"start_time": str(int(since.timestamp()))}
        if until is not None:
            asked["end_time"] = str(int(until.timestamp()))
        listed = set(names)
        if listed:
            asked["job_name"] = ",".join(sorted(listed))
        found = self._call("GET", f"/slurmdb/{self.api}/jobs?{urlencode(asked)}")
        jobs = [read.accounted_json(row) for row in found.get("jobs") or []]
        return [job for job in jobs if not listed or job.name in listed]

    # -- doing --------------------------------------------------------------------------------------------

    def submit(self, order: JobOrder) -> str:
        """POST of the job; an answer that does not come leaves the question open (`RetryableFailure`)."""
        if order.user:
            raise TerminalFailure("needs_the_command_line", "slurmrestd submits as its own user")
        found = self._call("POST", f"/slurm/{self.api}/job/submit", submit_body(order, self.api))
        job_id = read.number(found.get("job_id"))
        if not job_id:
            raise RetryableFailure("answer_lost", "slurmrestd answered without a job's id")
        return str(job_id)

    def cancel(self, job_id: str) -> None:
        """DELETE of the job."""
        self._unknown_is_fine("DELETE", f"/slurm/{self.api}/job/{quote(job_id, safe='')}")

    def signal(self, job_id: str, signal: str, *, everything: bool) -> None:
        """DELETE with a signal and the whole job as its aim, where this version has that."""
        if self.api < LISTS:
            self.commands.signal(job_id, signal, everything=everything)
            return
        asked = {"signal": signal, "flags": "FULL_JOB" if everything else "BATCH_JOB"}
        self._unknown_is_fine("DELETE", f"/slurm/{self.api}/job/{quote(job_id, safe='')}?{urlencode(asked)}")

    def _unknown_is_fine(self, method: str, path: str) -> None:
        try:
            self._call(method, path)
        except TerminalFailure as error:
            if not any(text in error.detail.lower() for text in UNKNOWN_JOB):
                raise

    def prolong(self, job_id: str, minutes: int) -> None:
        """POST of the job's new limit."""
        self._call("POST", f"/slurm/{self.api}/job/{job_id}", {"time_limit": _figure(minutes, self.api)})

    def comment(self, job_id: str, text: str) -> None:
        """POST of the job's new comment."""
        self._call("POST", f"/slurm/{self.api}/job/{job_id}", {"comment": text})

    def drain(self, node: str, reason: str) -> None:
        """POST of the node's state, where this version has that."""
        if self.api < "v0.0.39":
            self.commands.drain(node, reason)
        else:
            self._call(
                "POST", f"/slurm/{self.api}/node/{quote(node)}", {"state": ["DRAIN"], "reason": reason}
            )

    def resume(self, node: str) -> None:
        """POST of the node's state, where this version has that."""
        if self.api < "v0.0.39":
            self.commands.resume(node)
        else:
            self._call("POST", f"/slurm/{self.api}/node/{quote(node)}", {"state": ["RESUME"]})

    def associations(self) -> list[Association]:
        """By the command line."""
        return self.commands.associations()

    def limit(self, account: str, limits: dict[str, int | None]) -> None:
        """By the command line."""
        self.commands.limit(account, limits)


def _words(item: dict[str, Any]) -> str:
    return str(item.get("error") or item.get("description") or item.get("error_code") or "")


def _up(ping: dict[str, Any]) -> bool:
    return str(ping.get("ping") or ping.get("pinged") or "").upper() == "UP"


def _figure(value: int, api: str) -> Any:
    return {"set": True, "infinite": False, "number": value} if api >= LISTS else value


def submit_body(order: JobOrder, api: str) -> dict[str, Any]:
    """The body of a submission in the words of an interface's version."""
    job: dict[str, Any] = {
        "name": order.name,
        "comment": order.comment,
        "cpus_per_task": order.cpus,
        "tasks_per_node": 1,
        "current_working_directory": order.folder,
        "standard_output": order.output,
        "requeue": False,
        "open_mode": "append",
    }
    optional = {
        "account": order.account,
        "qos": order.qos,
        "partition": order.partition,
        "reservation": order.reservation,
    }
    job |= {name: value for name, value in optional.items() if value}
    if api >= LISTS:
        job["environment"] = [f"PATH={JOB_PATH}"]
        job["required_nodes"] = list(order.nodes)
        job["minimum_nodes"] = job["maximum_nodes"] = len(order.nodes)
        job["memory_per_node"] = _figure(order.memory_mib, api)
        if order.gres:
            job["tres_per_node"] = ",".join(f"gres/{item}" for item in order.gres.split(","))
        limit = {"set": True, "infinite": True, "number": 0}
        job["time_limit"] = limit if order.minutes is None else _figure(order.minutes, api)
    else:
        job["environment"] = {"PATH": JOB_PATH}
        job["nodelist"] = ",".join(order.nodes)
        job["nodes"] = [len(order.nodes), len(order.nodes)]
        job["memory_per_node"] = order.memory_mib
        if order.gres:
            job["gres"] = order.gres
        job["time_limit"] = "UNLIMITED" if order.minutes is None else order.minutes
    return {"script": order.script, "job": job}
