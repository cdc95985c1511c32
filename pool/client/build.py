"""Makes the one file of `gpupool`: this package and the parts of the agent that it shares, the same bytes for the same
source."""

from __future__ import annotations

import os

from pool.agent.build import zipped

MAIN = "import sys\n\nfrom pool.client.cli import main\n\nsys.exit(main())\n"
SHARED = ("__init__.py", "archive.py", "channel.py", "files.py", "ws.py")
# Parts that run on the installation's side only.
LEFT_OUT = {"build.py"}


def members() -> dict[str, bytes]:
    """Name → content of every file inside."""
    here = os.path.dirname(os.path.abspath(__file__))
    agent = os.path.join(os.path.dirname(here), "agent")
    result = {"__main__.py": MAIN.encode(), "pool/__init__.py": b""}
    for folder, names in (("client", sorted(os.listdir(here))), ("agent", SHARED)):
        for name in names:
            if name.endswith(".py") and not (folder == "client" and name in LEFT_OUT):
                with open(os.path.join(here if folder == "client" else agent, name), "rb") as handle:
                    result[f"pool/{folder}/{name}"] = handle.read()
    return result


def build() -> bytes:
    """The zipapp's bytes."""
    return zipped(members())
