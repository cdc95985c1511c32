"""Small pieces: icons, badges, figures, times, N/A."""

from __future__ import annotations

import datetime as dt
from typing import Any

from django.template import Context
from django.utils.html import format_html
from django.utils.safestring import SafeString, mark_safe
from django.utils.translation import gettext

from portal.kernel import clock
from portal.web import formats, icons, states
from portal.web.actors import actor_word
from portal.web.audit_words import act_word
from portal.web.tags.base import EMPTY, attr, register, request_of, svg


@register.simple_tag(takes_context=True)
def icon(context: Context, name: str, size: str = "") -> SafeString:
    """``{% icon "play" %}``: an icon of the set; ``size`` "s" or "l"."""
    return svg(context, name, size)


@register.simple_tag(takes_context=True)
def icon_symbols(context: Context, extra: str = "") -> SafeString:
    """The symbols that the page's icons use; ``base.html`` has it once. ``extra``: names for scripts,
    separated by spaces."""
    return icons.render_symbols(request_of(context), extra.split())


@register.simple_tag(takes_context=True)
def badge(
    context: Context, state: object, kind: str = "", label: str = "", tone: str = "", icon: str = ""
) -> SafeString:
    """``{% badge request.state "request" %}``: colour, icon and word of a state (``portal.web.states``).
    ``label``, ``tone`` and ``icon`` override for words that are no stored state:
    ``{% badge "" label=_("fits") tone="ok" icon="check" %}``."""
    look = states.look(state, kind)
    return format_html(
        '<span class="badge" data-tone="{}">{}{}</span>',
        tone or look.tone,
        svg(context, icon or look.icon),
        label or look.label,
    )


@register.filter
def state_label(state: object, kind: str = "") -> str:
    """``{{ gpu.state|state_label:"gpu" }}``: the word alone."""
    return str(states.look(state, kind).label)


@register.filter
def state_tone(state: object, kind: str = "") -> str:
    """``data-tone="{{ gpu.state|state_tone:"gpu" }}"``: the tone alone."""
    return states.tone(state, kind)


@register.simple_tag(takes_context=True)
def state_icon(context: Context, state: object, kind: str = "") -> SafeString:
    """``{% state_icon "idle" "gpu" %}``: the icon of a state alone, where its word stands beside it."""
    return svg(context, states.look(state, kind).icon)


@register.simple_tag
def state_table(kind: str) -> dict[str, list[str]]:
    """``{% state_table "gpu" as looks %}{{ looks|json_script:"looks" }}``: tone, icon and word of every state, for
    scripts."""
    return states.as_json(kind)


@register.simple_tag
def na(reason: object = "") -> SafeString:
    """``{% na "not supported by the driver" %}``: N/A as text; the reason shows on hover, focus and tap.
    Never 0, never an empty cell."""
    if not reason:
        return format_html('<span class="na">{}</span>', gettext("N/A"))
    return format_html(
        '<span class="na tip" tabindex="0" data-tip="{}">{}<span class="vh">: {}</span></span>',
        reason,
        gettext("N/A"),
        reason,
    )


@register.simple_tag
def dash() -> SafeString:
    """``{% dash %}``: not applicable."""
    return format_html(
        '<span class="na"><span aria-hidden="true">–</span><span class="vh">{}</span></span>',
        gettext("not applicable"),
    )


@register.simple_tag
def figure(value: Any, unit: object = "", places: int | None = None, reason: object = "") -> SafeString | str:
    """``{% figure 93 "%" %}`` → ``93 %`` with a no-break space; None becomes N/A with its reason."""
    if value is None or value == "":
        return na(reason)
    return formats.figure(value, str(unit), places)


@register.filter
def num(value: Any, places: int | None = None) -> str:
    """``{{ n|num }}`` → ``1,234``; ``{{ x|num:1 }}`` fixes the decimals; None stays a dash."""
    return formats.DASH if value is None or value == "" else formats.number(value, places)


@register.filter
def milli_gpu(value: int | None) -> str:
    """``{{ 8000|milli_gpu }}`` → ``8``; None (unlimited) → ``∞``."""
    return formats.INFINITY if value is None else formats.milli_gpu(value)


@register.filter
def gpu_hours(value: int | None, places: int = 1) -> str:
    """``{{ gpu_ms|gpu_hours }}`` → ``297,600.0``; put ``GPU·h`` into the head or use ``gpu_hours_unit``."""
    return formats.DASH if value is None else formats.gpu_hours(value, places)


@register.filter
def gpu_hours_unit(value: int | None, places: int = 1) -> str:
    """``{{ gpu_ms|gpu_hours_unit }}`` → ``48.2 GPU·h`` / ``48.2 卡时``."""
    return (
        formats.DASH
        if value is None
        else f"{formats.gpu_hours(value, places)}{formats.NBSP}{formats.hours_unit()}"
    )


