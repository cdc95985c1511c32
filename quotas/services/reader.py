"""Reading what somebody typed or sent, field by field, with every problem noted beside its field.

Values may come as JSON types or as text; amounts are whole numbers in either form, never fractions, never
words.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from django.utils.dateparse import parse_datetime
from django.utils.translation import gettext as _

from portal.kernel.errors import FieldProblem

BIGGEST = 2_000_000_000
EARLIEST, LATEST = 1970, 9990
"""Years that a date may name: with room at both ends, so that it stays a date in every time zone."""


class Reader:
    """Reads single fields and collects their problems."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self.problems: list[FieldProblem] = []
        self.out: dict[str, Any] = {}

    def wrong(self, name: str, detail: object) -> None:
        """Note a problem of a field; the first one of a field stays."""
        if all(problem["pointer"] != name for problem in self.problems):
            self.problems.append({"pointer": name, "detail": detail})

    def raw(self, name: str) -> Any:
        """What was sent; text without blanks around it, "" for nothing."""
        value = self.values.get(name)
        return value.strip() if isinstance(value, str) else ("" if value is None else value)

    def whole(self, name: str, default: int | None, low: int, high: int = BIGGEST) -> int | None:
        """A whole number within [low, high]; nothing sent gives the default."""
        value = self.raw(name)
        if value == "":
            self.out[name] = default
            return default
        number: int | None = None
        if isinstance(value, str) and re.fullmatch(r"[+-]?\d{1,18}", value):
            number = int(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            number = value
        if number is None:
            self.wrong(name, _("A whole number is needed here, for example {n}.").format(n=max(low, 1)))
            self.out[name] = default
            return default
        if number < low:
            self.wrong(name, _("The minimum is {n}.").format(n=low))
        elif number > high:
            self.wrong(name, _("The maximum is {n}.").format(n=high))
        self.out[name] = min(max(number, low), high)
        return number

    def text(self, name: str, longest: int, *, needed: object = None) -> str:
        """Text of limited length; ``needed`` is the error where it is empty."""
        value = self.raw(name)
        if not isinstance(value, str):
            self.wrong(name, _("Text is needed here."))
            value = ""
        if "\x00" in value:
            self.wrong(name, _("This text has a sign in it that cannot be stored."))
            value = value.replace("\x00", "")
        if len(value) > longest:
            self.wrong(name, _("At most {n} signs.").format(n=longest))
            value = value[:longest]
        if not value and needed:
            self.wrong(name, needed)
        self.out[name] = value
        return str(value)

    def choice(self, name: str, choices: list[str], default: str) -> str:
        """One of a few values."""
        value = self.raw(name) or default
        if value not in choices:
            self.wrong(name, _("Choose one of: {choices}.").format(choices=", ".join(choices)))
            value = default
        self.out[name] = value
        return str(value)

    def flag(self, name: str, default: bool) -> bool:
        """Yes or no, as JSON or as a form sends it."""
        value = self.raw(name)
        if value == "":
            self.out[name] = default
        elif isinstance(value, bool):
            self.out[name] = value
        elif str(value).lower() in ("1", "true", "yes", "on"):
            self.out[name] = True
        elif str(value).lower() in ("0", "false", "no", "off"):
            self.out[name] = False
        else:
            self.wrong(name, _("Yes or no is needed here."))
            self.out[name] = default
        return bool(self.out[name])

    def moment(self, name: str) -> datetime | None:
        """An aware time (ISO 8601 with its zone), or None."""
        value = self.raw(name)
        if isinstance(value, str) and value:
            try:
                value = parse_datetime(value)
            except ValueError:
                value = None
            if value is None:
                self.wrong(
                    name,
                    _("A date and time with its zone is needed here, for example 2026-06-17T09:00+08:00."),
                )
        if isinstance(value, datetime) and value.tzinfo is None:
            self.wrong(name, _("The time needs its zone, for example +08:00."))
            value = None
        if isinstance(value, datetime) and not EARLIEST <= value.year <= LATEST:
            self.wrong(name, _("This date is out of range."))
            value = None
        found = value if isinstance(value, datetime) else None
        self.out[name] = found
        return found

    def names(self, name: str, most: int = 100) -> list[str]:
        """A list of short names, sent as a list or as lines or commas; not kept in ``out``."""
        value = self.values.get(name) or []
        parts = re.split(r"[,\n]", value) if isinstance(value, str) else value
        if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
            self.wrong(name, _("A list of names is needed here."))
            return []
        kept = [part.strip()[:200] for part in parts if part.strip()]
        return list(dict.fromkeys(kept))[:most]

    def part(self, name: str, keys: set[str], help_text: object) -> Reader | None:
        """A reader of an object sent as this field: None where nothing was sent, or what was sent is no
        object or has unknown keys (which is noted)."""
        value = self.values.get(name)
        if value in (None, "", {}):
            return None
        if not isinstance(value, Mapping) or set(value) - keys:
            self.wrong(name, help_text)
            return None
        return Reader(value)

    def take(self, name: str, inner: Reader) -> None:
        """The problems of an inner reader as problems of the field, and of the part itself."""
        for problem in inner.problems:
            self.problems.append({**problem, "pointer": f"{name}/{problem['pointer']}"})
