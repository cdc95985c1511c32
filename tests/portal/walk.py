"""Every address of the installation, for tests that walk them all with a foreign person.

Rooms make the walk sharper (`tests/portal/walk_rooms.py`):

    from tests.portal import walk
    walk.something_of_others("quotas:request-detail", lambda: {"uid": submitted_by("other").uid})
    walk.open_to_all("monitoring:wall")

Without a factory an address is asked with an id that nobody has.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from django.urls import NoReverseMatch, URLPattern, URLResolver, get_resolver, reverse

Factory = Callable[[], dict[str, Any]]

FACTORIES: dict[str, list[Factory]] = {}
OPEN: set[str] = set()
PUBLIC: set[str] = set()
NOT_WALKED = {"admin", "djdt"}


def something_of_others(name: str, factory: Factory) -> None:
    """`factory` makes an object that the foreign person must not see, and returns the address's arguments."""
    FACTORIES.setdefault(name, []).append(factory)


def open_to_all(*names: str) -> None:
    """Pages that every signed-in person may open (they show own things or what all may know)."""
    OPEN.update(names)


def public(*names: str) -> None:
    """Addresses that need no sign-in."""
    PUBLIC.update(names)


@dataclass(frozen=True)
class Address:
    """One named address; `arguments` maps each argument to the name of its converter."""

    name: str
    arguments: tuple[tuple[str, str], ...]

    def urls(self) -> Iterator[str]:
        """Addresses to ask for: with what belongs to others, or with made-up ids."""
        if not self.arguments:
            yield reverse(self.name)
            return
        for factory in FACTORIES.get(self.name, []):
            yield reverse(self.name, kwargs=factory())
        for made_up in MADE_UP:
            try:
                yield reverse(
                    self.name, kwargs={key: made_up.get(kind, "nobody") for key, kind in self.arguments}
                )
            except NoReverseMatch:
                continue
            return
        if self.name in FACTORIES:
            return
        raise AssertionError(f"no made-up arguments fit {self.name}: add a factory or a shape")


NOBODYS = uuid.UUID("018f0000-0000-7000-8000-000000000000")
MADE_UP: tuple[dict[str, Any], ...] = (
    {"UUIDConverter": NOBODYS, "RegexGroup": NOBODYS, "IntConverter": 987654321},
    {
        "UUIDConverter": NOBODYS,
        "RegexGroup": "1999-01",
        "IntConverter": 987654321,
        "StringConverter": "1999-01",
    },
    {"UUIDConverter": NOBODYS, "RegexGroup": "987654321"},
)


def addresses() -> list[Address]:
    """All named addresses of the installation but the data admin."""
    return list(_walk(get_resolver().url_patterns, ""))


def _walk(patterns: list[Any], namespace: str) -> Iterator[Address]:
    for entry in patterns:
        if isinstance(entry, URLResolver):
            inner = f"{namespace}{entry.namespace}:" if entry.namespace else namespace
            if inner.rstrip(":") not in NOT_WALKED:
                yield from _walk(entry.url_patterns, inner)
        elif isinstance(entry, URLPattern) and entry.name:
            pattern = entry.pattern
            kinds = {k: type(v).__name__ for k, v in pattern.converters.items()}
            regex = getattr(pattern, "regex", None)
            if regex is not None:
                kinds = {**dict.fromkeys(regex.groupindex, "RegexGroup"), **kinds}
            given = set(entry.default_args or {})
            yield Address(
                f"{namespace}{entry.name}", tuple((k, v) for k, v in kinds.items() if k not in given)
            )


public(
    "pool:agent-file", "pool:agent-install", "pool:agent-unit", "pool:client-file"
)  # programs, the same for everybody
public("healthz", "readyz", "help", "set_language", "accounts:login", "api-schema", "api-docs", "design")
open_to_all(
    "home",
    "accounts:login",
    "accounts:password_change",
    "accounts:profile",
    "accounts:tokens",
    "notify:list",
    "notify:preferences",
    "v1:me",
    "v1:notification-preferences",
    "v1:month-detail",  # cut to what the person may see: empty here
)
