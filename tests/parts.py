"""What a test needs of the machine: where it is missing the test is skipped, and in CI it fails."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest

IN_CI = os.environ.get("CI", "").lower() in ("1", "true", "yes")


def missing(what: str) -> NoReturn:
    """End the running test for want of `what` (a sentence). In CI a missing part is a failure."""
    if IN_CI:
        pytest.fail(f"missing here: {what}")
    pytest.skip(what)
