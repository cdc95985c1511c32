"""Makes the one file that nodes run: this package and ``pynvml`` in a zipapp, the same bytes for the same
source."""

from __future__ import annotations

import importlib.util
import io
import os
import zipfile

SHEBANG = b"#!/usr/bin/env python3\n"
EPOCH = (2020, 1, 1, 0, 0, 0)
MAIN = "import sys\n\nfrom pool.agent.entry import main\n\nsys.exit(main())\n"
# Parts that run on the installation's side only.
LEFT_OUT = {"build.py"}


def _pynvml_source() -> bytes:
    found = importlib.util.find_spec("pynvml")
    if found is None or not found.origin:
        raise FileNotFoundError("pynvml (nvidia-ml-py) is not installed here")
    with open(found.origin, "rb") as handle:
        return handle.read()


def members() -> dict[str, bytes]:
    """Name → content of every file inside."""
    here = os.path.dirname(os.path.abspath(__file__))
    result = {"__main__.py": MAIN.encode(), "pool/__init__.py": b"", "pynvml.py": _pynvml_source()}
    for name in sorted(os.listdir(here)):
        if name.endswith(".py") and name not in LEFT_OUT and not name.startswith("sim"):
            with open(os.path.join(here, name), "rb") as handle:
                result[f"pool/agent/{name}"] = handle.read()
    return result


def build() -> bytes:
    """The zipapp's bytes."""
    return zipped(members())


def zipped(content: dict[str, bytes]) -> bytes:
    """Files as one program: a zip behind a line that says what runs it."""
    buffer = io.BytesIO()
    buffer.write(SHEBANG)
    with zipfile.ZipFile(buffer, "a", zipfile.ZIP_DEFLATED) as archive:
        for name, data in sorted(content.items()):
            info = zipfile.ZipInfo(name, EPOCH)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = 0o644 << 16
            archive.writestr(info, data)
    return buffer.getvalue()
