"""Whose account a job runs under on this machine. Never root, whatever the installation asks."""

from __future__ import annotations

import os
import pwd
from dataclasses import dataclass


class AccountError(Exception):
    """The job cannot be started under any account here; ``code`` is stable, the failure is terminal."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail


@dataclass(frozen=True)
class Account:
    """``switch``: the agent is root and changes to this account; else it is the agent's own."""

    name: str
    uid: int
    gid: int
    home: str
    shell: str
    switch: bool


def own_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def resolve(wanted: str | None, fallback: str | None = None, euid: int | None = None) -> Account:
    """The account for a job. ``wanted`` is the person's mapped account, ``fallback`` the node's own choice.

    An agent that is not root runs everything as itself. A root agent needs an account that exists and is not
    uid 0: ``account_missing`` or ``account_refused`` otherwise.
    """
    euid = os.geteuid() if euid is None else euid
    if euid != 0:
        try:
            entry = pwd.getpwuid(euid)
            return Account(
                entry.pw_name, euid, os.getegid(), entry.pw_dir, entry.pw_shell or "/bin/sh", False
            )
        except KeyError:
            return Account(str(euid), euid, os.getegid(), "/", "/bin/sh", False)
    for name in (wanted, fallback):
        if not name:
            continue
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        if entry.pw_uid == 0:
            raise AccountError("account_refused", f"account {name} is root; jobs never run as root")
        return Account(
            entry.pw_name, entry.pw_uid, entry.pw_gid, entry.pw_dir, entry.pw_shell or "/bin/sh", True
        )
    if wanted:
        raise AccountError("account_missing", f"account {wanted} does not exist on this node")
    raise AccountError("account_missing", "no account is mapped for this person, and jobs never run as root")
