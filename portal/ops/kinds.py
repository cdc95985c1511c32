"""Kinds of incidents in words. Rooms register theirs beside the code that opens them.

kinds.register("node_lost", _("Node lost"), _("No heartbeat for 90 s."), _("Look at its power and network."))

Facts are kept as codes and data's own texts; a room registers what those read in the reader's language:
kinds.register_fact("meaning", meaning_words)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
_facts: dict[str, Callable[[Any], Any]] = {}


def register(kind: str, title: Text, means: Text = "", advice: Text = "") -> None:
    """Register a kind; the last wins."""
    _kinds[kind] = IncidentKind(kind, title, means, advice)


def kind_of(name: str) -> IncidentKind:
    """The kind; one that nobody registered reads as its own name."""
    return _kinds.get(name) or IncidentKind(name, name.replace("_", " ").capitalize())


def register_fact(name: str, words: Callable[[Any], Any]) -> None:
    """Register what a fact of this name reads for people, whatever the kind; the last wins."""
    _facts[name] = words


def fact_words(name: str, value: Any) -> Any:
    """A fact as its reader sees it; one that nobody registered as it is."""
    words = _facts.get(name)
    return value if words is None else words(value)
