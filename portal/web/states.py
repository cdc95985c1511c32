"""Every state's tone, icon and word, in one table for page, API and chart.

A state never shows by colour alone: the badge carries all three. The tables are keyed by kind and by
the stored value; a value that means the same in all kinds stands once in ``COMMON``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from django.utils.functional import Promise
from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy

TONES: Final = ("ok", "info", "hold", "warn", "act", "bad", "mute")


@dataclass(frozen=True, slots=True)
class Look:
    """How one state shows. ``tone`` is one of ``TONES``; ``icon`` a name of the icon set."""

    tone: str
    icon: str
    label: str | Promise


def _l(tone: str, icon: str, label: Any) -> Look:
    return Look(tone, icon, label)


COMMON: Final[dict[str, Look]] = {
    "draft": _l("mute", "edit", _("Draft")),
    "in_approval": _l("hold", "user", _("In approval")),
    "needs_consent": _l("warn", "edit", _("Consent needed")),
    "returned": _l("warn", "return", _("Returned")),
    "approved": _l("ok", "approve", _("Approved")),
    "rejected": _l("bad", "x", _("Rejected")),
    "withdrawn": _l("mute", "return", _("Withdrawn")),
    "queued": _l("info", "clock", _("Queued")),
    "allocated": _l("ok", "play", _("Allocated")),
    "series": _l("info", "list", _("Under way")),
    "reserved": _l("hold", "hold", _("Reserved")),
    "starting": _l("info", "start", _("Starting")),
    "running": _l("ok", "play", _("Running")),
    "stopping": _l("act", "reclaim", _("Stopping")),
    "ended": _l("mute", "check", _("Ended")),
    "exited": _l("mute", "check", _("Exited")),
    "lost": _l("bad", "fault", _("Lost")),
    "waiting": _l("info", "clock", _("Waiting")),
    "pending": _l("hold", "clock", _("Pending")),
    "skipped": _l("mute", "right", _("Skipped")),
    "delegated": _l("hold", "user", _("Delegated")),
    "open": _l("info", "free", pgettext_lazy("state", "Open")),
    "closed": _l("mute", "lock", pgettext_lazy("state", "Closed")),
    "acknowledged": _l("hold", "user", _("Acknowledged")),
    "cancelled": _l("mute", "x", _("Cancelled")),
    "unknown": _l("mute", "nodata", _("No data")),
}

STEP: Final[dict[str, Look]] = {
    "open": _l("hold", "user", _("To decide")),
    "waiting": _l("info", "clock", _("After an earlier step")),
    "skipped": _l("mute", "right", _("Not needed any more")),
}

MEMBER: Final[dict[str, Look]] = {
    "free": _l("mute", "check", _("Seen free")),
    "lost": _l("bad", "fault", _("Lost")),
}

END: Final[dict[str, Look]] = {
    "finished": _l("ok", "check", _("Finished by itself")),
    "failed": _l("bad", "fault", _("Ended with an error")),
    "released": _l("mute", "check", _("Released")),
    "expired": _l("mute", "clock", _("Time was up")),
    "revoked": _l("bad", "x", _("Revoked")),
    "reclaimed": _l("act", "reclaim", _("Reclaimed")),
    "preempted": _l("act", "reclaim", _("Preempted")),
    "node_lost": _l("bad", "fault", _("Node lost")),
    "start_failed": _l("bad", "fault", _("Start failed")),
    "suspended": _l("mute", "lock", _("Holder suspended")),
    "idle": _l("warn", "pause", _("Idle")),
    "over_quota": _l("act", "warn", _("Over quota")),
    "maintenance": _l("mute", "wrench", _("Maintenance")),
}

GPU: Final[dict[str, Look]] = {
    "in_use": _l("ok", "play", _("In use")),
    "idle": _l("warn", "pause", _("Idle")),
    "free": _l("mute", "free", _("Free")),
    "starting": _l("info", "start", _("Starting")),
    "series": _l("info", "list", _("Under way")),
    "reserved": _l("hold", "hold", _("Reserved")),
    "reclaiming": _l("act", "reclaim", _("Reclaiming")),
    "draining": _l("act", "drain", _("Draining")),
    "cordoned": _l("hold", "lock", _("Cordoned")),
    "maintenance": _l("mute", "wrench", _("Maintenance")),
    "split": _l("mute", "split", _("Split")),
    "fault": _l("bad", "fault", _("Fault")),
    "lost": _l("bad", "fault", _("Lost")),
    "no_lease": _l("bad", "warn", _("No lease")),
    "no_data": _l("mute", "nodata", _("No data")),
    "stranded": _l("mute", "nodata", _("Stranded")),
    "ok": _l("ok", "check", _("Healthy")),
    "suspect": _l("warn", "warn", pgettext_lazy("GPU", "Suspect")),
    "vanished": _l("bad", "nodata", _("Vanished")),
    "retired": _l("mute", "x", _("Retired")),
}

NODE: Final[dict[str, Look]] = {
    "ok": _l("ok", "check", _("Healthy")),
    "late": _l("warn", "clock", _("Heartbeat late")),
    "suspect": _l("warn", "warn", _("Suspect")),
    "lost": _l("bad", "fault", _("Lost")),
    "unknown": _l("mute", "nodata", _("Never heard of")),
    "open": _l("ok", "check", pgettext_lazy("node", "Open")),
    "cordoned": _l("hold", "lock", _("Cordoned")),
    "draining": _l("act", "drain", _("Draining")),
    "maintenance": _l("mute", "wrench", _("Maintenance")),
    "retired": _l("mute", "x", _("Retired")),
}

QUOTA: Final[dict[str, Look]] = {
    "within": _l("ok", "check", _("Within guarantee")),
    "borrowing": _l("act", "reclaim", _("Borrowing")),
    "lending": _l("hold", "return", _("Lending")),
    "full": _l("warn", "warn", _("At the limit")),
    "over": _l("bad", "warn", _("Over the limit")),
}

SEVERITY: Final[dict[str, Look]] = {
    "info": _l("info", "info", _("Notice")),
    "warning": _l("warn", "warn", _("Warning")),
    "critical": _l("bad", "fault", _("Critical")),
}

PERSON: Final[dict[str, Look]] = {
    "active": _l("ok", "check", pgettext_lazy("person", "Active")),
    "suspended": _l("mute", "lock", _("Suspended")),
    "valid": _l("ok", "check", _("Valid")),
    "expired": _l("mute", "clock", _("Expired")),
    "revoked": _l("mute", "x", pgettext_lazy("token", "Revoked")),
    "sent": _l("ok", "check", _("Sent")),
    "retrying": _l("warn", "refresh", _("Trying again")),
    "failed": _l("bad", "fault", _("Failed")),
}

RECLAIM: Final[dict[str, Look]] = {
    "notice": _l("warn", "bell", _("Notice given")),
    "checkpoint": _l("act", "refresh", _("Writing a checkpoint")),
    "stopping": _l("act", "reclaim", _("Stopping")),
    "freed": _l("mute", "check", _("Seen free")),
    "fenced": _l("bad", "lock", _("Not seen free")),
    "withdrawn": _l("ok", "return", pgettext_lazy("reclaim", "Withdrawn")),
}

MODE: Final[dict[str, Look]] = {
    "pilot": _l("mute", "info", _("Pilot")),
    "rollout": _l("hold", "play", _("Roll-out")),
    "enforce": _l("ok", "check", _("Enforce")),
}

MAINTENANCE: Final[dict[str, Look]] = {
    "planned": _l("info", "clock", pgettext_lazy("maintenance", "Planned")),
    "announced": _l("warn", "bell", _("Announced")),
    "running": _l("hold", "wrench", pgettext_lazy("maintenance", "Under way")),
    "ended": _l("mute", "check", pgettext_lazy("maintenance", "Over")),
    "cancelled": _l("mute", "x", pgettext_lazy("maintenance", "Called off")),
}

KINDS: Final[dict[str, dict[str, Look]]] = {
    "": {},
    "request": {},
    "step": STEP,
    "allocation": {},
    "lease": {},
    "member": MEMBER,
    "end": END,
    "gpu": GPU,
    "node": NODE,
    "quota": QUOTA,
    "reclaim": RECLAIM,
    "mode": MODE,
    "maintenance": MAINTENANCE,
    "severity": SEVERITY,
    "person": PERSON,
    "token": PERSON,
    "delivery": PERSON,
}


def look(state: object, kind: str = "") -> Look:
    """The look of a stored state. The kind's own table first, then the common one, then those of GPU,
    node and quota, so that a badge without its kind is still right; a value that nobody knows shows as
    its own words, grey with the no-data icon, never as an error."""
    key = str(getattr(state, "value", state) or "unknown").lower()
    for table in (KINDS.get(kind, {}), COMMON, GPU, NODE, QUOTA, SEVERITY, PERSON, END):
        if key in table:
            return table[key]
    return Look("mute", "nodata", key.replace("_", " ").capitalize())


def tone(state: object, kind: str = "") -> str:
    """The tone alone, for rows, tiles and chart marks."""
    return look(state, kind).tone


def as_json(kind: str) -> dict[str, list[str]]:
    """``{state: [tone, icon, word]}`` of a kind for scripts (``json_script``), words in the active language."""
    table = {**KINDS.get(kind, {})} or dict(COMMON)
    return {key: [v.tone, v.icon, str(v.label)] for key, v in table.items()}
