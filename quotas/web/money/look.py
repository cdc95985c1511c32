"""How a table of finance is shown: its order and its columns. Both are in the address, and the last choice for each
table is remembered in this browser: a page that is opened without one is sent on to it. Files always have all columns.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar
from urllib.parse import quote, unquote

from django.conf import settings
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, QueryDict
from django.utils.translation import gettext as _

from portal.kernel.errors import Invalid

LOOK = ("sort", "hide")
COOKIE = "gpupool_tables"
LONGEST = 3000
"""Bytes of the cookie at most: of many tables the last ones used are remembered."""

YEAR_S = 366 * 24 * 3600
Row = TypeVar("Row")


@dataclass(frozen=True)
class Head:
    """A column as the page offers it: its key, its words, whether figures stand in it, whether it sorts."""

    key: str
    label: Any
    numeric: bool = True
    unit: Any = ""
    sorts: bool = True


@dataclass(frozen=True)
class Look:
    """`sort`: a column's key, with - before it from large to small, "" as the page has it. `hide`: keys."""

    sort: str = ""
    hide: tuple[str, ...] = ()

    @classmethod
    def of(cls, params: Mapping[str, str], heads: Sequence[Head]) -> Look:
        """From a query string. Invalid for a column that the table does not have, or for hiding the first."""
        keys = [head.key for head in heads]
        sort = params.get("sort", "")
        if sort and sort.removeprefix("-") not in {head.key for head in heads if head.sorts}:
            raise Invalid.field("sort", _("This table has no such column."))
        hide = tuple(key for key in params.get("hide", "").split(",") if key)
        if any(key not in keys[1:] for key in hide):
            raise Invalid.field("hide", _("This table has no such column."))
        return cls(sort, hide)

    def params(self) -> dict[str, str]:
        """As a query string has it, without what is empty."""
        found = {"sort": self.sort, "hide": ",".join(self.hide)}
        return {name: value for name, value in found.items() if value}

    def ordered(self, rows: Iterable[Row], values: Mapping[str, Callable[[Row], Any]]) -> list[Row]:
        """Rows in this order by `values` of the columns' keys; those without a value come last."""
        found = list(rows)
        if not self.sort:
            return found
        value = values[self.sort.removeprefix("-")]
        filled = [row for row in found if value(row) is not None]
        filled.sort(key=value, reverse=self.sort.startswith("-"))
        return filled + [row for row in found if value(row) is None]

    def shown(self, heads: Sequence[Head]) -> list[Head]:
        """The columns that are not hidden."""
        return [head for head in heads if head.key not in self.hide]

    def choices(self, heads: Sequence[Head], query: QueryDict) -> list[dict[str, Any]]:
        """Every column but the first: its words, whether it is shown, and the address that turns it over; last the
        way back to the page's own order and columns, where something else was chosen.
        """
        out = []
        for head in heads[1:]:
            other = [key for key in self.hide if key != head.key]
            if head.key not in self.hide:
                other.append(head.key)
            out.append(
                {
                    "label": head.label,
                    "shown": head.key not in self.hide,
                    "url": _turned(query, hide=",".join(other)),
                }
            )
        if self.params():
            out.append(
                {
                    "label": _("Usual order and columns"),
                    "reset": True,
                    "url": _turned(query, sort="", hide=""),
                }
            )
        return out


def _turned(query: QueryDict, **changes: str) -> str:
    turned = query.copy()
    turned.pop("page", None)
    for name, value in changes.items():
        turned[name] = value
    return f"?{turned.urlencode()}"


View = Callable[..., HttpResponse]


def remembered(page: str) -> Callable[[View], View]:
    """A view whose table is remembered under `page` and the parts of its address."""

    def wrap(view: View) -> View:
        @wraps(view)
        def inner(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
            name = "-".join([page, *(str(value) for value in kwargs.values())])
            kept = _kept(request)
            asked = {key: request.GET[key] for key in LOOK if key in request.GET}
            known = kept.get(name, {})
            reads = request.method in {"GET", "HEAD"}
            if reads and not asked and known:
                return _moved(request, known)
            try:
                response = view(request, *args, **kwargs)
            except Invalid as error:
                if not known or asked != known or not any(p["pointer"] in LOOK for p in error.errors):
                    raise
                response, asked = _moved(request, {}), dict.fromkeys(LOOK, "")  # a column that is no more
            if reads and asked and asked != known and response.status_code < 400:
                _keep(response, {**{n: look for n, look in kept.items() if n != name}, name: asked})
            return response

        return inner

    return wrap


def _moved(request: HttpRequest, look: Mapping[str, str]) -> HttpResponse:
    query = request.GET.copy()
    for key in LOOK:
        query.pop(key, None)
    query.update(look)
    return HttpResponseRedirect(f"{request.path}?{query.urlencode()}" if query else request.path)


def _kept(request: HttpRequest) -> dict[str, dict[str, str]]:
    """What the browser remembers; nothing of what is not in our form."""
    try:
        found = json.loads(unquote(request.COOKIES.get(COOKIE, "{}")))
    except ValueError:
        return {}
    if not isinstance(found, dict):
        return {}
    looks = {
        str(name): {key: str(look[key])[:300] for key in LOOK if look.get(key)}
        for name, look in found.items()
        if isinstance(look, dict)
    }
    return {name: look for name, look in looks.items() if look}


def _keep(response: HttpResponse, looks: Mapping[str, Mapping[str, str]]) -> None:
    short = {name: {key: value for key, value in look.items() if value} for name, look in looks.items()}
    last = [(name, look) for name, look in short.items() if look]
    while len(text := quote(json.dumps(dict(last), separators=(",", ":")), safe="")) > LONGEST:
        last.pop(0)
    response.set_cookie(
        COOKIE,
        text,
        max_age=YEAR_S,
        path=settings.SESSION_COOKIE_PATH,
        secure=bool(settings.SESSION_COOKIE_SECURE),
        httponly=True,
        samesite="Lax",
    )
