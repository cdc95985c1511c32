"""Kinds of notices. Rooms register theirs in `AppConfig.ready` (or a module it imports).

    from portal.notify import kinds
    kinds.register("lease_expiring", _("Lease %(ref)s ends at %(ends_at)s"), _("Extend it or …"), urgent=False)

Title and body are lazily translated texts with `%(name)s` places, filled from the notice's params when it is
read: in the reader's language, times in the reader's zone. `prepare` may turn stored codes into lazily
translated words first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django.utils.functional import Promise
from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy

Text = str | Promise
Params = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """How a kind of notice reads, and whether it can be muted. `group` gathers kinds in the preferences."""

    name: str
    title: Text
    body: Text = ""
    urgent: bool = False
    group: str = "other"
    label: Text = ""
    tone: str = "info"
    icon: str = "bell"
    action: Text = ""
    prepare: Callable[[Params], Params] | None = None


GROUPS: dict[str, Text] = {
    "act": _("Needs my act: approval, consent, incident"),
    "taken": _("Will be taken from me: reclaim, idle, expiry"),
    "request": _("My request: approved, refused, started, ended"),
    "job": _("My job failed or its node was lost"),
    "money": _("Budget and prices"),
    "account": _("My roles and tokens"),
    "other": _("Other"),
}

OPEN = pgettext_lazy("button", "Open")

_kinds: dict[str, Kind] = {}


def register(
    kind: str,
    title: Text,
    body: Text = "",
    urgent: bool = False,
    *,
    group: str = "other",
    label: Text = "",
    tone: str = "info",
    icon: str = "bell",
    action: Text = "",
    prepare: Callable[[Params], Params] | None = None,
) -> Kind:
    """Register a kind (once per name; the last wins). `label` names it in the preferences; `action` is the word
    on its button; `tone` and `icon` are those of the design system."""
    if group not in GROUPS:
        raise ValueError(f"no such group of notices: {group}")
    made = Kind(kind, title, body, urgent, group, label, tone, icon, action or OPEN, prepare)
    _kinds[kind] = made
    return made


def kind_of(name: str) -> Kind:
    """The kind; an unknown one (a room that was removed) still reads as its own name."""
    return _kinds.get(name) or Kind(name, name.replace("_", " ").replace(".", " "), action=OPEN)


def known() -> list[Kind]:
    """All kinds, by group and name."""
    order = list(GROUPS)
    return sorted(_kinds.values(), key=lambda k: (order.index(k.group), k.name))
