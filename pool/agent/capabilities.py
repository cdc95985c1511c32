"""What this node can do beyond running a command, and what it lacks for the rest: shown on its page."""

from __future__ import annotations

import os
import shutil
from typing import Any

from pool.agent import containers, mps


def found() -> dict[str, dict[str, Any]]:
    """{what: {ok, reason}}: ``fractions`` limited by MPS, ``containers``, ``mig`` layouts, ``accounts`` of people,
    ``holds`` that open a device to one person."""
    root = os.geteuid() == 0
    tool = shutil.which("nvidia-smi") is not None
    return {
        "fractions": mps.capability(),
        "containers": containers.capability(),
        "mig": {
            "ok": root and tool,
            "reason": None if root and tool else "not_root" if tool else "no_nvidia_smi",
        },
        "accounts": {"ok": root, "reason": None if root else "not_root"},
        "holds": {"ok": root, "reason": None if root else "not_root"},
    }
