"""A quota change as a table: per field the number in force, the one asked, the one granted."""

from __future__ import annotations

from typing import Any

from django.utils.translation import gettext as _

from quotas.models import QuotaChange
from quotas.web.words import gpus

FIELDS = ("guaranteed", "borrow_limit", "lend_limit", "hard_cap", "weight")


def field_word(name: str) -> str:
    """The name of a number as the pages say it."""
    words = {
        "guaranteed": _("Guaranteed"), "borrow_limit": _("Borrow limit"), "lend_limit": _("Lend limit"),
        "hard_cap": _("Hard cap"), "weight": _("Over-quota weight"), "lend": _("Lent for the time"),
    }  # fmt: skip
    return words.get(name, name)


def number_word(name: str, values: dict[str, Any]) -> str:
    """Its value: GPUs, ∞ for unlimited, a dash where it does not apply."""
    if name not in values:
        return "–"
    return str(values[name]) if name == "weight" else gpus(values[name])


def change_rows(change: QuotaChange) -> list[dict[str, Any]]:
    """Rows of a change; those that differ are marked."""
    names = ("lend",) if change.lender_id is not None else FIELDS
    return [
        {
            "label": field_word(name),
            "old": number_word(name, change.old),
            "asked": number_word(name, change.asked),
            "granted": number_word(name, change.granted) if change.granted else "",
            "differs": change.old.get(name) != change.asked.get(name),
        }
        for name in names
    ]
