"""Small JSON files that are either the old or the new content, never half."""

from __future__ import annotations

import json
import os
from typing import Any


def write_json(path: str, value: Any, mode: int = 0o600, sync: bool = True) -> None:
    """Replace ``path`` atomically; durably too unless ``sync`` is off (for what can be found out again)."""
    temporary = f"{path}.{os.getpid()}.new"
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        os.write(handle, json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
        if sync:
            os.fsync(handle)
    finally:
        os.close(handle)
    os.replace(temporary, path)


def read_json(path: str) -> Any:
    """The content, or None when the file is missing or not JSON."""
    try:
        with open(path, encoding="utf-8") as handle:
            return json.load(handle)
    except (OSError, ValueError):
        return None
