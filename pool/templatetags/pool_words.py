"""`{% load pool_words %}`: what happened to an allocation, and what an incident of the pool means, in words."""

from __future__ import annotations

from typing import Any

from django import template
from django.utils.translation import gettext as _
from django.utils.translation import pgettext

from pool.models import Allocation, AllocationEvent, QueueEntry, ReclaimCase
from pool.web import ladder_words
from pool.web.reasons import explain
from portal.ops.kinds import kind_of

register = template.Library()


def _where(facts: dict[str, Any]) -> str:
    return str(facts.get("node") or "")


@register.filter
def event_words(event: AllocationEvent) -> str:
    """One sentence for a line of an allocation's history."""
    facts = event.facts or {}
    where = {"node": _where(facts), "code": facts.get("exit_code"), "index": facts.get("index", "")}
    error = facts.get("error") or {}
    if event.kind == "reserved":
        nodes = facts.get("nodes") or []
        return _("Placed on %(nodes)s") % {"nodes": ", ".join(map(str, nodes))}
    if event.kind == "member_exited":
        if facts.get("signal"):
            return _("Ended on %(node)s by signal %(signal)s") % {**where, "signal": facts["signal"]}
        return _("Ended on %(node)s with exit code %(code)s") % where
    if event.kind in ("start_failed", "member_start_failed"):
        return _("Could not start: %(code)s") % {"code": error.get("code", "")}
    if event.kind == "ended":
        reason = {"reason": _end_reason(str(facts.get("reason", "")))}
        if not event.allocation.charge_milli:
            return _("Ended: %(reason)s; nothing of it runs any more") % reason
        return _("Ended: %(reason)s; all its GPUs were seen free") % reason
    if event.kind == "stopping":
        cause = str(facts.get("cause") or facts.get("reason") or "")
        return _("Stopping: %(cause)s") % {"cause": _cause(cause)}
    if event.kind == "reclaim_notice":
        return _("Notice of reclaim: %(cause)s") % {"cause": _cause(str(facts.get("cause", "")))}
    if event.kind == "reclaim_withdrawn":
        return _("Notice withdrawn: %(why)s") % {
            "why": ladder_words.withdrawn_words(str(facts.get("why", "")))
        }
    if event.kind == "still_needed":
        return _("Still needed (%(n)s of %(limit)s times)") % {
            "n": facts.get("times"),
            "limit": facts.get("limit"),
        }
    table = {
        "member_starting": _("%(node)s begins to start it") % where,
        "member_running": _("%(node)s confirms: its process runs") % where,
        "member_free": _("Seen free on %(node)s") % where,
        "member_lost": _("%(node)s was lost") % where,
        "adopted": _("Taken in while it ran: %(work)s") % {"work": facts.get("work")},
        "running": _("Running on all its nodes"),
        "extended": _("Extended"),
        "expiry_warning": _("Its holder was told that it ends soon"),
        "checkpoint_asked": _("Asked to save itself before it is stopped"),
        "checkpoint_done": _("Its checkpoint is written"),
        "checkpoint_failed": _("Its checkpoint failed"),
        "checkpoint_with_stop": _("Its checkpoint signal goes out with the stop"),
        "idle_warning": _("Its holder was told that it counts as idle"),
        "remote_opened": _remote(str(facts.get("kind", ""))),
        "health_ok": _("Its health check succeeds on %(node)s") % where,
        "health_failed": _("Its health check fails on %(node)s: %(why)s")
        % {**where, "why": str(facts.get("why", ""))},
        "over_share": _("It uses %(used)s MiB of the %(limit)s MiB of its share")
        % {"used": facts.get("used_mib"), "limit": facts.get("limit_mib")},
        "members_stopping": _("Some of its nodes are taken back"),
        "shrunk": _("Goes on with fewer nodes"),
        "handover_refused": _("A GPU was not free at the hand-over; the work goes elsewhere"),
        "fenced": _("Fenced: its time on a lost node has passed"),
        "not_free_yet": _("Stopped, but a GPU is still in use; it is looked at again"),
        "gpu_vanished": _("GPU %(index)s of %(node)s vanished") % where,
        "gpu_back": _("GPU %(index)s of %(node)s is back") % where,
    }
    return table.get(event.kind, event.kind.replace("_", " "))


