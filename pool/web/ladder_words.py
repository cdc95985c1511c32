"""The reclaim ladder in words: its steps for the allocation page, its rules, and why something was withdrawn."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import pgettext

from pool.models import ReclaimCase
from portal.kernel.clock import now
from portal.web import formats

Step = ReclaimCase.Step
CLOSED = frozenset({Step.FREED, Step.FENCED, Step.WITHDRAWN})


def rule_words(code: str) -> str:
    """The rule that a case rests on."""
    table = {
        "lease_end": _("its time is up"),
        "administrator": _("an administrator revoked it"),
        "user_suspended": _("its holder was suspended"),
        "node_lost": _("its node fell silent"),
        "node_drain": _("its node is drained"),
        "maintenance_window": _("a maintenance window begins"),
        "idle_window": _("both signals were quiet for the whole idle window"),
        "over_quota": _("its department is over its quota"),
        "owner_below_guarantee": _("an owner below its guarantee asks for it"),
        "owner_within_guarantee": _("an owner asks for what is guaranteed to it"),
        "within_fair_share": _("another borrower is below its fair share"),
        "higher_priority_same_department": _("more important work of the same department waits"),
        "consolidate": _("it is moved, so that a larger request fits"),
    }
    return table.get(code, code.replace("_", " "))


def withdrawn_words(code: str) -> str:
    """Why a notice was taken back."""
    table = {
        "requester_left": _("who wanted its place waits no more"),
        "not_needed": _("who wanted its place started elsewhere"),
        "still_needed": _("its holder still needs it"),
        "idle_busy": _("it is in use again"),
        "idle_unknown": _("there is no data, and that is never idle"),
        "idle_within_guarantee": _("its department is within its guarantee again"),
        "node_open_again": _("its node is open again"),
        "window_over": _("the maintenance was called off or is over"),
        "within_quota": _("its department is within its quota again"),
    }
    return table.get(code, code.replace("_", " "))


def hook_words(case: ReclaimCase) -> str:
    """How the work is told to save itself."""
    table = {
        "signal": _("by a signal"),
        "command": _("by its command"),
        "url": _("by a call to its address"),
    }
    return table.get(case.hook, "")


def ladder_steps(case: ReclaimCase) -> list[dict[str, Any]]:
    """Notice, checkpoint (where there is a hook), stop, seen free: each with its stamp or when it is due."""
    rows = [_notice(case)]
    withdrawn = case.step == Step.WITHDRAWN
    if case.checkpoint_at or (case.hook and not withdrawn):
        rows.append(_checkpoint(case))
    if withdrawn:
        note = _at(case.closed_at, withdrawn_words(case.withdrawn_why))
        return [*rows, {"s": "done", "title": pgettext("reclaim", "Withdrawn"), "note": note}]
    return [*rows, _stop(case), _free(case)]


def _at(moment: datetime | None, words: str = "") -> SafeString | str:
    """A moment on the reader's clock, and what is to be said of it."""
    if moment is None:
        return words
    shown = formats.moment(moment, "", now())
    return format_html('<time datetime="{}">{}</time> {}', moment.isoformat(timespec="seconds"), shown, words)


def _notice(case: ReclaimCase) -> dict[str, Any]:
    current = case.step == Step.NOTICE
    note = _at(case.grace_until, _("it is stopped, unless withdrawn")) if current else _at(case.noticed_at)
    return {"s": "now" if current else "done", "title": pgettext("reclaim", "Notice"), "note": note}


def _checkpoint(case: ReclaimCase) -> dict[str, Any]:
    if case.step == Step.NOTICE:
        return {"s": "todo", "title": _("Checkpoint"), "note": _at(case.hook_at, hook_words(case))}
    failed = any(
        not one.get("ok") for name, one in case.checkpoint_result.items() if isinstance(one, Mapping)
    )
    if case.step == Step.CHECKPOINT:
        return {"s": "now", "title": _("Checkpoint"), "note": _at(case.checkpoint_at, hook_words(case))}
    words = _("it failed") if failed else ""
    return {
        "s": "bad" if failed else "done",
        "title": _("Checkpoint"),
        "note": _at(case.checkpoint_done_at or case.checkpoint_at, words),
    }


def _stop(case: ReclaimCase) -> dict[str, Any]:
    if case.step in (Step.NOTICE, Step.CHECKPOINT):
        return {
            "s": "todo",
            "title": pgettext("reclaim", "Stop"),
            "note": _at(case.grace_until, _("at the latest")),
        }
    words = _("killed, it did not end by itself") if case.escalated_at else ""
    moment = case.stopped_at or case.stop_sent_at
    state = "now" if case.step == Step.STOPPING and case.stopped_at is None else "done"
    return {"s": state, "title": pgettext("reclaim", "Stop"), "note": _at(moment, words)}


def _free(case: ReclaimCase) -> dict[str, Any]:
    title = _("Seen free")
    if case.step == Step.FREED:
        return {"s": "done", "title": title, "note": _at(case.seen_free_at)}
    if case.step == Step.FENCED:
        return {"s": "bad", "title": title, "note": _("not seen: its node was lost")}
    after = _("then it may be granted again")
    return {
        "s": "now" if case.step == Step.STOPPING and case.stopped_at else "todo",
        "title": title,
        "note": after,
    }
