"""What a Slurm cluster's settings may say, and what is wrong with them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from pool.executors.base import TerminalFailure
from pool.models import Cluster

WORD = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._@+-]{0,63}$")
TRANSPORTS = ("cli", "rest")
SUBMIT_AS = ("service", "person")
RUNNERS = ("", "apptainer")


@dataclass(frozen=True)
class SlurmSettings:
    """How one Slurm is reached and how work is submitted there.

    ``transport``: ``cli`` runs Slurm's commands (here, or on ``ssh_host`` with the keys of the service's account);
    ``rest`` asks slurmrestd at ``rest_url`` (``unix:/path`` or ``http(s)://host:port``) as ``rest_user``, with the
    credential ``jwt`` where one is kept.
    ``submit_as``: all work as the service's own account, or each person's as their own (needs root, and the command
    line). ``folder`` is on storage that all nodes and the installation share: work folders and output lie below it.
    ``accounts`` maps department codes to Slurm accounts (else the code itself), ``qos`` the same to QOS (``*``: all
    others), ``models`` GRES types to card models: {type: {model, memory_mib}}.
    """

    transport: str = "cli"
    conf: str = ""
    ssh_host: str = ""
    rest_url: str = ""
    rest_user: str = "root"
    partition: str = ""
    reservation: str = ""
    folder: str = ""
    submit_as: str = "service"
    accounts: dict[str, str] = field(default_factory=dict)
    qos: dict[str, str] = field(default_factory=dict)
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    image_runner: str = ""
    timeout_s: float = 10.0

    def account_of(self, department: str) -> str:
        """The Slurm account of a department."""
        return self.accounts.get(department, department)


def problems(values: dict[str, Any]) -> dict[str, str]:
    """What is wrong, by setting: a code each. Empty: all is well."""
    out: dict[str, str] = {}
    known = set(SlurmSettings.__dataclass_fields__) | {"active"}
    for name in sorted(set(values) - known):
        out[name] = "unknown_setting"
    for name in ("transport", "submit_as", "image_runner"):
        allowed = {"transport": TRANSPORTS, "submit_as": SUBMIT_AS, "image_runner": RUNNERS}[name]
        if name in values and values[name] not in allowed:
            out[name] = "not_a_choice"
    for name in ("partition", "reservation", "rest_user", "ssh_host"):
        if values.get(name) and not (isinstance(values[name], str) and WORD.match(values[name])):
            out[name] = "not_a_name"
    for name in ("conf", "folder"):
        value = values.get(name)
        if value and not (isinstance(value, str) and value.startswith("/") and ".." not in value.split("/")):
            out[name] = "not_an_absolute_path"
    if values.get("transport") == "rest" and not _url(values.get("rest_url")):
        out["rest_url"] = "not_an_address"
    if values.get("transport") == "rest" and values.get("submit_as") == "person":
        out["submit_as"] = "needs_the_command_line"
    for name in ("accounts", "qos"):
        table = values.get(name) or {}
        good = isinstance(table, dict) and all(isinstance(v, str) and WORD.match(v) for v in table.values())
        if not good:
            out[name] = "not_a_table_of_names"
    if not _models(values.get("models") or {}):
        out["models"] = "not_a_table_of_models"
    wait = values.get("timeout_s", 10.0)
    if isinstance(wait, bool) or not isinstance(wait, int | float) or not 1 <= wait <= 60:
        out["timeout_s"] = "not_between_1_and_60"
    return out


def _url(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    parts = urlsplit(value)
    if parts.scheme == "unix":
        return parts.path.startswith("/")
    return parts.scheme in ("http", "https") and bool(parts.hostname) and not parts.username


def _models(table: Any) -> bool:
    return isinstance(table, dict) and all(
        isinstance(row, dict)
        and set(row) <= {"model", "memory_mib"}
        and isinstance(row.get("model"), str)
        and isinstance(row.get("memory_mib"), int)
        and row["memory_mib"] > 0
        for row in table.values()
    )


def settings_of(cluster: Cluster) -> SlurmSettings:
    """A cluster's settings; `TerminalFailure` (`settings_wrong`) where they cannot be used."""
    values = dict(cluster.settings or {})
    wrong = problems(values)
    if wrong:
        raise TerminalFailure("settings_wrong", ", ".join(f"{name}: {code}" for name, code in wrong.items()))
    values.pop("active", None)
    return SlurmSettings(**values)
