"""A what-if in words: the start, the deadline, and each near wish in a short line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from django.utils.translation import gettext as _
from django.utils.translation import pgettext

from pool.selectors.what_if import Near, WhatIf
from pool.web.reasons import Why, explain, explain_basis
from portal.kernel.clock import now
from quotas.selectors.requests import range_from
from quotas.selectors.shapes import amount_text
from quotas.web.words import hours, money, when


def start_words(answer: WhatIf) -> dict[str, Any]:
    """Tone, head, and lines below it for the panel."""
    fit = answer.fit
    if fit.starts_now:
        where = pgettext("list", ", ").join(fit.nodes[:4]) + ("…" if len(fit.nodes) > 4 else "")
        later = answer.start_at is not None and answer.start_at > now()
        head = _("kept from %(time)s") % {"time": when(answer.start_at)} if later else _("now")
        return {"tone": "ok", "head": head, "lines": [where] if where else []}
    why: Why = explain(fit.reason, fit.figures, _flavour(fit.figures))
    lines = [line for line in (why.headline, why.detail) if line]
    head = _("would wait")
    if answer.start_at is not None and fit.reason == "not_before":
        kept = bool(fit.figures.get("kept"))
        head = _("from %(time)s") % {"time": when(answer.start_at)}
        lines = [_("Places are kept for it.") if kept else _("No places can be kept yet; it competes then.")]
        return {"tone": "ok" if kept else "warn", "head": head, "lines": lines, "why": why}
    if fit.start_from is not None:
        head = f"{when(fit.start_from)} – {when(fit.start_to)}"
        lines.append(explain_basis(fit.basis, fit.figures))
        if fit.position is not None and fit.of:
            lines.append(_("Place %(n)s of %(of)s in line.") % {"n": fit.position, "of": fit.of})
    elif answer.history is not None:
        begin, end = range_from(answer.history, now())
        head = f"{when(begin)} – {when(end)}"
        lines.append(
            _("Basis: the middle 80 %% of %(n)s such waits in 30 days.") % {"n": answer.history.count}
        )
    else:
        lines.append(_("No estimate of the start: nothing that runs has an end that would make room for it."))
    return {"tone": "warn", "head": head, "lines": [line for line in lines if line], "why": why}


def deadline_words(answer: WhatIf, deadline: Any) -> dict[str, str] | None:
    """Whether a deadline would be met, with the sum; None where none was named."""
    end = when(answer.ends_by) if answer.ends_by is not None else ""
    by = when(deadline)
    texts = {
        "met": ("ok", _("It would be finished by %(end)s at the latest.") % {"end": end}),
        "maybe": ("warn", _("It may be late: it could take until %(end)s.") % {"end": end}),
        "missed": (
            "bad",
            _("It cannot be met as things stand: at best it is finished at %(end)s.") % {"end": end},
        ),
        "unknown": ("warn", _("Nobody can tell: there is no estimate of its start.")),
    }
    if answer.deadline not in texts:
        return None
    tone, text = texts[answer.deadline]
    return {"tone": tone, "by": by, "text": text}


def near_words(near: Near) -> dict[str, Any]:
    """One line: what it asks, why it differs, its price; and the form's fields that make it."""
    amount = amount_text(near.shape, near.flavour.name)
    words = {
        "interruptible": _("%(amount)s, interruptible") % {"amount": amount},
        "shorter": _("%(amount)s for %(hours)s") % {"amount": amount, "hours": hours(near.seconds)},
    }
    text = words.get(near.kind, amount)
    if near.cost_micro is not None:
        text = _("%(what)s: now, %(cost)s") % {"what": text, "cost": money(near.cost_micro)}
    else:
        text = _("%(what)s: now") % {"what": text}
    return {"text": text, "kind": near.kind, "set_json": json.dumps(form_fields(near.changes))}


def form_fields(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Changes of a request as the form's fields: what its script sets when the line is taken."""
    out: dict[str, Any] = {}
    for name, value in changes.items():
        if name == "duration_s":
            out["hours"] = f"{value / 3600:g}"
        elif name == "interruptible":
            out["interruptible"] = "yes" if value else "no"
        elif name == "flavour":
            out |= {"ask_by": "flavour", "flavour": value}
        elif name != "requirement":
            out[name] = "" if value is None else value
    return out


def _flavour(figures: Mapping[str, Any]) -> str:
    return str(figures.get("flavour") or "")
