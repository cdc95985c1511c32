"""The icon set: 24 px stroke symbols of ``static/icons/icons.svg``, drawn inline.

A full page uses ``<use href="#i-name">`` and carries each symbol once, at its end (``icon_symbols``).
A fragment (htmx) or anything drawn without a request carries the path itself, because a symbol that
left the page with its fragment would blank the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from django.http import HttpRequest
from django.utils.safestring import SafeString, mark_safe

SPRITE = Path(__file__).resolve().parents[2] / "static" / "icons" / "icons.svg"
_SYMBOL = re.compile(r'<symbol id="i-([a-z0-9-]+)" viewBox="0 0 24 24">(.*?)</symbol>', re.S)
_SIZES = {"": "i", "s": "i i-s", "l": "i i-l"}


@cache
def symbols() -> dict[str, str]:
    """Name → inner SVG of every icon; read once, the file is ours and trusted."""
    return {name: body.strip() for name, body in _SYMBOL.findall(SPRITE.read_text(encoding="utf-8"))}


def _used(request: HttpRequest) -> set[str]:
    used: set[str] | None = getattr(request, "_ui_icons", None)
    if used is None:
        used = set()
        request._ui_icons = used  # type: ignore[attr-defined]
    return used


def is_fragment(request: HttpRequest) -> bool:
    """True for an htmx call that will be put into a page that is already there."""
    return request.headers.get("HX-Request") == "true" and request.headers.get("HX-Boosted") != "true"


def render(name: str, size: str = "", request: HttpRequest | None = None) -> SafeString:
    """One icon as SVG, hidden from assistive technology (the word stands beside it).

    ``size`` is "", "s" (13 px) or "l" (24 px). An unknown name raises ``KeyError``: a page must not
    ship a state without its icon.
    """
    body = symbols()[name]
    css = _SIZES[size]
    if request is None or is_fragment(request):
        return mark_safe(f'<svg class="{css}" viewBox="0 0 24 24" aria-hidden="true">{body}</svg>')
    _used(request).add(name)
    return mark_safe(f'<svg class="{css}" aria-hidden="true"><use href="#i-{name}"/></svg>')


def render_symbols(request: HttpRequest | None, extra: Iterable[str] = ()) -> SafeString:
    """The symbols that the page used so far, and ``extra`` ones that its script will use."""
    names = set(extra) | (_used(request) if request is not None else set())
    table = symbols()
    body = "".join(f'<symbol id="i-{n}" viewBox="0 0 24 24">{table[n]}</symbol>' for n in sorted(names))
    return mark_safe(f'<svg class="icon-symbols" width="0" height="0" aria-hidden="true">{body}</svg>')
