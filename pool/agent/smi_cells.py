"""One cell of ``nvidia-smi``, in CSV or XML: a number or a coded reason (pitfalls P26, P20).

Units stand behind the number or in the header, and are the tool's own: MiB, %, C, W, MHz, KB/s. Names are never read
for digits (pitfall P27): a cell that is no number with at most a unit is not one.
"""

from __future__ import annotations

import re

_NUMBER = re.compile(r"(-?\d+(?:\.\d+)?)\s*(?:MiB|%|C|W|MHz|KB/s|MB/s|x|mV|us)?\Z")
_NULLS = {
    "": "not_supported",
    "n/a": "not_supported",
    "none": "not_supported",
    "not supported": "not_supported",
    "not found": "not_supported",
    "requested functionality has been deprecated": "not_supported",
    "unknown error": "error",
    "err!": "error",
    "gpu is lost": "gpu_lost",
    "gpu requires reset": "reset_required",
    "insufficient permissions": "not_permitted",
}


def reason(text: str | None) -> str | None:
    """The reason that a null spelling stands for; None for any other text."""
    return _NULLS.get((text or "").strip().strip("[]").strip().lower())


def number(text: str | None) -> tuple[float | None, str]:
    """(number, "") or (None, reason) of one cell; a missing cell is ``not_supported``."""
    why = reason(text)
    if why is not None:
        return None, why
    found = _NUMBER.match((text or "").strip())
    return (float(found.group(1)), "") if found else (None, "not_a_number")


def present(text: str | None) -> str | None:
    """The cell as a name; None for a null spelling."""
    return None if reason(text) is not None else (text or "").strip()


def yes(text: str | None) -> int | None:
    """1 or 0 of a yes-or-no cell; None for anything else."""
    word = (text or "").strip().strip("[]").lower()
    return {"yes": 1, "enabled": 1, "no": 0, "disabled": 0}.get(word)
