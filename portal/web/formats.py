"""How figures, amounts and times read for people. Pure: value in, text out.

Numbers group thousands with a comma in both languages and keep their unit with a no-break space.
Stored units: ``milli_gpu`` (1000 = one GPU), ``gpu_ms`` (GPU-milliseconds), ``micro`` (1e-6 of the
currency), bytes as MiB, times as aware UTC.
"""

from __future__ import annotations

import datetime as dt
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

from django.conf import settings
from django.utils import timezone, translation
from django.utils.translation import gettext, ngettext

from portal.kernel import clock

NBSP = "\u00a0"
MINUS = "\u2212"
INFINITY = "\u221e"
DASH = "\u2013"
GPU_MS_PER_HOUR = 3_600_000
SYMBOLS = {"CNY": "¥", "USD": "$", "EUR": "€", "GBP": "£", "JPY": "¥", "HKD": "HK$"}
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
WEEKDAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
ZH_WEEKDAYS = "一二三四五六日"


def is_chinese() -> bool:
    """True while the active language is a Chinese one."""
    return (translation.get_language() or "").startswith("zh")


def comma() -> str:
    """What stands between two words of a list: full-width in Chinese."""
    return "，" if is_chinese() else ", "


def number(value: Any, places: int | None = None) -> str:
    """``1234.5`` → ``1,234.5``. ``places`` fixes the decimals; without it an integer stays one and
    trailing zeros go. A negative takes a real minus sign."""
    d = value if isinstance(value, Decimal) else Decimal(str(value))
    if places is not None:
        d = d.quantize(Decimal(1).scaleb(-places), rounding=ROUND_HALF_UP)
        text = f"{abs(d):,.{places}f}"
    else:
        text = f"{abs(d):,f}"
        if "." in text:
            text = text.rstrip("0").rstrip(".")
    return f"{MINUS}{text}" if d < 0 and text.strip("0.,") else text


def figure(value: Any, unit: str = "", places: int | None = None) -> str:
    """A number with its unit, held together: ``93 %``, ``412 W``."""
    text = number(value, places)
    return f"{text}{NBSP}{unit}" if unit else text


def milli_gpu(value: int) -> str:
    """Milli-GPU as GPUs: ``8000`` → ``8``, ``500`` → ``0.5``."""
    return number(Decimal(value) / 1000)


def gpu_hours(value: int, places: int = 1) -> str:
    """GPU-milliseconds as GPU-hours: ``3600000`` → ``1.0``. The unit is ``hours_unit()``."""
    return number(Decimal(value) / GPU_MS_PER_HOUR, places)


def hours_unit() -> str:
    """The unit of GPU-hours in the reader's language."""
    return gettext("GPU·h")


def money(micro: int, currency: str = "", places: int = 2) -> str:
    """Micro units of currency as money: ``1500000`` → ``¥1.50``; the currency of the installation
    unless another is named."""
    code = currency or str(getattr(settings, "GPUPOOL_CURRENCY", "CNY"))
    text = number(abs(Decimal(micro)) / 1_000_000, places)
    symbol = SYMBOLS.get(code, f"{code}{NBSP}")
    sign = MINUS if micro < 0 and text.strip("0.,") else ""
    return f"{sign}{symbol}{text}"


def gib(mib: int, places: int = 1) -> str:
    """MiB as GiB: ``81559`` → ``79.6``."""
    return number(Decimal(mib) / 1024, places)


def in_zone(when: dt.datetime) -> dt.datetime:
    """The moment in the reader's time zone (the active one); a naive time is refused."""
    if timezone.is_naive(when):
        raise ValueError("naive datetime")
    return timezone.localtime(when)


def date(when: dt.datetime | dt.date, now: dt.datetime | None = None) -> str:
    """``16 Jun`` / ``6月16日``; with the year only when it is not the current one."""
    day = in_zone(when).date() if isinstance(when, dt.datetime) else when
    return _day(day, in_zone(now or clock.now()).year)


def _day(day: dt.date, this_year: int) -> str:
    if is_chinese():
        text = f"{day.month}月{day.day}日"
        return text if day.year == this_year else f"{day.year}年{text}"
    text = f"{day.day}{NBSP}{MONTHS[day.month - 1]}"
    return text if day.year == this_year else f"{text}{NBSP}{day.year}"


def _long_day(day: dt.datetime) -> str:
    if is_chinese():
        return f"{day.year}年{day.month}月{day.day}日 星期{ZH_WEEKDAYS[day.weekday()]}"
    return f"{day:%A} {day.day} {day:%B} {day.year}"  # the process runs in the C locale: English