def _remote(kind: str) -> str:
    """What its holder does in it from their own machine."""
    table = {
        "shell": _("A terminal was opened in it"),
        "get": _("Files of its work folder were fetched"),
        "put": _("Files were sent into its work folder"),
        "forward": _("A port of it was forwarded"),
    }
    return table.get(kind, kind)


def lacks_words(lacking: str) -> str:
    """What keeps a node from something, by the agent's code."""
    table = {
        "no_mps_control": _("the driver's MPS control program is missing: shares are watched, not limited"),
        "no_podman": _("podman is not installed"),
        "no_cdi": _("no CDI files name its GPUs (nvidia-ctk cdi generate)"),
        "not_root": _("the agent does not run as root"),
        "no_nvidia_smi": _("the driver's tools are missing"),
    }
    return table.get(lacking, lacking)


@register.filter
def node_abilities(facts: dict[str, Any]) -> list[tuple[str, bool, str]]:
    """(what, can, why not) of a node, as its agent tells; nothing where it did not tell."""
    names = {
        "fractions": _("Limits of fractions"),
        "containers": _("Container images"),
        "mig": _("New MIG layouts"),
        "accounts": _("People's own accounts"),
        "holds": _("Devices for one person"),
    }
    can = facts.get("can") or {}
    return [
        (str(label), bool(can[code].get("ok")), lacks_words(str(can[code].get("reason") or "")))
        for code, label in names.items()
        if isinstance(can.get(code), dict)
    ]


def _end_reason(code: str) -> str:
    labels = {str(value): str(label) for value, label in Allocation.EndReason.choices}
    return labels.get(code, code)


def _cause(code: str) -> str:
    labels = {str(value): str(label) for value, label in ReclaimCase.Cause.choices}
    return labels.get(code) or _end_reason(code)


@register.filter
def event_tone(event: AllocationEvent) -> str:
    """Colour of the mark before the line."""
    if event.kind in (
        "running",
        "member_running",
        "member_free",
        "reserved",
        "checkpoint_done",
        "reclaim_withdrawn",
        "still_needed",
        "health_ok",
    ):
        return "ok"
    if event.kind in (
        "start_failed",
        "member_start_failed",
        "member_lost",
        "gpu_vanished",
        "not_free_yet",
        "checkpoint_failed",
        "health_failed",
        "over_share",
    ):
        return "bad"
    if event.kind in ("reclaim_notice", "expiry_warning", "idle_warning", "checkpoint_asked", "stopping"):
        return "warn"
    return "info"


@register.filter
def incident_words(kind: str) -> str:
    """What kind of incident it is."""
    return str(kind_of(kind).title)


@register.filter
def wait_words(entry: QueueEntry) -> str:
    """Why a request waits, in one sentence."""
    flavour = entry.request.flavour
    return explain(entry.reason, entry.figures, flavour.name if flavour else "").headline


@register.filter
def rule_words(code: str) -> str:
    """The rule of a reclaim case, in words."""
    return ladder_words.rule_words(str(code))


@register.filter
def withdrawn_words(code: str) -> str:
    """Why a reclaim case was withdrawn, in words."""
    return ladder_words.withdrawn_words(str(code))


@register.filter
def op_words(op: str) -> str:
    """A step of a decision, as the beginning of its line."""
    table = {
        "place": pgettext("decision", "Start"),
        "reserve": pgettext("decision", "Promise to"),
        "evict": pgettext("decision", "Take back"),
        "keep": pgettext("decision", "Keep places for"),
        "move": pgettext("decision", "Move"),
        "layout": pgettext("decision", "Split a card anew for"),
    }
    return table.get(op, op)


@register.filter
def step_words(step: str) -> str:
    """What a cycle spent its time on."""
    table = {
        "read": _("Reading what changed"),
        "decide": _("Deciding"),
        "keep": _("Keeping what it saw"),
        "apply": _("Carrying it out"),
        "write": _("Writing why others wait"),
    }
    return table.get(step, step)
