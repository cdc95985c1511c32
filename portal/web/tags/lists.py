"""Lists: filters, sortable heads, pages. All state is in the query string."""

from __future__ import annotations

from typing import Any

from django.core.paginator import Page
from django.http import QueryDict
from django.template import Context
from django.utils.html import format_html
from django.utils.safestring import SafeString, mark_safe
from django.utils.translation import gettext

from portal.web import formats
from portal.web.tags.base import EMPTY, attr, register, request_of, svg


def _query(context: Context, **changes: object) -> str:
    """The page's query string with some keys changed (None removes one); starts with ``?``."""
    request = request_of(context)
    query = request.GET.copy() if request is not None else QueryDict(mutable=True)
    for key, value in changes.items():
        if value is None:
            query.pop(key, None)
        else:
            query[key] = str(value)
    text = query.urlencode()
    return f"?{text}" if text else "?"


@register.simple_tag(takes_context=True)
def sortable(
    context: Context,
    field: str,
    label: object,
    numeric: bool = False,
    unit: object = "",
    default: str = "",
    param: str = "sort",
) -> SafeString:
    """``{% sortable "created" _("Age") %}``: a column head whose link sorts; the order is ``?sort=field`` or
    ``?sort=-field``. ``default``: the order that holds without the parameter."""
    request = request_of(context)
    now = (request.GET.get(param) if request is not None else "") or default
    direction = {field: "ascending", f"-{field}": "descending"}.get(now, "")
    target = f"-{field}" if now == field else field
    mark = svg(context, "up" if direction == "ascending" else "dn", "s") if direction else EMPTY
    tail = format_html(" <small>{}</small>", unit) if unit else EMPTY
    return format_html(
        '<th scope="col"{}{}><a href="{}">{}{}</a>{}</th>',
        mark_safe(' class="n"' if numeric else ""),
        attr("aria-sort", direction),
        _query(context, **{param: target, "page": None}),
        label,
        mark,
        tail,
    )


@register.simple_tag(takes_context=True)
def pager(context: Context, page: Page[Any], param: str = "page") -> SafeString:
    """``{% pager page_obj %}``: ``1–50 of 214`` and the pages; the query string stays. One page needs none."""
    paginator = page.paginator
    total = paginator.count
    span = gettext("%(first)s–%(last)s of %(total)s") % {
        "first": formats.number(page.start_index()),
        "last": formats.number(page.end_index()),
        "total": formats.number(total),
    }
    if paginator.num_pages <= 1:
        return mark_safe("")
    links: list[SafeString] = []
    for n in paginator.get_elided_page_range(page.number, on_each_side=2, on_ends=1):
        if n == page.number:
            links.append(format_html('<span aria-current="page">{}</span>', n))
        elif isinstance(n, int):
            links.append(format_html('<a href="{}">{}</a>', _query(context, **{param: n}), n))
        else:
            links.append(mark_safe("<span>…</span>"))
    return format_html(
        '<div class="pager"><span>{}</span><nav aria-label="{}">{}</nav></div>',
        span,
        gettext("Pages"),
        mark_safe("".join(links)),
    )


@register.simple_block_tag(takes_context=True)
def filters(context: Context, content: str, count: object = "", label: object = "") -> SafeString:
    """``{% filters count=_("1–50 of 214") %}…inputs…{% endfilters %}``: a GET form that sends itself on change;
    the state is in the URL. Each input has a label (``class="vh"`` when its first option says what it is).
    The sort order is kept, the page is not."""
    request = request_of(context)
    sort = request.GET.get("sort", "") if request is not None else ""
    keep = format_html('<input type="hidden" name="sort" value="{}">', sort) if sort else EMPTY
    tail = format_html('<span class="push muted f12">{}</span>', count) if count else EMPTY
    return format_html(
        '<form class="filters" method="get" role="search" aria-label="{}" data-autosubmit>{}{}'
        '<button class="btn" data-size="s" type="submit">{}</button>{}</form>',
        label or gettext("Filters"),
        keep,
        mark_safe(content),
        gettext("Apply"),
        tail,
    )


@register.simple_tag(takes_context=True)
def chip(context: Context, label: object, param: str) -> SafeString:
    """``{% chip _("State: queued") "state" %}``: a filter that is on; its cross takes it off."""
    return format_html(
        '<span class="chip">{}<a class="chip__x" href="{}" aria-label="{}">{}</a></span>',
        label,
        _query(context, **{param: None, "page": None}),
        gettext("Remove filter %(label)s") % {"label": label},
        svg(context, "x", "s"),
    )


@register.simple_tag(takes_context=True)
def segmented(
    context: Context, param: str, options: list[tuple[str, object]], label: object = "", default: str = ""
) -> SafeString:
    """``{% segmented "state" options label=_("Show") default="open" %}``: one of a few, each a link that sets the
    parameter. Options are (value, label) pairs."""
    request = request_of(context)
    now = (request.GET.get(param) if request is not None else None) or default
    body = [
        format_html(
            '<a href="{}"{}>{}</a>',
            _query(context, **{param: value or None, "page": None}),
            attr("aria-current", "true" if value == now else ""),
            text,
        )
        for value, text in options
    ]
    return format_html(
        '<div class="segmented" role="group" aria-label="{}">{}</div>',
        label or gettext("Show"),
        mark_safe("".join(body)),
    )


@register.simple_tag(takes_context=True)
def query(context: Context, **changes: object) -> str:
    """``href="{% query page=2 state=None %}"``: this page's query string with some keys changed."""
    return _query(context, **changes)
