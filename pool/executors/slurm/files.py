"""The shared folder: its two halves, and output read from it. People's jobs write there: nothing in it is trusted."""

from __future__ import annotations

import os
import stat

from pool.executors.base import RetryableFailure, TerminalFailure
from pool.executors.slurm.settings import SlurmSettings

PIECE = 65_536


def folders_make(settings: SlurmSettings) -> None:
    """The shared folder's two halves, where the installation can write there; else the nodes' own scripts make them."""
    for name in ("work", "output"):
        try:
            os.makedirs(f"{settings.folder}/{name}", mode=0o755, exist_ok=True)
            if settings.submit_as == "person":
                os.chmod(f"{settings.folder}/{name}", 0o1733)
        except OSError as error:
            raise TerminalFailure("folder_unusable", f"{settings.folder}: {error.strerror}") from error


def read_piece(folder: str, name: str, offset: int) -> bytes:
    """At most ``PIECE`` bytes of a plain file in the output folder. People's jobs write there: so no link is followed,
    and nothing but a file with one name is read."""
    try:
        top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise RetryableFailure("folder_away", f"{folder}: {error.strerror}") from error
    try:
        inner = os.open("output", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
        try:
            file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=inner)
        finally:
            os.close(inner)
    except OSError:
        return b""
    finally:
        os.close(top)
    try:
        about = os.fstat(file)
        if not stat.S_ISREG(about.st_mode) or about.st_nlink != 1 or about.st_size <= offset:
            return b""
        return os.pread(file, PIECE, offset)
    finally:
        os.close(file)
