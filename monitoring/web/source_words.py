"""Words for how a fetch of a telemetry source went, for what was wrong with its lines, for what would be matched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy

CODES: dict[str, Any] = {
    "ok": pgettext_lazy("fetch of a source", "answers"),
    "unauthorized": _("refuses our sign-in"),
    "refused": _("answers with an error or elsewhere"),
    "unreachable": _("cannot be reached"),
    "timeout": _("takes too long"),
    "too_large": _("says more than 32 MiB"),
    "bad_address": _("has an address that cannot be used"),
    "cut": _("breaks off in the middle; what was whole is used"),
    "bad_json": _("answers, but not as a Prometheus server"),
    "bad_shape": _("answers, but not with the newest value of each series"),
    "query_refused": _("does not take the query"),
    "empty": _("answers, but tells of no card"),
    "no_targets": _("has no node to fetch from"),
    "secret_missing": _("needs its token or password"),
    "credential_unreadable": _("needs its token or password again"),
}
PROBLEMS: dict[str, Any] = {
    "unknown": _("cards that are not in the inventory"),
    "foreign": _("cards of another node or cluster"),
    "covered": _("cards that a better source reports"),
    "future": _("values from the future"),
    "too_old": _("values that are too old"),
    "not_a_gpu": _("lines that are about no GPU"),
    "bad_line": _("lines that cannot be read"),
    "bad_value": _("values that are no number"),
    "long_line": _("lines that are too long"),
    "too_many_labels": _("lines with too many labels"),
    "too_many_series": _("lines beyond the most that is read"),
    "cut": _("a last line that breaks off"),
    "exit_code": _("nvidia-smi had errors there"),
}
# state of a match → word, tone, icon
MATCHES: dict[str, tuple[Any, str, str]] = {
    "double": (_("claimed twice"), "bad", "warn"),
    "foreign": (_("of another node"), "bad", "warn"),
    "unknown": (_("not in the inventory"), "warn", "search"),
    "covered": (_("left to a better source"), "mute", "check"),
    "placed": (_("known by node and index"), "ok", "check"),
    "taken": (_("known by UUID"), "ok", "check"),
}


def code_word(code: str) -> Any:
    """How a fetch went; an unknown code is shown as it is."""
    return CODES.get(code, code)


def counted(told: Any, words: Mapping[str, Any]) -> list[tuple[Any, str, int]]:
    """(word, code, count) of kept counts, the most frequent first."""
    rows = told.items() if isinstance(told, dict) else ()
    found = [(code, n) for code, n in rows if isinstance(n, int) and n > 0]
    return [(words.get(code, code), code, n) for code, n in sorted(found, key=lambda row: (-row[1], row[0]))]
