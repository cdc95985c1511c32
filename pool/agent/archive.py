"""Folders as tar archives that come from somebody else: what may be in one, and how it is unpacked.

Used by all three sides: the client packs a project folder and unpacks results, the installation looks before it keeps
an upload, the node unpacks into the work folder. Only plain files and folders with plain relative names are taken;
links, devices, absolute and ``..`` paths, control characters and names that are not UTF-8 are refused, and so is what
unpacks to more than its limits. Unpacking walks from folder to folder by descriptor and follows no link, so that
nothing lands outside the target whatever lies in it already.
"""

from __future__ import annotations

import fnmatch
import gzip
import os
import stat
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

MIB = 1024 * 1024
LONGEST_PATH, LONGEST_NAME, DEEPEST = 1024, 255, 32
LEFT_OUT = (
    ".git",
    ".hg",
    ".svn",
    "__pycache__",
    ".venv",
    "venv",
    "node_modules",
    ".mypy_cache",
    ".pytest_cache",
)
PIECE = 64 * 1024
MOST_EXTRA = 16 * 1024


@dataclass(frozen=True)
class Limits:
    """What an archive may hold, unpacked."""

    files: int = 20_000
    bytes: int = 1024 * MIB


@dataclass(frozen=True)
class Summary:
    """What an archive holds."""

    files: int
    bytes: int


