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
    "submitted": _l("hold", "user", _("In approval")),
    "in_approval": _l("hold", "user", _("In approval")),
    "pending": _l("hold", "clock", _("Pending")),
    "waiting": _l("info", "clock", _("Waiting")),
    "consent": _l("warn", "edit", _("Consent needed")),
    "consent_needed": _l("warn", "edit", _("Consent needed")),
    "returned": _l("warn", "return", _("Returned")),
    "approved": _l("ok", "approve", _("Approved")),
    "rejected": _l("bad", "x", _("Rejected")),
    "withdrawn": _l("mute", "return", _("Withdrawn")),
    "cancelled": _l("mute", "x", _("Cancelled")),
    "queued": _l("info", "clock", _("Queued")),
    "planned": _l("hold", "hold", _("Reserved")),
    "reserved": _l("hold", "hold", _("Reserved")),
    "allocated": _l("hold", "hold", _("Reserved")),
    "starting": _l("info", "start", _("Starting")),
    "running": _l("ok", "play", _("Running")),
    "active": _l("ok", "check", _("Active")),
    "ending": _l("act", "reclaim", _("Ending")),
    "stopping": _l("act", "reclaim", _("Stopping")),
    "terminating": _l("act", "reclaim", _("Ending")),
    "releasing": _l("act", "reclaim", _("Releasing")),
    "released": _l("mute", "check", _("Released")),
    "ended": _l("mute", "check", _("Ended")),
    "done": _l("mute", "check", _("Ended")),
    "completed": _l("mute", "check", _("Ended")),
    "finished": _l("mute", "check", _("Ended")),
    "exited": _l("mute", "check", _("Ended")),
    "expired": _l("mute", "clock", _("Expired")),
    "failed": _l("bad", "fault", _("Failed")),
    "failed_start": _l("bad", "fault", _("Start failed")),
    "lost": _l("bad", "fault", _("Lost")),
    "requeued": _l("info", "refresh", _("Queued again")),
    "preempted": _l("act", "reclaim", _("Preempted")),
    "skipped": _l("mute", "right", _("Skipped")),
    "delegated": _l("hold", "user", _("Delegated")),
    "escalated": _l("warn", "up", _("Escalated")),
    "open": _l("info", "free", pgettext_lazy("state", "Open")),
    "closed": _l("mute", "lock", pgettext_lazy("state", "Closed")),
    "suspended": _l("mute", "lock", _("Suspended")),
    "revoked": _l("mute", "x", _("Revoked")),
    "used": _l("mute", "check", _("Used")),
    "valid": _l("ok", "check", _("Valid")),
    "sent": _l("ok", "check", _("Sent")),
    "read": _l("mute", "check", pgettext_lazy("notice", "Read")),
    "unread": _l("info", "bell", _("Unread")),
    "retrying": _l("warn", "refresh", _("Trying again")),
    "unknown": _l("mute", "nodata", _("No data")),
}

GPU: Final[dict[str, Look]] = {
    "in_use": _l("ok", "play", _("In use")),
    "idle": _l("warn", "pause", _("Idle")),
    "free": _l("mute", "free", _("Free")),
    "starting": _l("info", "start", _("Starting")),
    "reserved": _l("hold", "hold", _("Reserved")),
    "reclaiming": _l("act", "reclaim", _("Reclaiming")),
    "draining": _l("act", "drain", _("Draining")),
    "cordoned": _l("hold", "lock", _("Cordoned")),
    "split": _l("mute", "split", _("Split")),
    "fault": _l("bad", "fault", _("Fault")),
    "lost": _l("bad", "fault", _("Lost")),
    "no_data": _l("mute", "nodata", _("No data")),
    "maintenance": _l("mute", "wrench", _("Maintenance")),
    "no_lease": _l("bad", "warn", _("No lease")),
    "foreign": _l("bad", "warn", _("No lease")),
    "stranded": _l("mute", "nodata", _("Stranded")),
    "unchecked": _l("act", "clock", _("Being checked")),
    "healthy": _l("ok", "check", _("Healthy")),
    "suspect": _l("warn", "warn", _("Suspect")),
    "degraded": _l("warn", "warn", _("Degraded")),
    "retired": _l("mute", "x", _("Retired")),
}

NODE: Final[dict[str, Look]] = {
    "healthy": _l("ok", "check", _("Healthy")),
    "up": _l("ok", "check", _("Healthy")),
    "ready": _l("ok", "check", _("Healthy")),
    "online": _l("ok", "check", _("Healthy")),
    "degraded": _l("warn", "warn", _("Degraded")),
    "cordoned": _l("hold", "lock", _("Cordoned")),
    "draining": _l("act", "drain", _("Draining")),
    "drained": _l("hold", "lock", _("Drained")),
    "maintenance": _l("mute", "wrench", _("Maintenance")),
    "suspect": _l("warn", "warn", _("Suspect")),
    "lost": _l("bad", "fault", _("Lost")),
    "down": _l("bad", "fault", _("Down")),
    "enrolling": _l("info", "start", _("Enrolling")),
    "new": _l("info", "plus", pgettext_lazy("node", "New")),
    "retired": _l("mute", "x", _("Retired")),
    "no_data": _l("mute", "nodata", _("No data")),
    "no_agent": _l("mute", "nodata", _("No agent")),
}

QUOTA: Final[dict[str, Look]] = {
    "within": _l("ok", "check", _("Within guarantee")),
    "borrowing": _l("act", "reclaim", _("Borrowing")),
    "lending": _l("hold", "return", _("Lending")),
    "over": _l("bad", "warn", _("Over the limit")),
    "full": _l("warn", "warn", _("At the limit")),
}

SEVERITY: Final[dict[str, Look]] = {
    "info": _l("info", "info", _("Notice")),
    "low": _l("info", "info", _("Low")),
    "warning": _l("warn", "warn", _("Warning")),
    "warn": _l("warn", "warn", _("Warning")),
    "high": _l("bad", "warn", _("High")),
    "critical": _l("bad", "fault", _("Critical")),
    "error": _l("bad", "fault", pgettext_lazy("severity", "Error")),
    "resolved": _l("ok", "check", _("Resolved")),
    "open": _l("warn", "warn", pgettext_lazy("state", "Open")),
}

KINDS: Final[dict[str, dict[str, Look]]] = {
    "": {},
    "request": {},
    "step": {},
    "allocation": {},
    "lease": {},
    "job": {},
    "user": {},
    "token": {},
    "month": {},
    "gpu": GPU,
    "node": NODE,
    "quota": QUOTA,
    "severity": SEVERITY,
}


def look(state: object, kind: str = "") -> Look:
    """The look of a stored state. The kind's own table first, then the common one, then those of GPU,
    node and quota, so that a badge without its kind is still right; a value that nobody knows shows as
    its own words, grey with the no-data icon, never as an error."""
    key = str(getattr(state, "value", state) or "unknown").lower()
    for table in (KINDS.get(kind, {}), COMMON, GPU, NODE, QUOTA, SEVERITY):
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
