"""Figures, amounts and times as people read them."""

from __future__ import annotations

import datetime as dt
import zoneinfo
from decimal import Decimal

import pytest
from django.utils import timezone, translation

from portal.web import formats

NOW = dt.datetime(2026, 6, 16, 6, 3, 12, tzinfo=dt.UTC)
SHANGHAI = zoneinfo.ZoneInfo("Asia/Shanghai")


def plain(text: str) -> str:
    """No-break spaces as spaces, to read the expectation."""
    return text.replace(formats.NBSP, " ")


@pytest.mark.parametrize(
    ("value", "places", "text"),
    [
        (0, None, "0"),
        (1234567, None, "1,234,567"),
        (1234.5, None, "1,234.5"),
        (Decimal("12.400"), None, "12.4"),
        (100, None, "100"),
        (2.675, 2, "2.68"),
        (-3, None, "−3"),
        (-0.001, 2, "0.00"),
        (1e21, None, "1,000,000,000,000,000,000,000"),
    ],
)
def test_number(value: float, places: int | None, text: str) -> None:
    assert formats.number(value, places) == text


def test_a_unit_is_never_left_alone_on_a_line() -> None:
    assert formats.figure(93, "%") == "93\u00a0%"
    assert " " not in formats.duration(43_020)


@pytest.mark.parametrize(
    ("milli", "text"), [(8000, "8"), (500, "0.5"), (12430, "12.43"), (0, "0"), (-1000, "−1")]
)
def test_milli_gpu(milli: int, text: str) -> None:
    assert formats.milli_gpu(milli) == text


def test_gpu_hours_are_exact() -> None:
    assert formats.gpu_hours(297_600 * 3_600_000) == "297,600.0"
    assert formats.gpu_hours(1) == "0.0"
    assert formats.gpu_hours(3_600_000 // 2, 2) == "0.50"


def test_money() -> None:
    assert formats.money(2_981_781_630_000) == "¥2,981,781.63"
    assert formats.money(-1_500_000) == "−¥1.50"
    assert formats.money(-1) == "¥0.00"
    assert plain(formats.money(1_000_000, "CHF")) == "CHF 1.00"


@pytest.mark.parametrize(
    ("seconds", "english", "chinese"),
    [
        (0, "0 s", "0 秒"),
        (59, "59 s", "59 秒"),
        (60, "1 min", "1 分"),
        (125, "2 min 5 s", "2 分 5 秒"),
        (43_020, "11 h 57 min", "11 小时 57 分"),
        (3600, "1 h", "1 小时"),
        (86_400 * 3 + 3 * 3600 + 59, "3 d 3 h", "3 天 3 小时"),
    ],
)
def test_duration_by_its_two_largest_parts(seconds: int, english: str, chinese: str) -> None:
    with translation.override("en"):
        assert plain(formats.duration(seconds)) == english
    with translation.override("zh-hans"):
        assert plain(formats.duration(seconds)) == chinese


def test_time_left_and_over() -> None:
    with translation.override("en"):
        assert plain(formats.time_left(NOW + dt.timedelta(hours=2, minutes=47), NOW)) == "2 h 47 min left"
        assert plain(formats.time_left(NOW - dt.timedelta(minutes=3), NOW)) == "ended 3 min ago"
        assert formats.time_left(None, NOW) == "no end"


@pytest.mark.parametrize(
    ("style", "english", "chinese"),
    [
        ("", "16 Jun 14:03", "6月16日 14:03"),
        ("seconds", "16 Jun 14:03:12", "6月16日 14:03:12"),
        ("time", "14:03", "14:03"),
        ("date", "16 Jun", "6月16日"),
        ("day", "Tue 16 Jun", "周二 6月16日"),
        ("full", "16 Jun 14:03 (UTC+8)", "6月16日 14:03 (UTC+8)"),
    ],
)
def test_moment_in_the_readers_zone(style: str, english: str, chinese: str) -> None:
    with timezone.override(SHANGHAI):
        with translation.override("en"):
            assert plain(formats.moment(NOW, style, NOW)) == english
        with translation.override("zh-hans"):
            assert plain(formats.moment(NOW, style, NOW)) == chinese


def test_year_stands_only_when_it_is_another_one() -> None:
    last = dt.datetime(2025, 12, 31, 23, 0, tzinfo=dt.UTC)
    with timezone.override(SHANGHAI), translation.override("en"):
        assert plain(formats.date(last, NOW)) == "1 Jan"
    with timezone.override(dt.UTC), translation.override("en"):
        assert plain(formats.date(last, NOW)) == "31 Dec 2025"


def test_offset_of_odd_zones_and_summer_time() -> None:
    with timezone.override(zoneinfo.ZoneInfo("America/St_Johns")):
        assert formats.offset(NOW) == "UTC−2:30"
    with timezone.override(dt.UTC):
        assert formats.offset(NOW) == "UTC"


def test_a_naive_time_is_refused() -> None:
    with pytest.raises(ValueError, match="naive"):
        formats.moment(dt.datetime(2026, 6, 16))
