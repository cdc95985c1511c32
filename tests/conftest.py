"""Shared by all tests: nothing is kept from one test to the next. Their settings are in tests/settings.py."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A machine that stands still for seconds is no fault of a property: neither deadlines nor the pace of drawing count.
# In CI the cases are the same in each run, as Hypothesis' own profile for it has them: what a change broke is told from
# what was never tried. Everywhere else they are new ones each time.
settings.register_profile(
    "patient",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=os.environ.get("CI", "").lower() in ("1", "true", "yes"),
    print_blob=True,
)
settings.load_profile("patient")

# Where tests with a mark lie: tests/run.py looks for them nowhere else.
FOLDER_OF_MARK = {"browser": "browser", "up": "up", "kubernetes": "pool/executors"}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that no step would run is an error."""
    here = Path(__file__).parent
    for item in items:
        for mark, folder in FOLDER_OF_MARK.items():
            if item.get_closest_marker(mark) and here / folder not in item.path.parents:
                raise pytest.UsageError(f"{item.nodeid} is marked {mark}; such tests lie in tests/{folder}")


@pytest.fixture(autouse=True, scope="session")
def quickly_emptied() -> None:
    """Tests that commit leave an empty database behind them: see tests/emptying.py."""
    from tests import emptying

    emptying.install()


@pytest.fixture(autouse=True)
def nothing_kept(request: pytest.FixtureRequest) -> Iterator[None]:
    """Forget what pages keep for some seconds (tests without a database have nothing there), and the language and
    time zone that a person's request leaves active in its thread."""
    from django.conf import settings as django_settings
    from django.utils import timezone, translation

    if request.node.get_closest_marker("django_db") is not None:
        from django.core.cache import cache

        cache.clear()
    yield
    translation.activate(django_settings.LANGUAGE_CODE)
    timezone.deactivate()
