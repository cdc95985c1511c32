"""Timestamps of the database, as fast as they come and as exact as before."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from django.db import DataError, connection

from portal.kernel.timestamps import UtcLoader

pytestmark = pytest.mark.django_db


def read(text: str) -> object:
    with connection.cursor() as cursor:
        cursor.execute("SELECT %s::timestamptz", [text])
        return cursor.fetchone()[0]


def test_connections_use_the_loader() -> None:
    connection.ensure_connection()
    adapters = connection.connection.adapters
    assert adapters.get_loader(adapters.types["timestamptz"].oid, 0) is UtcLoader


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("2026-06-16 14:03:12.345678+08", datetime(2026, 6, 16, 6, 3, 12, 345678, UTC)),
        ("2026-06-16 14:03:12+05:30", datetime(2026, 6, 16, 8, 33, 12, 0, UTC)),
        ("2026-06-16 14:03:12.5Z", datetime(2026, 6, 16, 14, 3, 12, 500_000, UTC)),
        ("0001-01-01 00:00:00Z", datetime(1, 1, 1, tzinfo=UTC)),
        ("9999-12-31 23:59:59.999999Z", datetime(9999, 12, 31, 23, 59, 59, 999_999, UTC)),
    ],
)
def test_a_moment_comes_back_in_utc(text: str, moment: datetime) -> None:
    found = read(text)
    assert found == moment
    assert isinstance(found, datetime) and found.tzinfo is UTC


@pytest.mark.parametrize("text", ["infinity", "-infinity", "0044-03-15 12:00:00+00 BC", "20000-01-01 00:00Z"])
def test_what_no_datetime_can_hold_is_an_error(text: str) -> None:
    with pytest.raises(DataError):
        read(text)


def test_sessions_in_another_zone_are_read_by_their_offset() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL TIME ZONE 'Asia/Kolkata'")
        cursor.execute("SELECT '2026-06-16 14:03:12Z'::timestamptz")
        assert cursor.fetchone()[0] == datetime(2026, 6, 16, 14, 3, 12, tzinfo=UTC)
