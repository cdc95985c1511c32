"""Outside systems for tests."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest

from pool.executors import base
from tests.pool.executors.memory import MemorySystem


@pytest.fixture
def memory() -> Iterator[MemorySystem]:
    """Clusters of kind Slurm are carried by an object in memory."""
    system = MemorySystem()
    with patch.dict(base._made, {"slurm": system}):
        yield system
