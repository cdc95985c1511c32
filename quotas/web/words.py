"""How numbers, amounts and times read inside sentences that Python makes (templates use the ``ui``
filters).
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from decimal import ROUND_HALF_UP, Decimal

from django.conf import settings
from django.utils import timezone, translation
from django.utils.translation import gettext as _
from django.utils.translation import ngettext, pgettext

from portal.kernel.clock import now
from portal.kernel.units import gpus_from_milli, money_from_micro

NBSP = "\u00a0"
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
SYMBOLS = {"CNY": "¥", "USD": "$", "EUR": "€", "GBP": "£", "JPY": "¥"}


def number(value: Decimal | int, places: int | None = None) -> str:
    """``1,234.5``: thousands by comma, no trailing zeros unless ``places`` fixes them."""
    exact = Decimal(value)
    if places is not None:
        return f"{exact.quantize(Decimal(1).scaleb(-places), rounding=ROUND_HALF_UP):,.{places}f}"
    text = f"{exact:,f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def gpus(milli: int | None) -> str:
    """``3.5``; None is unlimited."""
    return "∞" if milli is None else number(gpus_from_milli(milli))


def gpu_count(milli: int) -> str:
    """``3 GPUs``."""
    return ngettext("%(n)s GPU", "%(n)s GPUs", 1 if milli == 1000 else 2) % {"n": gpus(milli)}


def money(micro: int | None) -> str:
    """``¥1,234.50``; no price gives a dash."""
    if micro is None:
        return "–"
    code = settings.GPUPOOL_CURRENCY
    return f"{SYMBOLS.get(code, code + NBSP)}{number(money_from_micro(micro), 2)}"


def hours(seconds: int | None) -> str:
    """``24 h``; below an hour in minutes; None has no end."""
    if seconds is None:
        return _("no end")
    if seconds < 3600:
        return f"{number(Decimal(seconds) / 60, 0)}{NBSP}{_('min')}"
    return f"{number((Decimal(seconds) / 3600).quantize(Decimal('0.01')).normalize())}{NBSP}{_('h')}"


def when(moment: datetime | None) -> str:
    """``16 Jun 14:03`` / ``6月16日 14:03`` in the reader's zone, with the year unless it is this one."""
    if moment is None:
        return ""
    local = timezone.localtime(moment)
    same_year = local.year == timezone.localtime(now()).year
    if (translation.get_language() or "").startswith("zh"):
        day = f"{local.month}月{local.day}日"
        return f"{day if same_year else f'{local.year}年{day}'} {local:%H:%M}"
    day = f"{local.day} {MONTHS[local.month - 1]}"
    return f"{day if same_year else f'{day} {local.year}'} {local:%H:%M}".replace(" ", NBSP)


def weekdays() -> list[tuple[str, str]]:
    """("0", "Mon") to ("6", "Sun")."""
    names = [
        pgettext("weekday", "Mon"),
        pgettext("weekday", "Tue"),
        pgettext("weekday", "Wed"),
        pgettext("weekday", "Thu"),
        pgettext("weekday", "Fri"),
        pgettext("weekday", "Sat"),
        pgettext("weekday", "Sun"),
    ]
    return [(str(number), name) for number, name in enumerate(names)]


def days_text(days: Iterable[int]) -> str:
    """``Mon – Fri`` or ``Mon, Wed``."""
    names = [name for _number, name in weekdays()]
    chosen = sorted(set(days))
    if len(chosen) > 2 and chosen == list(range(chosen[0], chosen[-1] + 1)):
        return f"{names[chosen[0]]} – {names[chosen[-1]]}"
    return pgettext("list", ", ").join(names[day] for day in chosen)


def end_word(code: str) -> str:
    """Why it ended."""
    words = {
        "expired": _("its time was over"),
        "released": _("released early"),
        "completed": _("the work finished"),
        "finished": _("the work finished"),
        "failed": _("the work failed"),
        "failed_start": _("it could not be started"),
        "start_failed": _("it could not be started"),
        "idle": _("reclaimed: idle"),
        "revoked": _("revoked by an administrator"),
        "preempted": _("preempted"),
        "node_lost": _("its node was lost"),
        "suspended": _("the person was suspended"),
        "withdrawn": _("withdrawn"),
        "rejected": _("rejected"),
        "reclaimed": _("reclaimed"),
        "dependency_failed": _("what it waited for did not end well"),
        "scaled_down": _("not needed at this time"),
        "review_passed": _("its review date passed"),
        "moving": _("goes on until another replica stands on another node"),
        "maintenance": _("its node was taken out of service"),
        "over_quota": _("taken back: its department is over its quota"),
        "window_missed": _("its window passed before it could start"),
        "skipped": _("left out"),
    }
    return words.get(code, code.replace("_", " "))