@register.filter
def money(micro: int | None, currency: str = "") -> str:
    """``{{ micro|money }}`` → ``¥1,234.50``; ``|money:"USD"`` names another currency."""
    return formats.DASH if micro is None else formats.money(micro, currency)


@register.filter
def gib(mib: int | None, places: int = 1) -> str:
    """``{{ mib|gib }}`` → ``79.6`` (GiB)."""
    return formats.DASH if mib is None else formats.gib(mib, places)


@register.filter
def local_time(when: dt.datetime | None, style: str = "") -> SafeString | str:
    """``{{ t|local_time }}`` → ``<time>16 Jun 14:03</time>`` in the reader's zone, the exact moment with
    its zone on hover. Styles: "", "seconds", "time", "clock", "date", "day", "long", "full"."""
    if when is None:
        return formats.DASH
    local = formats.in_zone(when)
    title = f"{local.isoformat(' ', 'seconds')[:19]} {formats.offset_of(local)}"
    # Nothing in it needs escaping: figures, names of months and days, and marks of our own.
    return mark_safe(
        f'<time datetime="{when.isoformat(timespec="seconds")}" title="{title}">'
        f"{formats.local_moment(local, style, clock.now())}</time>"
    )


@register.filter
def duration(value: dt.timedelta | int | float | None) -> str:
    """``{{ seconds|duration }}`` → ``11 h 57 min``; takes seconds or a timedelta."""
    return formats.DASH if value is None else formats.duration(value)


@register.filter
def hours(value: int | float | None) -> str:
    """``{{ seconds|hours }}`` → ``24 h``: seconds as hours, not cut into days (for leases asked in hours)."""
    if value is None:
        return formats.INFINITY
    return formats.number(round(value / 3600, 2)) + formats.NBSP + gettext("h")


@register.filter
def time_left(until: dt.datetime | None) -> SafeString:
    """``{{ lease.ends_at|time_left }}`` → ``2 h 47 min left``; the script keeps it current."""
    text = formats.time_left(until, clock.now())
    return (
        mark_safe(text)
        if until is None
        else format_html('<span data-until="{}">{}</span>', until.isoformat(timespec="seconds"), text)
    )


@register.simple_tag
def comma() -> str:
    """``{{ person }}{% comma %}{{ department }}``: a comma in the reader's punctuation, with its space."""
    return formats.comma()


@register.filter
def remaining(until: dt.datetime | None) -> SafeString:
    """``{{ lease.ends_at|remaining }}`` → ``2 h 47 min``, below a label "Time left"."""
    text = formats.remaining(until, clock.now())
    return (
        mark_safe(text)
        if until is None
        else format_html('<span data-until="{}">{}</span>', until.isoformat(timespec="seconds"), text)
    )


@register.filter
def time_ago(when: dt.datetime | None) -> str:
    """``{{ t|time_ago }}`` → ``3 min ago``."""
    return formats.DASH if when is None else formats.time_ago(when, clock.now())


@register.filter
def via_word(via: str) -> str:
    """``{{ event.via|via_word }}``: by which way an act came."""
    words = {
        "page": gettext("Page"),
        "api": gettext("API"),
        "token": gettext("Token"),
        "agent": gettext("Agent"),
        "task": gettext("Task"),
        "command": gettext("Command"),
    }
    return words.get(via, via)


register.filter(actor_word)
register.filter(act_word)


@register.filter
def initials(name: str) -> str:
    """``{{ user.display_name|initials }}`` → ``LY``; Chinese names give their last one or two signs."""
    words = str(name or "?").replace(".", " ").replace("_", " ").split()
    if not words:
        return "?"
    if any("\u4e00" <= ch <= "\u9fff" for ch in words[0]):
        return words[0][-2:]
    return "".join(w[0] for w in words[:2]).upper()


@register.simple_tag
def delta(
    now: Any, before: Any, unit: object = "", good: str = "", places: int | None = None, against: object = ""
) -> SafeString:
    """``{% delta 12 10 "%" good="up" against=_("May") %}`` → ``+2 % against May``. ``good`` "up" or "down"
    colours it; without it the change stays grey."""
    if now is None or before is None:
        return EMPTY
    change = now - before
    sign = "+" if change > 0 else ""
    rose = "up" if change > 0 else "down"
    mark = mark_safe("") if not good or not change else attr("data-good" if good == rose else "data-bad", "1")
    text = f"{sign}{formats.figure(change, str(unit), places)}"
    if against:
        text = gettext("%(change)s against %(period)s") % {"change": text, "period": against}
    return format_html('<span class="delta"{}>{}</span>', mark, text)
