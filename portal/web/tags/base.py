"""The one register of the ``ui`` library and what its parts share."""

from __future__ import annotations

import zlib
from typing import Any

from django import template
from django.http import HttpRequest
from django.template import Context
from django.utils.html import format_html
from django.utils.safestring import SafeString, mark_safe

from portal.web import icons

register = template.Library()
EMPTY = mark_safe("")


def request_of(context: Context | dict[str, Any]) -> HttpRequest | None:
    """The request of a template context, if it has one."""
    request = context.get("request")
    return request if isinstance(request, HttpRequest) else None


def svg(context: Context | dict[str, Any], name: str, size: str = "") -> SafeString:
    """One icon, drawn for this page (see ``portal.web.icons``)."""
    return icons.render(name, size, request_of(context))


def attr(name: str, value: object) -> SafeString:
    """`` name="value"`` with a leading space, or nothing when the value is None, "" or False."""
    if value is None or value == "" or value is False:
        return EMPTY
    return format_html(' {}="{}"', mark_safe(name), value)


def slug_id(prefix: str, text: object) -> str:
    """An element id that is stable for a text in any script."""
    return f"{prefix}-{zlib.crc32(str(text).encode()):08x}"
