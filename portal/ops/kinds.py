"""Kinds of incidents in words. Rooms register theirs beside the code that opens them.

kinds.register("node_lost", _("Node lost"), _("No heartbeat for 90 s."), _("Look at its power and network."))
"""

from __future__ import annotations

from dataclasses import dataclass

from django.utils.functional import Promise

Text = str | Promise


@dataclass(frozen=True)
class IncidentKind:
    """What a kind is called, what it means, and what to do next."""

    name: str
    title: Text
    means: Text = ""
    advice: Text = ""


_kinds: dict[str, IncidentKind] = {}


def register(kind: str, title: Text, means: Text = "", advice: Text = "") -> None:
    """Register a kind; the last wins."""
    _kinds[kind] = IncidentKind(kind, title, means, advice)


def kind_of(name: str) -> IncidentKind:
    """The kind; one that nobody registered reads as its own name."""
    return _kinds.get(name) or IncidentKind(name, name.replace("_", " ").capitalize())