class BadArchive(Exception):
    """It is refused as a whole; ``code`` is stable, the text names the entry."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail


class _Entry(tarfile.TarInfo):
    """An entry whose extra headers are small: tarfile reads them whole into memory."""

    EXTRA = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
    LONG = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)

    def _proc_member(self, archive: Any) -> Any:
        if self.type == tarfile.GNUTYPE_SPARSE or (
            self.type in (*self.EXTRA, *self.LONG) and self.size > MOST_EXTRA
        ):
            raise BadArchive("archive_unreadable", "an extra header is too long")
        return super()._proc_member(archive)  # type: ignore[misc]


class _Limited:
    """A reader that gives at most so many bytes: what unpacks to more is a bomb, whatever its headers say."""

    def __init__(self, source: Any, most: int) -> None:
        self.source = source
        self.left = most

    def read(self, size: int = -1) -> bytes:
        data: bytes = self.source.read(PIECE if size < 0 else size)
        self.left -= len(data)
        if self.left < 0:
            raise BadArchive("archive_too_large", "it unpacks to more than is taken")
        return data


def plain_parts(name: str) -> list[str]:
    """The parts of a relative path without tricks; ``BadArchive`` for anything else. ``.`` is the empty list."""
    shown = ascii(name[:120])
    if name.startswith("/"):
        raise BadArchive("path_absolute", f"{shown} is an absolute path")
    if any(ord(sign) < 32 or ord(sign) == 127 or 0xD800 <= ord(sign) <= 0xDFFF for sign in name):
        raise BadArchive("name_odd", f"{shown} holds control characters or is not UTF-8")
    if "\\" in name:
        raise BadArchive("name_odd", f"{shown} holds a backslash")
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise BadArchive("path_outside", f"{shown} leads out of the folder")
    if len(name.encode()) > LONGEST_PATH or len(parts) > DEEPEST:
        raise BadArchive("name_too_long", f"{shown} is too long or too deep")
    if any(len(part.encode()) > LONGEST_NAME for part in parts):
        raise BadArchive("name_too_long", f"{shown} is too long")
    return parts


def entries(source: BinaryIO, limits: Limits, packed: bool = True) -> Iterator[tuple[list[str], Any, Any]]:
    """(parts, member, reader) of each entry in order; everything is checked before it is given out."""
    inner: Any = gzip.GzipFile(fileobj=source, mode="rb") if packed else source
    # Headers and padding come on top of the contents: 1.5 KiB an entry, and tar's closing record.
    limited = _Limited(inner, limits.bytes + limits.files * 1536 + 64 * 1024)
    files: set[str] = set()
    folders: set[str] = set()
    count = size = 0
    try:
        with tarfile.open(fileobj=limited, mode="r|", errorlevel=2, tarinfo=_Entry) as archive:  # type: ignore[call-overload]
            for member in archive:
                parts = plain_parts(member.name)
                if not (member.isreg() or member.isdir()):
                    kind = "a link" if member.issym() or member.islnk() else "neither a file nor a folder"
                    raise BadArchive("entry_refused", f"{ascii(member.name[:120])} is {kind}")
                path = "/".join(parts)
                count += 1
                size += member.size
                if count > limits.files:
                    raise BadArchive("too_many_files", f"more than {limits.files} entries")
                if size > limits.bytes:
                    raise BadArchive("archive_too_large", f"more than {limits.bytes // MIB} MiB unpacked")
                above = {"/".join(parts[:depth]) for depth in range(1, len(parts))}
                if not parts and member.isdir():
                    continue  # the folder itself
                taken = path in files or (member.isreg() and path in folders)
                if not parts or taken or above & files:
                    raise BadArchive("entry_twice", f"{ascii(path[:120])} is there twice or inside a file")
                folders |= above
                (folders if member.isdir() else files).add(path)
                yield parts, member, archive.extractfile(member) if member.isreg() else None
    except (
        tarfile.TarError,
        OSError,
        EOFError,
        zlib.error,
        ValueError,
        OverflowError,
        RecursionError,
    ) as error:
        raise BadArchive("archive_unreadable", f"not a readable tar archive: {error}") from error


def check(source: BinaryIO, limits: Limits, packed: bool = True) -> Summary:
    """Read an archive to its end and say what is in it; ``BadArchive`` where it is not to be kept."""
    files = size = 0
    for _parts, member, reader in entries(source, limits, packed):
        if reader is not None:
            files += 1
            size += member.size
    return Summary(files, size)


def open_below(root: int, parts: list[str], make: bool = False) -> int:
    """A descriptor of the folder ``parts`` below ``root``, without following a link anywhere."""
    here = os.dup(root)
    for part in parts:
        if make:
            try:
                os.mkdir(part, 0o755, dir_fd=here)
            except FileExistsError:
                pass
        try:
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=here)
        except OSError:
            os.close(here)
            raise
        os.close(here)
        here = below
    return here


def unpack(source: BinaryIO, root: int, limits: Limits, packed: bool = True) -> Summary:
    """Unpack below the folder ``root`` (a descriptor). A file that is there is replaced; a link is never followed.

    Raises ``BadArchive``, or ``OSError`` where the disk is full or a folder is not ours.
    """
    files = size = 0
    for parts, member, reader in entries(source, limits, packed):
        if reader is None:
            os.close(_made(root, parts, parts))
            continue
        folder = _made(root, parts[:-1], parts)
        try:
            _write(folder, parts[-1], reader, 0o755 if member.mode & 0o100 else 0o644)
        except IsADirectoryError as error:
            raise BadArchive("entry_twice", f"{'/'.join(parts)[:120]!a} is a folder there") from error
        finally:
            os.close(folder)
        files += 1
        size += member.size
    return Summary(files, size)


def _made(root: int, parts: list[str], whole: list[str]) -> int:
    try:
        return open_below(root, parts, make=True)
    except (NotADirectoryError, OSError) as error:
        if getattr(error, "errno", 0) in (20, 40):  # ENOTDIR, ELOOP: a link or a file stands in the way
            raise BadArchive(
                "path_outside", f"{'/'.join(whole)[:120]!a}: a link stands in the way"
            ) from error
        raise


def _write(folder: int, name: str, reader: Any, mode: int) -> None:
    """A new file in place of whatever had the name (itself unlinked, not written through)."""
    try:
        if not stat.S_ISDIR(os.lstat(name, dir_fd=folder).st_mode):
            os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        pass
    handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode, dir_fd=folder)
    with os.fdopen(handle, "wb") as out:
        while True:
            data = reader.read(PIECE)
            if not data:
                break
            out.write(data)


@dataclass
class Packing:
    """What was packed, and what was left out because it is a link or a special file."""

    files: int = 0
    bytes: int = 0
    skipped: int = 0


def pack(
    root: str,
    out: Any,
    wanted: Callable[[str, os.stat_result], bool] | None = None,
    limits: Limits | None = None,
    packed: bool = True,
    only: str = "",
) -> Packing:
    """Write the files below ``root`` (or the one file or folder ``only`` of it) as tar into ``out``, in order of
    their names. ``wanted(path, stat)`` chooses files; links are left out and counted, never followed."""
    limits = limits or Limits()
    done = Packing()
    inner: Any = gzip.GzipFile(fileobj=out, mode="wb", compresslevel=5, mtime=0) if packed else out
    with tarfile.open(fileobj=inner, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for path, state in _found(root, only, done):
            if wanted is not None and not wanted(path, state):
                continue
            done.files += 1
            done.bytes += state.st_size
            if done.files > limits.files:
                raise BadArchive("too_many_files", f"more than {limits.files} files")
            if done.bytes > limits.bytes:
                raise BadArchive("archive_too_large", f"more than {limits.bytes // MIB} MiB")
            _add(archive, os.path.join(root, path), path, state)
    if packed:
        inner.close()
    return done


def _found(root: str, only: str, done: Packing) -> Iterator[tuple[str, os.stat_result]]:
    start = os.path.join(root, only) if only else root
    state = os.lstat(start)
    if stat.S_ISREG(state.st_mode):
        yield only, state
        return
    if not stat.S_ISDIR(state.st_mode):
        done.skipped += 1
        return
    for folder, names, files in os.walk(start):
        names.sort()
        for name in [*sorted(files), *[n for n in names if os.path.islink(os.path.join(folder, n))]]:
            path = os.path.relpath(os.path.join(folder, name), root)
            try:
                state = os.lstat(os.path.join(root, path))
                plain_parts(path)
            except (OSError, BadArchive):
                done.skipped += 1
                continue
            if stat.S_ISREG(state.st_mode):
                yield path, state
            else:
                done.skipped += 1


def _add(archive: tarfile.TarFile, full: str, path: str, state: os.stat_result) -> None:
    try:
        handle = os.open(full, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return  # gone, or not ours to read
    with os.fdopen(handle, "rb") as reader:
        member = tarfile.TarInfo(path)
        member.size = os.fstat(handle).st_size
        member.mode = 0o755 if state.st_mode & 0o100 else 0o644
        member.mtime = int(state.st_mtime)
        archive.addfile(member, _Exactly(reader, member.size))  # type: ignore[arg-type]


class _Exactly:
    """A file that may change while it is read gives exactly as many bytes as its header says."""

    def __init__(self, source: Any, size: int) -> None:
        self.source = source
        self.left = size

    def read(self, size: int = -1) -> bytes:
        wanted = self.left if size < 0 else min(size, self.left)
        data: bytes = self.source.read(wanted)
        data += b"\0" * (wanted - len(data))
        self.left -= len(data)
        return data


def patterns(text: str) -> list[str]:
    """The lines of an ignore file: names or shell patterns, ``#`` begins a comment."""
    lines = [line.strip().rstrip("/") for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def not_ignored(ignored: list[str]) -> Callable[[str, os.stat_result], bool]:
    """A chooser for ``pack``: no part of the path, nor the path itself, matches a pattern."""

    def wanted(path: str, _state: os.stat_result) -> bool:
        parts = path.split("/")
        heads = ["/".join(parts[: depth + 1]) for depth in range(len(parts))]
        return not any(fnmatch.fnmatch(name, one) for one in ignored for name in [*parts, *heads])

    return wanted
