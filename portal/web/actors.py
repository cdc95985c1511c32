"""The installation's own parts, as people read who did something."""

from __future__ import annotations

from django.utils.translation import pgettext


def actor_word(name: str) -> str:
    """An actor's name in the reader's language where it is a part of the installation; people's names as they are."""
    words = {
        "scheduler": pgettext("actor", "Scheduler"),
        "executor": pgettext("actor", "Executor"),
        "agent": pgettext("actor", "Agent"),
        "queue": pgettext("actor", "Queue"),
        "policy": pgettext("actor", "Policy"),
        "rules": pgettext("actor", "Rules"),
        "health": pgettext("actor", "Health watch"),
        "node watch": pgettext("actor", "Node watch"),
        "idle watch": pgettext("actor", "Idle watch"),
        "waste watch": pgettext("actor", "Waste watch"),
        "maintenance": pgettext("actor", "Maintenance"),
        "inventory": pgettext("actor", "Inventory"),
        "suspension": pgettext("actor", "Suspension"),
        "approval clock": pgettext("actor", "Approval clock"),
        "first start": pgettext("actor", "First start"),
        "system": pgettext("actor", "The installation"),
    }
    return words.get(name, name)
