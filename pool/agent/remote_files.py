"""Files of a lease's work folder, sent and taken as a tar stream, as the job's account."""

from __future__ import annotations

import json
import os
from typing import Any

from pool.agent import archive
from pool.agent.channel import DATA, END, INPUT, PIECE
from pool.agent.line import Line

LIMITS = archive.Limits(files=100_000, bytes=64 * 1024 * archive.MIB)


class Trouble(Exception):
    """A refusal with its code, told to the person."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code


class _Out:
    """What tar writes becomes frames."""

    def __init__(self, line: Line) -> None:
        self.line = line

    def write(self, data: bytes) -> int:
        for start in range(0, len(data), PIECE):
            self.line.write(DATA, data[start : start + PIECE])
        return len(data)

    def flush(self) -> None:
        return


class _In:
    """Frames become what tar reads."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.rest = b""
        self.over = False

    def read(self, size: int = -1) -> bytes:
        while not self.rest and not self.over:
            kind, content = self.line.read()
            self.rest = content if kind == INPUT else b""
            self.over = kind == END
        if size < 0:
            size = len(self.rest)
        data, self.rest = self.rest[:size], self.rest[size:]
        return data


def _path(order: dict[str, Any]) -> str:
    try:
        return "/".join(archive.plain_parts(str(order.get("path") or ".")))
    except archive.BadArchive as bad:
        raise Trouble(bad.code, bad.detail) from bad


def send(line: Line, order: dict[str, Any], _job: Any, _meta: Any, marked: int) -> int:
    """``path`` of the work folder, whole or (``changed``) only what is newer than the upload."""
    path = _path(order)
    root = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
    parts = path.split("/") if path else []
    try:
        if parts:
            os.close(archive.open_below(root, parts[:-1]))
            os.lstat(parts[-1] if len(parts) == 1 else path)
    except OSError as error:
        raise Trouble("no_such_file", f"{path!a}: {error.strerror}") from error
    wanted = None
    if order.get("changed") and marked:
        wanted = lambda _path, state: state.st_ctime_ns > marked  # noqa: E731
    try:
        done = archive.pack(".", _Out(line), wanted, LIMITS, packed=True, only=path)
    except archive.BadArchive as bad:
        raise Trouble(bad.code, bad.detail) from bad
    summary = {"files": done.files, "bytes": done.bytes, "skipped": done.skipped}
    line.write(END, json.dumps(summary).encode())
    return 0


def take(line: Line, order: dict[str, Any], _job: Any, _meta: Any, _marked: int) -> int:
    """Unpack what comes below ``path`` of the work folder."""
    path = _path(order)
    root = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
    try:
        target = archive.open_below(root, path.split("/") if path else [], make=True)
    except OSError as error:
        raise Trouble("path_outside", f"{path!a}: {error.strerror}") from error
    try:
        done = archive.unpack(_In(line), target, LIMITS)  # type: ignore[arg-type]
    except archive.BadArchive as bad:
        raise Trouble(bad.code, bad.detail) from bad
    except OSError as error:
        code = "disk_full" if error.errno in (28, 122) else "not_written"
        raise Trouble(code, str(error)) from error
    line.write(END, json.dumps({"files": done.files, "bytes": done.bytes}).encode())
    return 0
