"""A pod's output by byte offset, from an API that only knows times.

Lines are asked for with their time stamps, from the second that was read last; what was read of that second is
skipped. Without a remembered place (another process read before) everything that is kept is read once and skipped by
bytes. A kubelet rotates logs: what it dropped before it was read is gone, and reading goes on with what is there.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass
from datetime import UTC, datetime

from pool.executors.kubernetes.connection import Connection, Problem
from pool.executors.kubernetes.manifests import CONTAINER

PIECE = 64 * 1024
MOST = 16 * 1024 * 1024
KEPT = 10_000
CHUNK = 16 * 1024
"""Runtimes write longer lines in chunks of so many bytes, and some kubelets stamp each."""
_STAMP = re.compile(rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d) ")


@dataclass(frozen=True)
class Place:
    """Where reading stands: ``offset`` bytes were read, ``second`` is the stamp's second of the last line (to ask
    from), ``seen`` the bytes already read of the lines from that second on."""

    offset: int
    second: str
    seen: int


class LogReader:
    """Remembers places of the pods that were read lately."""

    def __init__(self) -> None:
        self._places: OrderedDict[str, Place] = OrderedDict()

    def read(self, connection: Connection, namespace: str, name: str, offset: int) -> bytes:
        """At most 64 KiB from this offset on; empty where there is no more (yet), or no such pod."""
        key = f"{namespace}/{name}"
        place = self._places.get(key)
        if place is None or place.offset != offset:
            place = None
        query: dict[str, object] = {"container": CONTAINER, "timestamps": "true"}
        if place is not None:
            query["sinceTime"] = place.second
        try:
            raw = connection.text(f"/api/v1/namespaces/{namespace}/pods/{name}/log", MOST, **query)
        except Problem as problem:
            if problem.code in (400, 404):  # not begun yet, or gone
                return b""
            raise
        lines = _lines(raw)
        skip = offset if place is None else place.seen
        total = sum(len(text) for _, text in lines)
        if place is None and total < offset:  # rotated since it was read elsewhere
            skip = total
        return self._taken(key, lines, offset, skip)

    def _taken(self, key: str, lines: list[tuple[str, bytes]], offset: int, skip: int) -> bytes:
        """The bytes after the first ``skip``, and the new place behind them."""
        text = b"".join(part for _, part in lines)
        data = text[skip : skip + PIECE]
        end = skip + len(data)
        start_of_second, position, second = 0, 0, ""
        for stamp, part in lines:
            if position >= end and position > 0:
                break
            if stamp[:19] != second[:19]:
                start_of_second, second = position, stamp
            position += len(part)
        if second:
            self._places[key] = Place(offset + len(data), second[:19] + "Z", end - start_of_second)
            self._places.move_to_end(key)
            while len(self._places) > KEPT:
                self._places.popitem(last=False)
        return data


def _lines(raw: bytes) -> list[tuple[str, bytes]]:
    """[(stamp in UTC, text with its line end)]; text without a stamp belongs to the line before."""
    out: list[tuple[str, bytes]] = []
    for line in re.findall(rb"[^\n]*\n|[^\n]+$", raw):
        found = _STAMP.match(line)
        if found is None:
            if out:
                out[-1] = (out[-1][0], out[-1][1] + line)
            continue
        out.append((_utc(found[0].decode().strip()), _without_stamps(line[found.end() :])))
    return out


def _without_stamps(text: bytes) -> bytes:
    """A long line's chunks without the stamps that stand between them."""
    at = CHUNK
    while at < len(text):
        found = _STAMP.match(text, at)
        if found is None:
            return text
        text = text[:at] + text[found.end() :]
        at += CHUNK
    return text


def _utc(stamp: str) -> str:
    """Stamps are in the node's own zone: as UTC, to the second and with what follows."""
    if stamp.endswith("Z"):
        return stamp
    moment = datetime.fromisoformat(re.sub(r"\.\d+", "", stamp)).astimezone(UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