def weekday(when: dt.datetime | dt.date) -> str:
    """``Tue`` / ``周二``."""
    day = in_zone(when) if isinstance(when, dt.datetime) else when
    return f"周{ZH_WEEKDAYS[day.weekday()]}" if is_chinese() else WEEKDAYS[day.weekday()]


def moment(when: dt.datetime, style: str = "", now: dt.datetime | None = None) -> str:
    """A time in the reader's zone. Styles: "" ``16 Jun 14:03``, "seconds" ``16 Jun 14:03:12``,
    "time" ``14:03``, "clock" ``14:03:12``, "date" ``16 Jun``, "day" ``Tue 16 Jun``,
    "long" ``Tuesday 16 June 2026``, "full" ``16 Jun 14:03 (UTC+8)``."""
    return local_moment(in_zone(when), style, now or clock.now())


def local_moment(local: dt.datetime, style: str, now: dt.datetime) -> str:
    """`moment` of a time that is in the reader's zone already."""
    if style == "time":
        return f"{local.hour:02d}:{local.minute:02d}"
    if style == "clock":
        return f"{local.hour:02d}:{local.minute:02d}:{local.second:02d}"
    if style == "long":
        return _long_day(local)
    day = _day(local.date(), now.astimezone(local.tzinfo).year)
    if style == "date":
        return day
    if style == "day":
        return f"{weekday(local)}{NBSP}{day}"
    text = f"{day}{NBSP}{local.hour:02d}:{local.minute:02d}"
    if style == "seconds":
        return f"{text}:{local.second:02d}"
    return f"{text}{NBSP}({offset_of(local)})" if style == "full" else text


def offset(when: dt.datetime | None = None) -> str:
    """The active zone's distance from UTC at a moment: ``UTC+8``, ``UTC−3:30``."""
    return offset_of(in_zone(when or clock.now()))


def offset_of(local: dt.datetime) -> str:
    """`offset` of a time that is in the reader's zone already."""
    delta = local.utcoffset() or dt.timedelta()
    minutes = int(delta.total_seconds() // 60)
    sign = MINUS if minutes < 0 else "+"
    hours, rest = divmod(abs(minutes), 60)
    if not minutes:
        return "UTC"
    return f"UTC{sign}{hours}:{rest:02d}" if rest else f"UTC{sign}{hours}"


def duration(value: dt.timedelta | int | float) -> str:
    """A length of time by its two largest parts: ``3 d 3 h``, ``11 h 57 min``, ``2 min 5 s``."""
    seconds = int(value.total_seconds() if isinstance(value, dt.timedelta) else value)
    seconds = abs(seconds)
    days, rest = divmod(seconds, 86_400)
    hours, rest = divmod(rest, 3_600)
    minutes, secs = divmod(rest, 60)
    parts = [
        (days, gettext("%(n)s d")),
        (hours, gettext("%(n)s h")),
        (minutes, gettext("%(n)s min")),
        (secs, gettext("%(n)s s")),
    ]
    first = next((i for i, (n, _) in enumerate(parts) if n), 3)
    chosen = [parts[first]] + [p for p in parts[first + 1 : first + 2] if p[0]]
    return " ".join(text % {"n": number(n)} for n, text in chosen).replace(" ", NBSP)


def time_left(until: dt.datetime | None, now: dt.datetime | None = None) -> str:
    """``2 h 47 min left``; ``ended 3 min ago`` once it is over; ``no end`` for None."""
    if until is None:
        return gettext("no end")
    delta = until - (now or clock.now())
    if delta.total_seconds() >= 0:
        return gettext("%(time)s left") % {"time": duration(delta)}
    return gettext("ended %(time)s ago") % {"time": duration(delta)}


def remaining(until: dt.datetime | None, now: dt.datetime | None = None) -> str:
    """``2 h 47 min`` under a label that says what it is; ``none`` once it is over, ``no end`` for None."""
    if until is None:
        return gettext("no end")
    delta = until - (now or clock.now())
    return duration(delta) if delta.total_seconds() > 0 else gettext("none")


def time_ago(when: dt.datetime, now: dt.datetime | None = None) -> str:
    """``3 min ago``; seconds only below a minute."""
    passed = int(((now or clock.now()) - when).total_seconds())
    return gettext("%(time)s ago") % {"time": duration(passed - passed % 60 if passed >= 60 else passed)}


def count(n: int, one: str, many: str) -> str:
    """A count with its noun by the plural rule of the language; ``%(n)s`` is the number."""
    return ngettext(one, many, n) % {"n": number(n)}
