"""Public identifiers: UUID version 7 (RFC 9562), ordered by creation time, made in Python so that
PostgreSQL 15 to 18 behave alike."""

from __future__ import annotations

import os
import time
import uuid


def uuid7() -> uuid.UUID:
    """A new UUIDv7: 48 bits of Unix milliseconds, then 74 random bits around the version and variant."""
    value = (time.time_ns() // 1_000_000) << 80
    value |= int.from_bytes(os.urandom(10), "big")
    value &= ~(0xF << 76)
    value |= 0x7 << 76
    value &= ~(0x3 << 62)
    value |= 0x2 << 62
    return uuid.UUID(int=value)
