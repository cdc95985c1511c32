"""Shared by all tests: nothing is kept from one test to the next. Their settings are in tests/settings.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def quickly_emptied() -> None:
    """Tests that commit leave an empty database behind them: see tests/emptying.py."""
    from tests import emptying

    emptying.install()


@pytest.fixture(autouse=True)
def nothing_kept(request: pytest.FixtureRequest) -> Iterator[None]:
    """Forget what pages keep for some seconds (tests without a database have nothing there), and the language and
    time zone that a person's request leaves active in its thread."""
    from django.conf import settings
    from django.utils import timezone, translation

    if request.node.get_closest_marker("django_db") is not None:
        from django.core.cache import cache

        cache.clear()
    yield
    translation.activate(settings.LANGUAGE_CODE)
    timezone.deactivate()
