"""How a token value is stored."""

from __future__ import annotations

import hashlib


def token_hash(value: str) -> str:
    """SHA-256 of the value in hex. The value has 256 random bits, so no salt is needed."""
    return hashlib.sha256(value.encode()).hexdigest()
