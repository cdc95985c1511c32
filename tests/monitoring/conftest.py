"""Fixtures of monitoring: caches forgotten between tests, raw samples emptied where a test commits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connection

from monitoring.selectors.identity import identity_forget
from monitoring.services import ingest, intake


@pytest.fixture(autouse=True)
def forget() -> None:
    identity_forget()
    ingest._known_days.clear()
    intake._told.clear()


@pytest.fixture
def committed(transactional_db: Any) -> Iterator[None]:
    """For tests whose rows are really committed: the unmanaged table of samples is emptied after them."""
    yield
    with connection.cursor() as cursor:
        cursor.execute("TRUNCATE monitoring_gpusample")
