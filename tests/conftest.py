"""Shared by all tests: test settings before Django is imported, and nothing kept in Redis from one test to the next."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("GPUPOOL_ENV", "test")


@pytest.fixture(autouse=True)
def nothing_kept(request: pytest.FixtureRequest) -> Iterator[None]:
    """Forget what pages keep for some seconds; tests without a database have nothing there."""
    if request.node.get_closest_marker("django_db") is not None:
        from django.core.cache import cache

        cache.clear()
    yield
