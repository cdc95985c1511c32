"""The jobs' work folders on this node: how large one is, and which nobody uses any more."""

from __future__ import annotations

import os
from typing import Iterable

MIB = 1024 * 1024


def size_mib(path: str, enough: int | None = None) -> int:
    """MiB that a folder takes on the disk (blocks, links not followed, a file with several names once). Counting stops
    once it is more than ``enough``."""
    total = 0
    seen: set[tuple[int, int]] = set()
    todo = [path]
    while todo:
        try:
            found = list(os.scandir(todo.pop()))
        except OSError:
            continue
        for entry in found:
            try:
                state = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            if state.st_nlink > 1 and not entry.is_dir(follow_symlinks=False):
                if (state.st_dev, state.st_ino) in seen:
                    continue
                seen.add((state.st_dev, state.st_ino))
            total += state.st_blocks * 512
            if entry.is_dir(follow_symlinks=False):
                todo.append(entry.path)
        if enough is not None and total > (enough + 1) * MIB:
            break
    return -(-total // MIB)


def unused(root: str, used: set[str], before: float) -> Iterable[str]:
    """Names of work folders that no known job has and whose own folder did not change since ``before``."""
    try:
        entries = list(os.scandir(root))
    except OSError:
        return []
    return [
        entry.name
        for entry in entries
        if entry.name not in used
        and entry.is_dir(follow_symlinks=False)
        and entry.stat(follow_symlinks=False).st_mtime < before
    ]
