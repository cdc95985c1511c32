"""Amounts drawn: quota bars, meters, sum bars, sparks, headline figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from django.template import Context
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString, mark_safe
from django.utils.translation import gettext

from portal.web import formats
from portal.web.tags.base import EMPTY, attr, register, svg


def _milli(value: int | None) -> int:
    return int(value or 0)


@register.simple_tag
def qbar(
    used: int,
    guaranteed: int,
    limit: int | None = None,
    borrowed: int | None = None,
    lent: int = 0,
    ask: int = 0,
    label: object = "",
    size: str = "",
) -> SafeString:
    """``{% qbar used guaranteed limit lent=lent ask=ask label="H800 80GB" %}``: use against a quota.

    All in milli-GPU (or any one unit); the scale runs from 0 to the limit; None is unlimited. ``borrowed``
    defaults to what is used above the guarantee. The bar speaks its figures to screen readers.
    """
    used, guar, lent, ask = _milli(used), _milli(guaranteed), _milli(lent), _milli(ask)
    borrow = max(0, used - guar) if borrowed is None else _milli(borrowed)
    top = max(used + ask, guar) * 5 // 4 or 1000 if limit is None else int(limit)
    over = limit is not None and used > limit
    words = {
        "label": label or gettext("Quota"),
        "used": formats.milli_gpu(used),
        "guaranteed": formats.milli_gpu(guar),
        "borrowed": formats.milli_gpu(borrow),
        "lent": formats.milli_gpu(lent),
        "limit": formats.milli_gpu(limit) if limit is not None else gettext("none"),
        "over": formats.milli_gpu(max(0, used - top)),
        "ask": formats.milli_gpu(ask),
    }
    if over:
        text = gettext("%(label)s: %(used)s used, limit %(limit)s, over by %(over)s") % words
    else:
        text = (
            gettext(
                "%(label)s: %(used)s used of %(guaranteed)s guaranteed; %(borrowed)s borrowed; "
                "%(lent)s lent; limit %(limit)s"
            )
            % words
        )
    if ask:
        text += gettext("; this request asks %(ask)s more") % words
    marks = ['<span class="own"></span>']
    # The scale cannot start at 0/0: an empty quota still draws its frame
    if borrow and not over:
        marks.append('<span class="bor"></span>')
    if over:
        marks += ['<span class="bor"></span>'] * bool(borrow) + ['<span class="over"></span>']
    marks += ['<span class="len"></span>'] * bool(lent) + ['<span class="ask"></span>'] * bool(ask)
    marks.append('<span class="g"></span>')
    parts = {"used": used, "guar": guar, "borrow": borrow, "lent": lent, "cap": top or 1, "ask": ask}
    style = ";".join(
        f"--{name}:{value}" for name, value in parts.items() if value
    )  # 0 is the style's default
    return format_html(
        '<div class="qbar"{}{} style="{}" role="img" aria-label="{}">{}</div>',
        attr("data-size", size),
        mark_safe(" data-open" if limit is None else ""),
        style,
        text,
        mark_safe("".join(marks)),
    )


@register.simple_tag
def quota(
    label: object,
    used: int,
    guaranteed: int,
    limit: int | None = None,
    borrowed: int | None = None,
    lent: int = 0,
    ask: int = 0,
    available: int | None = None,
    note: object = "",
) -> SafeString:
    """``{% quota "H800 80GB" used guaranteed limit lent=lent available=n %}``: the bar with its head and
    its line of figures; milli-GPU."""
    used, guar = _milli(used), _milli(guaranteed)
    borrow = max(0, used - guar) if borrowed is None else _milli(borrowed)
    words = {"used": formats.milli_gpu(used), "guaranteed": formats.milli_gpu(guar)}
    if limit is not None and used > limit:
        head = gettext("over by %(n)s: new starts wait") % {"n": formats.milli_gpu(used - limit)}
    elif ask:
        total = {"n": formats.milli_gpu(used + ask), "ask": formats.milli_gpu(ask), **words}
        head = gettext("%(used)s + %(ask)s = %(n)s") % total
    else:
        head = gettext("%(used)s used of %(guaranteed)s guaranteed") % words
    foot: list[object] = []
    if available is not None:
        own = min(max(0, guar - used), max(0, available))
        foot.append(
            gettext("%(own)s own + %(more)s borrowable now")
            % {"own": formats.milli_gpu(own), "more": formats.milli_gpu(max(0, available - own))}
            if available > 0
            else gettext("0 available")
        )
    foot.append(
        gettext("limit %(n)s") % {"n": formats.milli_gpu(limit)} if limit is not None else gettext("no limit")
    )
    if borrow:
        foot.append(gettext("%(n)s borrowed") % {"n": formats.milli_gpu(borrow)})
    if lent:
        foot.append(gettext("%(n)s lent") % {"n": formats.milli_gpu(lent)})
    if note:
        foot.append(note)
    return format_html(
        '<div class="quota"><div class="quota__head"><strong>{}</strong><span class="v">{}</span></div>{}'
        '<div class="quota__legend">{}</div></div>',
        label,
        head,
        qbar(used, guar, limit, borrow, lent, ask, label),
        format_html_join("", "<span>{}</span>", ((f,) for f in foot)),
    )


@register.simple_tag
def quota_legend(ask: bool = False) -> SafeString:
    """``{% quota_legend %}``: what the parts of a quota bar mean; once under a group of bars."""
    rows = [
        ("own", gettext("used within guarantee")),
        ("bor", gettext("borrowed")),
        ("len", gettext("lent")),
        ("free", gettext("not used")),
        ("g", gettext("guaranteed")),
    ]
    if ask:
        rows.append(("ask", gettext("this request")))
    body = format_html_join("", '<li><span class="sw" data-q="{}"></span>{}</li>', rows)
    return format_html('<ul class="legend">{}<li>{}</li></ul>', body, gettext("bar ends at the limit"))


@register.simple_tag
def meter(value: float | None, label: object = "", tone: str = "", text: object = "") -> SafeString:
    """``{% meter 89 label="Memory" text="284.8 of 320 GiB" %}``: one share of one whole in percent. With
    ``label`` it gets its line of words above; without, give the words beside it yourself."""
    if value is None:
        bar = mark_safe('<span class="meter" data-na></span>')
    else:
        share = max(0.0, min(100.0, float(value)))
        bar = format_html(
            '<span class="meter"{} style="--v:{}"><span></span></span>',
            attr("data-tone", tone),
            f"{share:.4g}",
        )
    if not label:
        return bar
    return format_html(
        '<div class="stack meter-row"><div class="row spread f12"><span class="muted">{}</span>'
        "<strong>{}</strong></div>{}</div>",
        label,
        text or (gettext("N/A") if value is None else formats.figure(value, "%", 0)),
        bar,
    )


@register.simple_tag
def sumbar(parts: Iterable[Mapping[str, Any]], label: object = "") -> SafeString:
    """``{% sumbar parts label=_("May, GPU-hours") %}``: parts that add up, and the legend that is their table.

    ``parts``: mappings with ``label``, ``value`` (≥ 0), ``text`` (the figure as read; defaults to the
    number) and one of ``cat`` (1–8), ``tone``, or ``hatch`` (true: stranded or borrowed).
    """
    rows = list(parts)
    bars, legend = [], []
    for i, p in enumerate(rows, start=1):
        colour = f"var(--{p['tone']}-solid)" if p.get("tone") else f"var(--cat-{p.get('cat', min(i, 8))})"
        hatch = mark_safe(" data-hatch") if p.get("hatch") else EMPTY
        if p["value"] > 0:
            bars.append(format_html('<span style="--v:{};--c:{}"{}></span>', p["value"], colour, hatch))
        legend.append(
            format_html(
                '<li><span class="sw" style="--c:{}"{}></span>{}<b>{}</b></li>',
                colour,
                hatch,
                p["label"],
                p.get("text") or formats.number(p["value"]),
            )
        )
    return format_html(
        '<div class="sumbar" role="img" aria-label="{}">{}</div><ul class="legend">{}</ul>',
        label or gettext("Parts of the whole; figures in the legend"),
        mark_safe("".join(bars)),
        mark_safe("".join(legend)),
    )


@register.simple_tag(takes_context=True)
def stat(
    context: Context,
    label: object,
    value: object,
    unit: object = "",
    basis: object = "",
    url: str = "",
    change: object = "",
    icon: str = "",
) -> SafeString:
    """``{% stat _("Allocated") "342.0" "GPU" basis=_("of 400, now") url=… %}``: a headline figure inside
    ``<dl class="stats">``; ``url`` leads to the rows behind it."""
    shown = format_html("{}{}", value, format_html("{}<small>{}</small>", formats.NBSP, unit) if unit else "")
    if value is None or value == "":
        shown = format_html('<span class="na">{}</span>', gettext("N/A"))
    if url:
        shown = format_html('<a href="{}">{}</a>', url, shown)
    extra = format_html('<dd class="basis">{} {}</dd>', basis, change) if basis or change else EMPTY
    head = format_html("{}{}", svg(context, icon, "s") if icon else "", label)
    return format_html('<div class="stat"><dt>{}</dt><dd>{}</dd>{}</div>', head, shown, extra)


@register.simple_tag
def spark(values: Sequence[float | None], top: float = 100.0, label: object = "") -> SafeString:
    """``{% spark points 100 label="SM activity, 1 h: 87 %" %}``: a line of the last values, 0 to ``top``;
    None breaks the line (no data is not 0)."""
    n = max(1, len(values) - 1)
    runs: list[list[str]] = [[]]
    for i, v in enumerate(values):
        if v is None:
            if runs[-1]:
                runs.append([])
            continue
        y = 100 - max(0.0, min(float(v), top)) / top * 100
        runs[-1].append(f"{i / n * 100:.4g} {y:.4g}")
    paths = []
    for run in runs:
        if len(run) < 2:
            continue
        line = "M" + "L".join(run)
        x0, x1 = run[0].split()[0], run[-1].split()[0]
        paths.append(f'<path class="ar" d="{line}L{x1} 100L{x0} 100Z"/><path class="ln" d="{line}"/>')
    return format_html(
        '<svg class="spark" viewBox="0 0 100 100" preserveAspectRatio="none" role="img" aria-label="{}">{}</svg>',
        label,
        mark_safe("".join(paths)),
    )
