"""The words of a notice, made when it is read: reader's language, reader's zone."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from typing import Any

from django.conf import settings
from django.utils import timezone, translation
from django.utils.dateparse import parse_datetime
from django.utils.translation import gettext

from portal.accounts.middleware import zone_of
from portal.notify.kinds import Kind, kind_of
from portal.notify.models import Notification

NBSP = "\u00a0"
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


@dataclass(frozen=True)
class Words:
    """A notice as text."""

    title: str
    body: str
    action: str
    kind: Kind


class _Params(dict[str, Any]):
    def __missing__(self, key: str) -> str:
        return "–"


def encode(value: Any) -> Any:
    """A param ready for JSON; an instant stays one (`{"$time": …}`) so that each reader gets his zone."""
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise ValueError("a naive time has no place in a notice")
        return {"$time": value.isoformat()}
    if isinstance(value, dict):
        return {str(k): encode(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [encode(v) for v in value]
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, Decimal | uuid.UUID | date):
        return str(value)
    return str(value)


def moment_text(value: datetime) -> str:
    """`16 Jun 14:03 (UTC+8)` / `6月16日 14:03 (UTC+8)` in the active zone, with the year unless it is this one."""
    local = timezone.localtime(value)
    this_year = timezone.localtime().year == local.year
    if (translation.get_language() or "").startswith("zh"):
        day = f"{local.month}月{local.day}日" if this_year else f"{local.year}年{local.month}月{local.day}日"
    else:
        day = f"{local.day} {_MONTHS[local.month - 1]}" + ("" if this_year else f" {local.year}")
    minutes = int((local.utcoffset() or local - local).total_seconds()) // 60
    sign = "−" if minutes < 0 else "+"
    hours, rest = divmod(abs(minutes), 60)
    offset = "UTC" + (f"{sign}{hours}" + (f":{rest:02d}" if rest else "") if minutes else "")
    return f"{day} {local:%H:%M} ({offset})".replace(" ", NBSP)


def _decoded(value: Any) -> Any:
    if isinstance(value, dict) and set(value) == {"$time"}:
        moment = parse_datetime(value["$time"])
        return moment_text(moment) if moment is not None else "–"
    if isinstance(value, list):
        return ", ".join(str(_decoded(v)) for v in value)
    if value is None:
        return "–"
    return value


def words_of(notice: Notification) -> Words:
    """Title, body and button of a notice in the active language and zone; never fails on odd params."""
    kind = kind_of(notice.kind)
    params = dict(notice.params)
    if kind.prepare is not None:
        params = kind.prepare(params)
    shown = _Params({k: _decoded(v) for k, v in params.items()})
    return Words(_filled(kind.title, shown), _filled(kind.body, shown), str(kind.action), kind)


def _filled(text: Any, params: _Params) -> str:
    plain = str(text)
    try:
        return plain % params
    except (TypeError, ValueError):
        return plain


@contextmanager
def reading_as(user: Any) -> Iterator[None]:
    """The language and zone of a person, for messages made outside of a request."""
    with translation.override(user.language or settings.LANGUAGE_CODE), timezone.override(zone_of(user)):
        yield


def absolute(url: str) -> str:
    """A path inside the portal as a full address (with the installation's path prefix once)."""
    if not url:
        return ""
    base = settings.GPUPOOL_BASE_URL
    prefix = settings.FORCE_SCRIPT_NAME or ""
    path = url[len(prefix) :] if prefix and url.startswith(prefix + "/") else url
    return f"{base}{path}"


def subject_line(words: Words, more: int = 0) -> str:
    """One line for a mail; `more` others of the same kind go with it."""
    line = " ".join(words.title.replace(NBSP, " ").split())[:180]
    return gettext("%(line)s, and %(n)s more") % {"line": line, "n": more} if more else line
