"""The agent's durable queue of messages to the installation.

Two lanes share one sequence of numbers: ``vital`` (job, log, free, event) is kept whatever happens,
``samples`` is bounded in bytes: its oldest segment is dropped and counted. Each lane is a folder of
JSON-lines segments; a segment is deleted once every message in it was acknowledged, so that an
acknowledgement writes nothing. After a restart whatever is left is sent again: the server is idempotent by
(node, seq).

A fresh state folder starts its numbers at the present time in milliseconds, so that a re-installed agent
never repeats numbers the server has seen.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

SEGMENT_BYTES = 256 * 1024
RESERVE = 1000


class _Segment:
    """One file: ``entries`` are (seq, offset, length), ``open`` the numbers not acknowledged yet."""

    __slots__ = ("entries", "open", "path", "size")

    def __init__(self, path: str) -> None:
        self.path = path
        self.entries: list[tuple[int, int, int]] = []
        self.open: set[int] = set()
        self.size = 0


class Lane:
    """An ordered, on-disk list of messages with a cursor for the present connection."""

    def __init__(self, folder: str, max_bytes: int | None = None, sync: bool = False) -> None:
        self.folder = folder
        self.max_bytes = max_bytes
        self.sync = sync
        self.dropped = 0
        self._segments: list[_Segment] = []
        self._where: dict[int, _Segment] = {}
        self._handle: Any = None
        self._cursor: tuple[int, int] = (0, 0)
        self.in_flight: set[int] = set()
        os.makedirs(folder, mode=0o700, exist_ok=True)
        self._load()

    def _load(self) -> None:
        for name in sorted(n for n in os.listdir(self.folder) if n.endswith(".jsonl")):
            segment = _Segment(os.path.join(self.folder, name))
            with open(segment.path, "rb") as handle:
                for line in handle:
                    # A torn last line (power cut in a write) is skipped: it was never promised to anyone.
                    if line.endswith(b"\n"):
                        try:
                            seq = int(json.loads(line)["seq"])
                        except (ValueError, KeyError, TypeError):
                            seq = 0
                        if seq:
                            segment.entries.append((seq, segment.size, len(line)))
                            segment.open.add(seq)
                            self._where[seq] = segment
                    segment.size += len(line)
            if segment.open:
                self._segments.append(segment)
            else:
                os.unlink(segment.path)

    @property
    def last_seq(self) -> int:
        return max(self._where) if self._where else 0

    @property
    def waiting(self) -> int:
        """Messages not yet acknowledged."""
        return len(self._where)

    @property
    def size(self) -> int:
        return sum(segment.size for segment in self._segments)

    def append(self, seq: int, line: bytes) -> None:
        """Write one message (``line`` ends with a newline) to the newest segment."""
        segment = self._segments[-1] if self._segments else None
        if segment is None or self._handle is None or segment.size >= SEGMENT_BYTES:
            if self._handle is not None:
                self._handle.close()
            segment = _Segment(os.path.join(self.folder, f"{seq:020d}.jsonl"))
            self._segments.append(segment)
            self._handle = open(segment.path, "ab", buffering=0)  # noqa: SIM115 - kept open across calls
        self._handle.write(line)
        if self.sync:
            os.fsync(self._handle.fileno())
        segment.entries.append((seq, segment.size, len(line)))
        segment.open.add(seq)
        segment.size += len(line)
        self._where[seq] = segment
        if self.max_bytes is not None:
            self._shrink(self.max_bytes)

    def _shrink(self, limit: int) -> None:
        while self.size > limit and len(self._segments) > 1:
            oldest = self._segments[0]
            self.dropped += len(oldest.open)
            for seq in oldest.open:
                self._where.pop(seq, None)
                self.in_flight.discard(seq)
            self._remove(oldest)

    def _remove(self, segment: _Segment) -> None:
        index = self._segments.index(segment)
        if index == len(self._segments) - 1 and self._handle is not None:
            self._handle.close()
            self._handle = None
        del self._segments[index]
        at, entry = self._cursor
        if at > index:
            self._cursor = (at - 1, entry)
        elif at == index:
            self._cursor = (index, 0)
        try:
            os.unlink(segment.path)
        except FileNotFoundError:
            pass

    def acknowledge(self, seq: int) -> bool:
        segment = self._where.pop(seq, None)
        self.in_flight.discard(seq)
        if segment is None:
            return False
        segment.open.discard(seq)
        # The newest segment is still being written to unless it is empty of waiting messages and has grown.
        if not segment.open and (segment is not self._segments[-1] or segment.size >= 4096):
            self._remove(segment)
        return True

    def rewind(self) -> None:
        """A new connection: everything unacknowledged is to be sent again."""
        self._cursor = (0, 0)
        self.in_flight.clear()

    def next(self) -> tuple[int, str] | None:
        """The next message to send, in order, as (seq, text); None when all were sent."""
        at, entry = self._cursor
        while at < len(self._segments):
            segment = self._segments[at]
            while entry < len(segment.entries):
                seq, offset, length = segment.entries[entry]
                entry += 1
                if seq not in segment.open:
                    continue
                self._cursor = (at, entry)
                with open(segment.path, "rb") as handle:
                    handle.seek(offset)
                    text = handle.read(length).decode("utf-8").rstrip("\n")
                self.in_flight.add(seq)
                return seq, text
            if at == len(self._segments) - 1:
                break
            at, entry = at + 1, 0
        self._cursor = (at, entry)
        return None

    def messages(self) -> Iterator[dict[str, Any]]:
        """Every waiting message, oldest first (used once, at start)."""
        for segment in list(self._segments):
            with open(segment.path, "rb") as handle:
                for seq, offset, length in segment.entries:
                    if seq in segment.open:
                        handle.seek(offset)
                        yield json.loads(handle.read(length).decode("utf-8"))

    def close(self) -> None:
        if self._handle is not None:
            self._handle.close()
            self._handle = None


class Outbox:
    """Both lanes and the number sequence. Not thread-safe: the agent's event loop alone touches it."""

    WINDOW = 64
    RESEND_SECONDS = 60.0

    def __init__(self, folder: str, max_sample_bytes: int = 64 * 1024 * 1024) -> None:
        self.folder = folder
        os.makedirs(folder, mode=0o700, exist_ok=True)
        self.vital = Lane(os.path.join(folder, "vital"), sync=True)
        self.samples = Lane(os.path.join(folder, "samples"), max_bytes=max_sample_bytes)
        self._seq_file = os.path.join(folder, "seq")
        known = 0
        try:
            with open(self._seq_file) as handle:
                known = int(handle.read().strip() or 0)
        except (OSError, ValueError):
            known = 0
        self._seq = max(known, self.vital.last_seq, self.samples.last_seq) or int(time.time() * 1000)
        self._reserved = self._seq
        self._acked_at = time.monotonic()
        self.on_message: list[Callable[[], None]] = []  # called after each put: wakes the sender

    def _next_seq(self) -> int:
        self._seq += 1
        if self._seq > self._reserved:
            self._reserved = self._seq + RESERVE
            temporary = self._seq_file + ".new"
            with open(temporary, "w") as handle:
                handle.write(str(self._reserved))
                handle.flush()
                os.fsync(handle.fileno())
            os.replace(temporary, self._seq_file)
        return self._seq

    def put(self, message: dict[str, Any]) -> int:
        """Store ``message`` durably with its ``seq`` and wake the sender. Returns the number."""
        seq = self._next_seq()
        message = dict(message, seq=seq)
        line = (
            json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n"
        )
        lane = self.samples if message["t"] == "samples" else self.vital
        lane.append(seq, line)
        for wake in self.on_message:
            wake()
        return seq

    def acknowledge(self, seq: int) -> None:
        """The installation has message `seq` durably: it may be forgotten here."""
        self._acked_at = time.monotonic()
        if not self.vital.acknowledge(seq):
            self.samples.acknowledge(seq)

    def overdue(self) -> bool:
        """Whether what was sent has waited for any acknowledgement for a minute: time to send it again."""
        waiting = self.vital.in_flight or self.samples.in_flight
        return bool(waiting) and time.monotonic() - self._acked_at > self.RESEND_SECONDS

    def rewind(self) -> None:
        """Send everything that is not acknowledged again, in order."""
        self._acked_at = time.monotonic()
        self.vital.rewind()
        self.samples.rewind()

    def next(self) -> str | None:
        """The next message to send within the window of unacknowledged ones: vital before samples."""
        for lane in (self.vital, self.samples):
            if len(lane.in_flight) < self.WINDOW:
                found = lane.next()
                if found is not None:
                    return found[1]
        return None

    def close(self) -> None:
        self.vital.close()
        self.samples.close()
