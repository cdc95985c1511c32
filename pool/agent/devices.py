"""Devices of a hold: while it lasts they are open to its person's account and to nobody else; afterwards they are as
they were.

Only a root agent can do this, and only for whole cards: who shares a card shares its device file. The driver's own
helper sets the files' modes anew when a program starts (unless its option ``NVreg_ModifyDeviceFiles=0`` is set), so
``keep`` looks at them again. What was found is written down before anything is changed: the next agent closes what
this one opened. Access control lists are set as the kernel keeps them, without the ``setfacl`` program; where a file
system knows none, the file is given to the account instead.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
from typing import Any, Iterable

from pool.agent import files

RECORD = "devices.json"
ACL = "system.posix_acl_access"
NOBODYS = 0xFFFFFFFF
READ_WRITE = 6
OWNER, USER, GROUP, MASK, OTHER = 0x01, 0x02, 0x04, 0x10, 0x20
NO_LISTS = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


def paths(gpus: Iterable[dict[str, Any]], uuids: Iterable[str]) -> list[str]:
    """The device files of some cards, by the minor numbers that NVML tells; a card without one has none."""
    minors = {str(gpu.get("uuid")): gpu.get("minor") for gpu in gpus}
    found = (minors.get(uuid) for uuid in uuids)
    return [f"/dev/nvidia{int(minor)}" for minor in found if isinstance(minor, int)]


def access_list(uid: int) -> bytes:
    """The kernel's form of: owner and ``uid`` read and write, nobody else anything."""
    entries = (
        (OWNER, READ_WRITE, NOBODYS),
        (USER, READ_WRITE, uid),
        (GROUP, 0, NOBODYS),
        (MASK, READ_WRITE, NOBODYS),
        (OTHER, 0, NOBODYS),
    )
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


def open_to(folder: str, wanted: Iterable[str], uid: int, gid: int) -> list[str]:
    """Open device files to one account alone, and note in the job's folder how they were. Gives those opened."""
    found = [_found(path) for path in wanted if os.path.exists(path)]
    if not found:
        return []
    record = {"uid": uid, "gid": gid, "devices": found}
    files.write_json(os.path.join(folder, RECORD), record)
    for device in found:
        _open(device["path"], uid, gid)
    return [device["path"] for device in found]


def keep(folder: str) -> None:
    """Open again what something else has given back its old mode."""
    record = files.read_json(os.path.join(folder, RECORD))
    for device in (record or {}).get("devices", []):
        try:
            if stat.S_IMODE(os.stat(device["path"]).st_mode) & 0o007:
                _open(device["path"], record["uid"], record["gid"])
        except OSError:
            continue  # the card is gone


def close(folder: str) -> None:
    """Put back what the note in the job's folder says, and forget it; nothing where there is none."""
    path = os.path.join(folder, RECORD)
    record = files.read_json(path)
    if record is None:
        return
    for device in record.get("devices", []):
        try:
            _restore(device)
        except OSError:
            continue  # the card is gone
    os.unlink(path)


def _found(path: str) -> dict[str, Any]:
    state = os.stat(path)
    try:
        before: str | None = os.getxattr(path, ACL).hex()
    except OSError:
        before = None
    return {
        "path": path,
        "mode": stat.S_IMODE(state.st_mode),
        "uid": state.st_uid,
        "gid": state.st_gid,
        "acl": before,
    }


def _open(path: str, uid: int, gid: int) -> None:
    try:
        os.setxattr(path, ACL, access_list(uid))
    except OSError as error:
        if error.errno not in NO_LISTS:
            raise
        os.chown(path, uid, gid)
        os.chmod(path, 0o600)


def _restore(device: dict[str, Any]) -> None:
    path = device["path"]
    os.chown(path, device["uid"], device["gid"])
    try:
        if device["acl"]:
            os.setxattr(path, ACL, bytes.fromhex(device["acl"]))
        else:
            os.removexattr(path, ACL)
    except OSError as error:
        if error.errno not in (*NO_LISTS, errno.ENODATA):
            raise
    os.chmod(path, device["mode"])
