"""Under which system account the two servers run: PostgreSQL refuses to run as root.

A plain user runs them as itself. Root hands them to the account `gpupool` where there is one, else to
`daemon` (not to `nobody`: people's jobs may run as that one, and must not own the database). Where that
account cannot reach the programs or the data (a checkout below a closed home, say), they run in a user
namespace in which root is shown as another.
"""

import ctypes
import os
import pwd
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from portal.up.errors import UpError

SERVICE_ACCOUNTS = ("gpupool", "daemon")
SHOWN_UID = 65534  # the account that is shown inside a user namespace; it has a name everywhere
_PR_SET_PDEATHSIG = 1


def die_with_parent(sig: int) -> Callable[[], None]:
    """A function for a fresh child that asks the kernel to send it `sig` when its parent ends, however it
    ends.

    Linux only; elsewhere it does nothing, and the next start takes over what is left. To be called after any
    change of account, which clears the request.
    """
    if not sys.platform.startswith("linux"):
        return lambda: None
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def ask() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, sig, 0, 0, 0)
        if os.getppid() != parent:  # the parent ended before the request was made
            os.kill(os.getpid(), signal.SIGKILL)

    return ask


@dataclass(frozen=True)
class Account:
    """How a server's program is started: words before its command, and keywords for subprocess."""

    uid: int
    prefix: tuple[str, ...] = ()
    popen: dict[str, Any] = field(default_factory=dict)

    def command(self, *words: str) -> list[str]:
        return [*self.prefix, *words]

    def give(self, path: Path) -> None:
        """Make a folder for this account alone."""
        if path.is_symlink():
            raise UpError(f"{path} is a link; remove it.")
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.stat().st_uid != self.uid:
            os.chown(path, self.uid, self.popen.get("group", -1))
        path.chmod(0o700)


_NAMESPACE = ("unshare", "--user", f"--map-user={SHOWN_UID}", f"--map-group={SHOWN_UID}", "--")


def service_uid() -> int:
    """The account that root gives the servers to; 0 where the system has none of them."""
    for name in SERVICE_ACCOUNTS:
        try:
            return pwd.getpwnam(name).pw_uid
        except KeyError:
            continue
    return 0


def _switched(uid: int) -> Account:
    popen: dict[str, Any] = {"user": uid, "group": pwd.getpwuid(uid).pw_gid, "extra_groups": []}
    return Account(uid, (), popen)


def _reaches(paths: list[Path]) -> bool:
    """Whether the service account could pass through every folder above these paths."""
    for path in paths:
        for parent in path.resolve().parents:
            if parent.exists() and not parent.stat().st_mode & 0o001:
                return False
    return True


def _has_name(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def _namespace_works(program: str) -> bool:
    if not shutil.which("unshare"):
        return False
    command = [*_NAMESPACE, program, "--version"]
    return subprocess.run(command, capture_output=True, check=False, cwd="/").returncode == 0


def service_account(data: Path, program: str) -> Account:
    """The account for the servers whose data lie in the folder `data` (existing data decide by their
    owner)."""
    if os.geteuid() != 0:
        # initdb wants a name for its account, which a container's made-up one does not have.
        nameless = not _has_name(os.geteuid()) and _namespace_works(program)
        return Account(os.geteuid(), _NAMESPACE if nameless else ())
    uid = service_uid()
    if data.exists() and any(data.iterdir()):
        owner = data.stat().st_uid
        if owner and _has_name(owner) and _reaches([data, Path(program)]):
            return _switched(owner)
        if owner == 0 and _namespace_works(program):
            return Account(0, _NAMESPACE)
    elif uid and _reaches([data, Path(program)]):
        return _switched(uid)
    elif _namespace_works(program):
        return Account(0, _NAMESPACE)
    raise UpError(
        f"PostgreSQL cannot run as root, no other account can reach {data} or {program}, "
        "and this system allows no user namespaces: start as a plain user, "
        "put the folder where others may pass, or give DATABASE_URL."
    )
