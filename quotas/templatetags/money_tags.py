"""Template filters of the finance pages: exact money, signed money, months."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date, datetime
from decimal import Decimal
from typing import Any

from django import template
from django.conf import settings
from django.urls import NoReverseMatch, reverse
from django.utils.http import urlencode

from portal.kernel.units import MS_PER_HOUR
from quotas.selectors.billing_time import billing_zone
from quotas.selectors.money import PARAMS
from quotas.selectors.month_words import month_name

register = template.Library()
MINUS, DASH = "\u2212", "\u2013"
SYMBOLS = {"CNY": "¥", "USD": "$", "EUR": "€", "GBP": "£", "JPY": "¥", "HKD": "HK$"}


def exact(micro: int, places: int = 2) -> str:
    """Money to the last micro unit, at least so many decimals: `51.234567`, `128.00`."""
    whole, rest = divmod(abs(micro), 1_000_000)
    decimals = f"{rest:06d}".rstrip("0").ljust(places, "0")
    return f"{MINUS if micro < 0 else ''}{whole:,}.{decimals}"


@register.filter
def money_exact(micro: int | None, places: int = 2) -> str:
    """``{{ line.amount_micro|money_exact:6 }}``: every digit, so that lines add up by hand; no symbol. In columns all
    six, one below the other.
    """
    return DASH if micro is None else exact(micro, places)


@register.filter
def money_signed(micro: int | None) -> str:
    """``+¥1.50`` or ``−¥1.50``: a change, two decimals."""
    if micro is None:
        return DASH
    code = settings.GPUPOOL_CURRENCY
    amount = abs(Decimal(micro)) / 1_000_000
    sign = "" if f"{amount:.2f}" == "0.00" else "+" if micro > 0 else MINUS
    return f"{sign}{SYMBOLS.get(code, code + chr(160))}{amount:,.2f}"


@register.filter
def hours_exact(gpu_ms: int | None, places: int = 3) -> str:
    """GPU-hours of one line to six decimals, at least so many; the file for machines has the milliseconds."""
    if gpu_ms is None:
        return DASH
    value = (Decimal(abs(gpu_ms)) / MS_PER_HOUR).quantize(Decimal("0.000001"))
    text = f"{value:,f}"
    whole, _, rest = text.partition(".")
    return f"{MINUS if gpu_ms < 0 else ''}{whole}.{rest.rstrip('0').ljust(places, '0')}"


@register.filter
def percent_signed(value: float | None, places: int = 1) -> str:
    """``+7.2 %``; a dash where there is nothing to compare with."""
    if value is None:
        return DASH
    text = f"{abs(value):,.{places}f}"
    sign = "" if not text.strip("0.,") else "+" if value > 0 else MINUS
    return f"{sign}{text}\u00a0%"


@register.filter
def rate(micro: int | None) -> str:
    """A price per GPU-hour: ``16.00``, ``0.125``."""
    return DASH if micro is None else exact(micro)


register.filter(month_name)


@register.filter
def billing_time(moment: datetime) -> str:
    """``2026-09-16 00:00`` in the billing zone, where ledger lines are cut; dense lists say the zone once."""
    return f"{moment.astimezone(billing_zone()):%Y-%m-%d %H:%M}"


@register.filter
def share_of(part: int | None, whole: int | None) -> float:
    """Percent of a whole for a meter; 0 where there is none."""
    return round(100 * (part or 0) / whole, 1) if whole else 0.0


@register.filter
def leaf_name(path: str) -> str:
    """The last name of a department's path; the rest stands in the title."""
    return path.rpartition(" / ")[2]


@register.filter
def make_list_of_words(text: str) -> list[str]:
    """``"a b"|make_list_of_words`` → the words, to loop over in a template."""
    return text.split()


@register.filter
def get_item(mapping: Mapping[str, Any], key: str) -> Any:
    """``{{ request.GET|get_item:name }}``: a value by a key held in a variable."""
    return mapping.get(key, "")


@register.simple_tag(takes_context=True)
def query_with(context: template.Context, params: Mapping[str, str], **changes: object) -> str:
    """``href="{% query_with group.params by='user' %}"``: this page's query string with these parameters; None and
    the page number are taken off."""
    request = context.get("request")
    found: dict[str, Any] = dict(request.GET.lists()) if request is not None else {}
    for key, value in {"page": None, **params, **changes}.items():
        if value is None:
            found.pop(key, None)
        else:
            found[key] = str(value)
    text = urlencode(found, doseq=True)
    return f"?{text}" if text else "?"


@register.simple_tag(takes_context=True)
def export_query(context: template.Context, month: date | None = None) -> str:
    """The page's filter of lines, for the page of large files; `month` where the page shows one by itself."""
    request = context.get("request")
    found = {name: request.GET[name] for name in sorted(PARAMS) if request and request.GET.get(name)}
    if month:
        found["month"] = f"{month:%Y-%m}"
    return f"?{urlencode(found)}" if found else ""


@register.simple_tag
def url_if(name: str, *args: object) -> str:
    """The address of a page of another part, or ``#`` where it is not mounted."""
    try:
        return reverse(name, args=args)
    except NoReverseMatch:
        return "#"
