"""Facts of incidents as people read them: what a fact is called, and moments in the reader's time zone."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.utils.dateparse import parse_datetime
from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext

from portal.ops.kinds import Text, fact_words

NAMES: dict[str, Text] = {
    "allocation": _("Allocation"),
    "at": _("Seen at"),
    "belongs_to": _("Belongs to"),
    "cluster": _("Cluster"),
    "code": _("Code"),
    "commands": _("Commands"),
    "count": _("Count"),
    "detail": _("Detail"),
    "differences": _("Differences"),
    "driver": _("Driver"),
    "due_at": _("Was due at"),
    "effect": _("What is done"),
    "ended_at": _("Ended at"),
    "error": _("Error"),
    "errors": _("New errors"),
    "event": _("Event"),
    "expected": _("Expected"),
    "fetch": _("Last fetch"),
    "first": _("First"),
    "flavour": _("Flavour"),
    "for_s": _("For seconds"),
    "gen": _("PCIe generation"),
    "good_at": _("Good last at"),
    "gpu": _("GPU index"),
    "health": _("Health"),
    "hostname": _("Host name"),
    "index": _("GPU index"),
    "last_at": _("Last seen at"),
    "links": _("NVLinks up"),
    "meaning": _("Meaning"),
    "measure": _("Measure"),
    "metric": _("Measure"),
    "node": _("Node"),
    "nodes": _("Nodes"),
    "of": _("Of"),
    "processes": _("Processes"),
    "profiles": _("Profiles"),
    "reason": _("Reason"),
    "remap_corr": _("Rows remapped, correctable"),
    "remap_uncorr": _("Rows remapped, uncorrectable"),
    "reported_by": _("Reported by"),
    "request": _("Request"),
    "retired_pages": _("Retired pages"),
    "rows": _("Rows"),
    "rule": _("Rule"),
    "since": _("Since"),
    "since_driver_load": _("Errors since the driver was loaded"),
    "site": _("Site"),
    "skew_ms": _("Clock is off, ms"),
    "subjects": _("Affected"),
    "temp_c": _("Temperature, °C"),
    "text": _("Text of the driver"),
    "threshold": _("Threshold"),
    "times": _("Times"),
    "topic": _("Topic"),
    "total": _("In all"),
    "user": _("User"),
    "usual": _("Usual here"),
    "uuid": "UUID",
    "was": _("Was"),
    "which": _("Which"),
    "width": _("PCIe lanes"),
    "work": _("Outside work"),
    "worst": _("Worst value"),
    "xid_name": _("Name of the code"),
}
"""What often-used facts are called; others keep the name that the code gave them."""


def fact_rows(facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Facts by their keys: ``key``, ``name`` (None where nobody named it), ``value``, or ``moment`` instead where it is
    one. What is empty is left out."""
    rows = []
    for key, value in sorted(facts.items()):
        if value in (None, "", [], {}):
            continue
        moment = _moment(value)
        rows.append(
            {
                "key": key,
                "name": NAMES.get(key),
                "moment": moment,
                "value": None if moment else _plain(fact_words(key, value)),
            }
        )
    return rows


def _plain(value: Any) -> Any:
    """A list of words as one enumeration."""
    if isinstance(value, list) and all(isinstance(one, str | int) for one in value):
        return pgettext("list", ", ").join(str(one) for one in value)
    return value


def _moment(value: Any) -> datetime | None:
    """An ISO moment with its zone; anything else is none."""
    if not isinstance(value, str) or "T" not in value:
        return None
    try:
        found = parse_datetime(value)
    except ValueError:
        return None
    return found if found is not None and found.tzinfo is not None else None
