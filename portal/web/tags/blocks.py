"""Blocks of a page: cards, callouts, blanks, dialogs, steps, timelines, tabs, API lines, charts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from django.template import Context
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString, mark_safe
from django.utils.translation import gettext, pgettext

from portal.web.tags.base import EMPTY, attr, register, slug_id, svg


@register.simple_block_tag(takes_context=True)
def card(
    context: Context,
    content: str,
    title: object = "",
    sub: object = "",
    more: str = "",
    more_text: object = "",
    pad: bool = True,
    tone: str = "",
    foot: object = "",
    id: str = "",
    level: int = 2,
    end: object = "",
) -> SafeString:
    """``{% card title=_("My requests") more=url more_text=_("All 41") %}…{% endcard %}``.

    ``pad`` false for tables and lists, which bring their own padding. ``end``: safe HTML at the right of
    the head (a badge). ``level``: 2 or 3 for the heading. A card is never put into a card.
    """
    ident = id or slug_id("c", title)
    head: SafeString = EMPTY
    if title:
        right = EMPTY
        if more or end:
            link = (
                format_html('<a class="f13" href="{}">{}</a>', more, more_text or gettext("All"))
                if more
                else EMPTY
            )
            right = format_html('<span class="end">{}{}</span>', end, link)
        subline = format_html('<span class="sub">{}</span>', sub) if sub else EMPTY
        head = format_html(
            '<header class="card__head"><h{} id="{}-h">{}</h{}>{}{}</header>',
            level,
            ident,
            title,
            level,
            subline,
            right,
        )
    body = (
        format_html('<div class="card__body stack">{}</div>', mark_safe(content))
        if pad
        else mark_safe(content)
    )
    tail = format_html('<footer class="card__foot">{}</footer>', foot) if foot else EMPTY
    labelled = attr("aria-labelledby", f"{ident}-h") if title else EMPTY
    tag = mark_safe("section" if title else "div")
    return format_html(
        '<{} class="card" id="{}"{}{}>{}{}{}</{}>',
        tag,
        ident,
        labelled,
        attr("data-tone", tone),
        head,
        body,
        tail,
        tag,
    )


@register.simple_block_tag(takes_context=True)
def callout(
    context: Context,
    content: str,
    tone: str = "info",
    icon: str = "",
    action: str = "",
    url: str = "",
    role: str = "",
) -> SafeString:
    """``{% callout "warn" url=… action=_("Review") %}<p><strong>…</strong> …</p>{% endcallout %}``: a notice
    with one act; at most two on a page. ``role="alert"`` for what just went wrong."""
    names = {
        "info": "info",
        "ok": "check",
        "warn": "warn",
        "bad": "fault",
        "act": "reclaim",
        "hold": "hold",
        "mute": "info",
    }
    act = (
        format_html('<div class="actions"><a class="btn" data-size="s" href="{}">{}</a></div>', url, action)
        if action
        else EMPTY
    )
    return format_html(
        '<div class="callout" data-tone="{}"{}>{}<div>{}</div>{}</div>',
        tone,
        attr("role", role),
        svg(context, icon or names.get(tone, "info")),
        mark_safe(content),
        act,
    )


@register.simple_tag(takes_context=True)
def blank(
    context: Context,
    kind: str = "empty",
    title: object = "",
    text: object = "",
    url: str = "",
    action: object = "",
    icon: str = "",
) -> SafeString:
    """``{% blank "empty" title=_("No requests yet") text=… url=… action=_("New request") %}``: what stands
    where rows would. Kinds: empty, forbidden, failed, none (filters match nothing), offline."""
    names = {"empty": "inbox", "forbidden": "lock", "failed": "fault", "none": "filter", "offline": "nodata"}
    default = {
        "empty": gettext("Nothing here yet"),
        "forbidden": gettext("Not yours to see"),
        "failed": gettext("Could not load this part"),
        "none": gettext("Nothing matches these filters"),
        "offline": gettext("No data"),
    }
    act = (
        format_html('<div class="actions"><a class="btn" data-size="s" href="{}">{}</a></div>', url, action)
        if action
        else EMPTY
    )
    return format_html(
        '<div class="blank" data-kind="{}">{}<strong>{}</strong>{}{}</div>',
        kind,
        svg(context, icon or names[kind]),
        title or default[kind],
        format_html("<p>{}</p>", text) if text else EMPTY,
        act,
    )


@register.simple_tag
def loading(lines: int = 4) -> SafeString:
    """``{% loading 4 %}``: bones in the shape of the result, for an htmx fragment that is on its way."""
    widths = (40, 100, 85, 60)
    bones = "".join(f'<span class="bone" style="--w:{widths[i % 4]}%"></span>' for i in range(lines))
    return format_html(
        '<div class="card__body stack bones" aria-busy="true"><span class="vh">{}</span>{}</div>',
        gettext("Loading"),
        mark_safe(bones),
    )


@register.simple_block_tag(takes_context=True)
def dialog(
    context: Context, content: str, id: str, title: object, sub: object = "", open: bool = False
) -> SafeString:
    """``{% dialog id="dlg-release" title=… sub=… %}<form method="post">…{% enddialog %}``.

    Opened by ``<button type="button" data-act="dialog" data-target="dlg-release">``. Its content is a form with
    ``<div class="dialog__body">`` (list the effects) and ``<div class="dialog__foot">`` (a quiet button with
    ``data-act="close"``, then the act). ``open`` shows it at once, for a form that came back with errors.
    """
    return format_html(
        '<dialog class="dialog" id="{}" aria-labelledby="{}-h"{}><div class="dialog__head"><div><h2 id="{}-h">{}</h2>{}'
        '</div><button class="btn" data-kind="icon" type="button" data-act="close" aria-label="{}">{}</button></div>{}'
        "</dialog>",
        id,
        id,
        mark_safe(" data-open-now" if open else ""),
        id,
        title,
        format_html("<p>{}</p>", sub) if sub else EMPTY,
        gettext("Close"),
        svg(context, "x"),
        mark_safe(content),
    )


@register.simple_tag
def effects(rows: Iterable[Sequence[object]]) -> SafeString:
    """``{% effects rows %}``: what an act will touch, as (label, value) pairs, inside a dialog."""
    body = format_html_join(
        "", '<tr><th scope="row">{}</th><td class="n">{}</td></tr>', ((r[0], r[1]) for r in rows)
    )
    return format_html('<table class="table effects" data-dense><tbody>{}</tbody></table>', body)


@register.simple_tag(takes_context=True)
def steps(context: Context, items: Iterable[Mapping[str, Any]], label: object = "") -> SafeString:
    """``{% steps items label=_("Path of the request") %}``: who holds it, until when. Items: ``s`` (done, now,
    todo, bad), ``title``, ``note``."""
    rows = []
    words = {
        "done": gettext("done"),
        "now": pgettext("step", "now"),
        "todo": pgettext("step", "to come"),
        "bad": gettext("stopped"),
    }
    for it in items:
        s = it.get("s", "todo")
        dot = svg(context, "check") if s == "done" else svg(context, "x") if s == "bad" else EMPTY
        note = format_html("<small>{}</small>", it["note"]) if it.get("note") else EMPTY
        rows.append(
            format_html(
                '<li data-s="{}"{}><span class="dot" aria-hidden="true">{}</span><b>{}'
                '<span class="vh">, {}</span></b>{}</li>',
                s,
                attr("aria-current", "step" if s == "now" else ""),
                dot,
                it["title"],
                words.get(s, s),
                note,
            )
        )
    return format_html(
        '<ol class="steps" aria-label="{}">{}</ol>', label or gettext("Steps"), mark_safe("".join(rows))
    )


@register.simple_tag(takes_context=True)
def timeline(context: Context, items: Iterable[Mapping[str, Any]], narrow: bool = False) -> SafeString:
    """``{% timeline items %}``: history, newest first. Items: ``time`` (a datetime), ``text``, ``note``,
    ``icon`` (default info), ``tone``."""
    from portal.web.tags.atoms import local_time

    rows = []
    for it in items:
        note = format_html("<small>{}</small>", it["note"]) if it.get("note") else EMPTY
        rows.append(
            format_html(
                '<li{}>{}<span class="pt">{}</span><div>{}{}</div></li>',
                attr("data-tone", it.get("tone")),
                local_time(it["time"]),
                svg(context, it.get("icon") or "info"),
                it["text"],
                note,
            )
        )
    return format_html(
        '<ol class="timeline"{}>{}</ol>',
        mark_safe(" data-narrow" if narrow else ""),
        mark_safe("".join(rows)),
    )


@register.simple_tag
def tabs(items: Iterable[Mapping[str, Any]], label: object = "") -> SafeString:
    """``{% tabs items label=_("Node") %}``: views of one object, each a link. Items: ``url``, ``label``,
    ``current`` (bool), ``count``."""
    rows = format_html_join(
        "",
        '<a href="{}"{}>{}{}</a>',
        (
            (
                t["url"],
                attr("aria-current", "page" if t.get("current") else ""),
                t["label"],
                format_html(' <span class="count">{}</span>', t["count"])
                if t.get("count") is not None
                else EMPTY,
            )
            for t in items
        ),
    )
    return format_html('<nav class="tabs" aria-label="{}">{}</nav>', label or gettext("Views"), rows)


@register.simple_tag(takes_context=True)
def copyable(context: Context, text: object, label: object = "") -> SafeString:
    """``{% copyable token %}``: a line of code with its copy button (a request id, a token, a command)."""
    return format_html(
        '<div class="api"><code tabindex="0">{}</code><button class="btn" data-kind="icon" data-size="s" type="button" '
        'data-act="copy" data-copy="{}" data-done="{}" aria-label="{}">{}</button></div>',
        text,
        text,
        gettext("Copied"),
        label or gettext("Copy"),
        svg(context, "copy"),
    )


@register.simple_tag(takes_context=True)
def api_line(context: Context, call: str, cli: str = "") -> SafeString:
    """``{% api_line "GET /api/v1/requests/" "gpupool ls" %}``: the call, and the command, that do the same."""
    lines = copyable(context, call)
    if cli:
        lines = format_html("{}{}", lines, copyable(context, cli))
    return format_html(
        '<div class="stack api-lines"><span class="f12 muted">{}</span>{}</div>',
        gettext("The same by API or command") if cli else gettext("The same by API"),
        lines,
    )


@register.simple_tag
def live(socket: str = "") -> SafeString:
    """``{% live %}``: the live indicator that ``live.mjs`` keeps: live, paused, stale with the moment of the
    data, offline with the time to the next try. Give the same element to the client as ``indicator``."""
    return format_html(
        '<span class="live" data-s="wait" data-live-state role="status" data-t-live="{}" data-t-paused="{}" '
        'data-t-stale="{}" '
        'data-t-off="{}" data-t-wait="{}"{}>{}</span>',
        gettext("Live · {time}"),
        gettext("Paused · data from {time}"),
        gettext("Stale · data from {time}, {age} s ago"),
        gettext("Offline · retry in {left} s"),
        gettext("Connecting…"),
        attr("data-socket", socket),
        gettext("Connecting…"),
    )


@register.simple_tag
def chart(
    id: str,
    figure: Mapping[str, Any] | None = None,
    src: str = "",
    label: object = "",
    height: str = "16rem",
    every: int = 0,
) -> SafeString:
    """``{% chart "util" figure label=_("Utilization, %") %}`` or ``{% chart "util" src=url every=30 %}``.

    A Plotly figure (``{"data": […], "layout": {…}, "table": {"head": […], "rows": [[…]]}}``) drawn in theme
    colours; ``layout`` may be empty. Colours may be written as token names (``"--cat-1"``). The table twin comes
    from ``table`` or from the traces. ``every``: reload ``src`` after that many seconds. The page also needs
    ``{% include "components/chart_scripts.html" %}`` in its ``scripts`` block.
    """
    data = EMPTY
    if figure is not None:
        blob = json.dumps(figure, default=str, ensure_ascii=False)
        blob = blob.replace("<", "\\u003C").replace(">", "\\u003E").replace("&", "\\u0026")
        data = format_html('<script type="application/json" class="plot__data">{}</script>', mark_safe(blob))
    return format_html(
        '<figure class="plot" id="{}" data-chart{}{} data-t-table="{}" data-t-chart="{}" data-t-empty="{}" '
        'data-t-failed="{}" data-t-time="{}" aria-label="{}"><div class="plot__box" style="--h:{}">'
        '<div class="plot__canvas" role="img" aria-label="{}"></div>'
        '</div><div class="plot__twin table-wrap" tabindex="0" role="region" aria-label="{}" hidden></div>'
        '<button class="btn plot__toggle" data-size="s" data-kind="quiet" type="button" '
        'aria-pressed="false">{}</button>{}</figure>',
        id,
        attr("data-src", src),
        attr("data-every", every),
        gettext("Show as table"),
        gettext("Show as chart"),
        gettext("No data in this period"),
        gettext("The figures could not be loaded"),
        gettext("Time"),
        label,
        height,
        label,
        label or gettext("Figures"),
        gettext("Show as table"),
        data,
    )
