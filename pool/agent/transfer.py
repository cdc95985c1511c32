"""The project folder that a person sent with a request: fetched from the installation, unpacked once.

The shim's child fetches it before it becomes the job's account (the node's token is not the job's to read), and unpacks
it afterwards, as that account. A mark beside the jobs remembers which upload a work folder has: work that comes back in
line keeps what it wrote there. The mark's time tells later which files the job made or changed.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
import urllib.error
import urllib.request
from typing import Any, BinaryIO

from pool.agent import archive, files
from pool.agent.ws import tls_context

SECONDS = 120
PIECE = 256 * 1024


class Upload:
    """Bytes that are here already and wait to be unpacked into the current folder."""

    def __init__(self, source: BinaryIO | None, mark: int, digest: str) -> None:
        self.source = source
        self.mark = mark
        self.digest = digest

    def unpack(self) -> None:
        """Unpack and mark; what was there is replaced. Does nothing where this very upload is there already."""
        if self.source is not None:
            root = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
            archive.unpack(self.source, root, archive.Limits())
            os.close(root)
            os.pwrite(self.mark, self.digest.encode(), 0)
            time.sleep(0.01)  # the kernel stamps files in ticks: what the job writes is later than the mark
        os.close(self.mark)


def mark_path(jobs_folder: str, name: str) -> str:
    """The mark of a work folder, beside the jobs' folders."""
    return os.path.join(os.path.dirname(os.path.abspath(jobs_folder)), "marks", name)


def marked_at(path: str) -> int:
    """When the upload was unpacked, in nanoseconds; 0 where there was none."""
    try:
        return os.stat(path).st_mtime_ns if os.path.getsize(path) else 0
    except OSError:
        return 0


def fetch(order: dict[str, Any], folder: str) -> Upload:
    """Get the bytes (``order``: url, state, sha256, size, mark) unless the work folder has them."""
    path = str(order["mark"])
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    mark = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    digest = str(order["sha256"])
    if os.read(mark, 100).decode("ascii", "replace") == digest:
        return Upload(None, mark, digest)
    settings = files.read_json(os.path.join(str(order["state"]), "agent.json")) or {}
    handle = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - unpacked later, after the account's change
    _download(settings, str(order["url"]), handle, int(order["size"]), digest)
    return Upload(handle, mark, digest)


def _download(settings: dict[str, Any], path: str, out: Any, size: int, digest: str) -> None:
    """Into ``out``; raises where the bytes are not those that were promised."""
    base = str(settings.get("url") or "").rstrip("/")
    request = urllib.request.Request(
        base + path, headers={"Authorization": f"Bearer {settings.get('token')}"}
    )
    context = tls_context(settings.get("ca_file")) if base.startswith("https:") else None
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}),
        *([urllib.request.HTTPSHandler(context=context)] if context is not None else []),
    )
    seen = hashlib.sha256()
    got = 0
    with opener.open(request, timeout=SECONDS) as answer:
        while True:
            data = answer.read(PIECE)
            if not data:
                break
            got += len(data)
            if got > size:
                break
            seen.update(data)
            out.write(data)
    if got != size or seen.hexdigest() != digest:
        raise OSError(5, f"the upload came with {got} bytes, {size} were promised")
    out.seek(0)
