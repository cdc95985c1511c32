"""Reads a job's output file from where the last message ended: text in pieces of at most 32 KiB."""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterator

PIECE = 32 * 1024
PIECES_PER_CALL = 16


def whole_text(data: bytes, final: bool) -> tuple[int, str]:
    """(bytes used, text): a character cut at the end waits for its rest unless this is the end.

    Bytes that are not UTF-8 become U+FFFD; NUL, which PostgreSQL text cannot hold, does too.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(data, final)
    used = len(data) - len(decoder.getstate()[0])
    return used, text.replace("\0", "\ufffd")


class LogTail:
    """``offset`` counts bytes of the file; past ``limit`` bytes nothing more is sent (the file keeps it)."""

    def __init__(self, path: str, offset: int, limit: int) -> None:
        self.path = path
        self.offset = offset
        self.limit = limit
        self._handle: int = -1

    def read(self, final: bool = False) -> Iterator[tuple[int, int, str]]:
        """(offset, bytes, text) pieces since the last call, in order."""
        for _ in range(PIECES_PER_CALL if not final else self.limit // PIECE + 2):
            if self.offset >= self.limit:
                return
            if self._handle < 0:
                try:
                    self._handle = os.open(self.path, os.O_RDONLY)
                except OSError:
                    return
            data = os.pread(self._handle, min(PIECE, self.limit - self.offset), self.offset)
            if not data:
                return
            used, text = whole_text(data, final and len(data) < PIECE)
            if used == 0:
                return
            offset = self.offset
            self.offset += used
            if self.offset >= self.limit:
                text += "\n[output limit reached; the rest is in the node's file]\n"
            yield offset, used, text

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
