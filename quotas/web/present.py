"""Requests, steps and history in words for pages: short sentences with their figures, in the reader's
language.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from django.utils.dateparse import parse_datetime
from django.utils.html import format_html, format_html_join
from django.utils.safestring import mark_safe
from django.utils.translation import gettext as _
from django.utils.translation import pgettext

from portal.web.actors import actor_word
from quotas.models import ApprovalStep, CapacityRequest, QuotaChange
from quotas.selectors.approvers import Deciders
from quotas.selectors.series import Progress
from quotas.selectors.shapes import AskShape, amount_text, flavour_text, place_text
from quotas.services.approvals import consent_until
from quotas.web.series_words import held_words, progress_text, series_text
from quotas.web.words import end_word, hours, when

S = CapacityRequest.State


def role_word(role: str) -> str:
    """The word for who decides."""
    return {"lead": _("lead"), "pool_admin": _("administrator"), "finance": _("finance")}.get(role, role)


def listed(parts: Iterable[str]) -> str:
    """Words in a row, in the reader's punctuation."""
    return pgettext("list", ", ").join(part for part in parts if part)


def title_of(request: CapacityRequest, names: Mapping[str, str] | None = None) -> str:
    """``8 × H800 80GB``."""
    text = amount_text(AskShape.of(request), flavour_text(request, names))
    return f"{request.array_count} × ({text})" if request.array_count else text


def sub_of(request: CapacityRequest) -> str:
    """``1 node × 8, 24 h, training``."""
    many = series_text(request)
    place = "" if request.is_service else place_text(AskShape.of(request))
    length = "" if request.window else hours(request.duration_s)
    return listed([place, many, length, class_word(request.work_class)])


def class_word(work_class: str) -> str:
    """The class in one word."""
    words = {"training": _("training"), "inference": _("inference"), "interactive": _("interactive")}
    return words.get(work_class, work_class)


def open_step(request: CapacityRequest) -> ApprovalStep | None:
    """The open step among ``shown_steps``."""
    return next((s for s in getattr(request, "shown_steps", []) if s.state == "open"), None)


def row_of(
    request: CapacityRequest,
    names: Mapping[str, str],
    deciders: Deciders | None = None,
    progress: Mapping[int, Progress] | None = None,
) -> dict[str, Any]:
    """One line of a list: what is asked, at which step, who acts next, by when."""
    step = open_step(request)
    row: dict[str, Any] = {
        "r": request,
        "title": title_of(request, names),
        "sub": sub_of(request),
        "note": "",
        "who": "",
        "when": None,
        "when_note": "",
        "you": False,
        "act": pgettext("button", "Open"),
    }
    if request.state == S.IN_APPROVAL and step is not None:
        same = [s for s in getattr(request, "shown_steps", []) if s.round == step.round]
        row["note"] = _("step %(n)s of %(all)s") % {"n": step.position, "all": len(same)}
        row["who"] = who_decides(step, request, deciders)
        row["when"] = step.due_at
        row["when_note"] = _("then the level above")
    elif request.state == S.NEEDS_CONSENT:
        row |= {
            "note": _("approved with a change"),
            "you": True,
            "when": consent_until(request),
            "act": _("Review"),
        }
        row["title"] = change_title(request, names)
    elif request.state == S.RETURNED:
        row |= {"note": _("change it and send it again"), "you": True, "act": pgettext("button", "Change")}
    elif request.state == S.DRAFT:
        row |= {"note": _("not sent yet"), "you": True, "act": _("Continue")}
    elif request.state == S.SERIES:
        found = (progress or {}).get(request.pk)
        row |= {"note": progress_text(found) if found is not None else "", "who": _("Scheduler")}
    elif (held := held_words(request)) is not None:
        row |= {"note": held["head"], "act": _("Why"), "you": request.held == "failed"}
    elif request.state == S.QUEUED:
        row |= {"note": _("the scheduler looks every few seconds"), "who": _("Scheduler"), "act": _("Why")}
    elif request.state == S.ALLOCATED:
        row |= {"note": _("reserved, starting or running"), "who": _("the node")}
    else:
        row |= {
            "note": end_word(request.end_reason),
            "when": request.ended_at or request.decided_at,
            "act": _("Ask again"),
        }
    return row


def change_title(request: CapacityRequest, names: Mapping[str, str]) -> str:
    """``8 → 4 × H800 80GB`` while a changed amount waits for consent."""
    values = request.consent_change.get("values", {})
    shape = AskShape.of(request)
    wanted = AskShape.of(
        {
            **{n: getattr(shape, n) for n in shape.__slots__},
            **{k: v for k, v in values.items() if k != "duration_s"},
        }
    )
    if wanted.pieces != shape.pieces:
        return f"{shape.pieces} → {amount_text(wanted, flavour_text(request, names))}"
    return title_of(request, names)


def who_decides(step: ApprovalStep, subject: CapacityRequest | QuotaChange, deciders: Deciders | None) -> str:
    """Names of those who are asked first, or their role."""
    if deciders is not None:
        names = deciders.names_of(deciders.primary(step, subject))
        if names:
            shown = listed(names[:2])
            return (
                shown
                if len(names) <= 2
                else _("%(names)s or %(n)s more") % {"names": shown, "n": len(names) - 2}
            )
    where = step.department.name if step.department is not None else ""
    return f"{role_word(step.role)} {where}".strip()


def path_of_request(request: CapacityRequest, deciders: Deciders) -> list[dict[str, Any]]:
    """The stepper: submitted, each agreement of the present round, queued, running, ended."""
    items: list[dict[str, Any]] = []
    steps = list(getattr(request, "shown_steps", []))
    last_round = max((s.round for s in steps), default=0)
    sent = request.submitted_at is not None
    items.append(
        {
            "s": "done" if sent else "now",
            "title": _("Submitted") if sent else _("Draft"),
            "note": note(request.requester.get_full_name(), when(request.submitted_at)),
        }
    )
    for step in steps:
        if step.round != last_round or (
            step.state == "skipped" and request.state not in (S.WITHDRAWN, S.REJECTED)
        ):
            continue
        items.append(_step_item(step, request, deciders))
    if (
        not [s for s in steps if s.round == last_round and s.state != "skipped"]
        and request.queued_at is not None
    ):
        items.append({"s": "done", "title": _("Approved"), "note": note(_("by policy"), request.policy_rule)})
    if request.state in (S.REJECTED, S.WITHDRAWN):
        title = _("Rejected") if request.state == S.REJECTED else _("Withdrawn")
        items.append({"s": "bad", "title": title, "note": when(request.ended_at)})
        return items
    state = request.state
    if request.series:
        done = state == S.ENDED
        going = "now" if state == S.SERIES else "done" if done else "todo"
        items.append({"s": going, "title": _("Under way"), "note": series_text(request)})
        end = (
            note(end_word(request.end_reason), when(request.ended_at)) if done else _("with its last member")
        )
        items.append({"s": "done" if done else "todo", "title": _("Ended"), "note": end})
        return items
    queued = {"queued": "now", "allocated": "done", "ended": "done"}.get(state, "todo")
    running = {"allocated": "now", "ended": "done"}.get(state, "todo")
    holder = _("not in line yet") if request.held else _("the scheduler holds it")
    waiting = note(holder, since(request.queued_at)) if state == S.QUEUED else ""
    items.append({"s": queued, "title": _("Queued"), "note": waiting})
    items.append(
        {
            "s": running,
            "title": _("Running") if state == S.ALLOCATED else _("Run"),
            "note": _("the node confirms, then it runs")
            if state == S.ALLOCATED
            else hours(request.duration_s),
        }
    )
    ended = (
        note(end_word(request.end_reason), when(request.ended_at))
        if state == S.ENDED
        else _("seen free, then billed")
    )
    items.append({"s": "done" if state == S.ENDED else "todo", "title": _("Ended"), "note": ended})
    return items


def _step_item(step: ApprovalStep, request: CapacityRequest, deciders: Deciders) -> dict[str, Any]:
    role = role_word(step.role)
    title = role[:1].upper() + role[1:]
    if step.state in ("approved", "returned", "rejected"):
        who = step.decided_by.get_full_name() if step.decided_by is not None else ""
        if step.on_behalf_of is not None:
            who = _("%(who)s for %(principal)s") % {
                "who": who,
                "principal": step.on_behalf_of.get_full_name(),
            }
        words = {"approved": _("Approved"), "returned": _("Returned"), "rejected": _("Rejected")}
        tone = "done" if step.state == "approved" else "bad"
        return {"s": tone, "title": words[step.state], "note": note(f"{who}, {role}", when(step.decided_at))}
    if step.state == "open":
        who = who_decides(step, request, deciders)
        if request.state == S.NEEDS_CONSENT:
            return {
                "s": "now",
                "title": _("Your consent"),
                "note": note(_("until"), when(consent_until(request))),
            }
        due = _("by %(time)s") % {"time": when(step.due_at)} if step.due_at else ""
        return {"s": "now", "title": title, "note": note(who, due)}
    return {"s": "todo" if step.state == "waiting" else "bad", "title": title, "note": rule_word(step.rule)}


def rule_word(rule: str) -> str:
    """The rule that asked for a step, as its code."""
    return _("rule %(code)s") % {"code": rule} if rule else ""


def note(*lines: str) -> Any:
    """Lines under a step."""
    return format_html_join(mark_safe("<br>"), "{}", ((line,) for line in lines if line))


def since(moment: datetime | None) -> str:
    """``since 11:42``."""
    return _("since %(time)s") % {"time": when(moment)} if moment is not None else ""


EVENT_LOOKS = {
    "drafted": ("edit", "mute"),
    "submitted": ("plus", "mute"),
    "adopted": ("hold", "info"),
    "changed": ("edit", "info"),
    "approved": ("check", "ok"),
    "proposed": ("edit", "warn"),
    "consented": ("check", "ok"),
    "declined": ("return", "warn"),
    "lapsed": ("clock", "warn"),
    "returned": ("return", "warn"),
    "rejected": ("x", "bad"),
    "queued": ("clock", "info"),
    "withdrawn": ("return", "mute"),
    "allocated": ("hold", "hold"),
    "started": ("play", "ok"),
    "requeued": ("refresh", "info"),
    "ended": ("check", "mute"),
    "escalated": ("up", "warn"),
    "extended": ("clock", "info"),
    "in_line": ("clock", "info"),
    "dependency_failed": ("fault", "bad"),
    "after_changed": ("edit", "info"),
    "scaled": ("split", "info"),
    "let_go": ("return", "mute"),
    "moving": ("split", "info"),
    "stays": ("check", "info"),
    "crash_loop": ("warn", "bad"),
    "series_closed": ("x", "mute"),
    "renewed": ("clock", "ok"),
    "review_warning": ("clock", "warn"),
    "deadline_lost": ("warn", "bad"),
    "occurrence_skipped": ("x", "mute"),
    "occurrence_moved": ("edit", "info"),
}


def event_words(kind: str) -> str:
    """What happened, as a verb after the name of who did it."""
    words = {
        "drafted": _("saved a draft"),
        "submitted": _("submitted"),
        "adopted": _("took in what ran already"),
        "changed": _("changed it"),
        "approved": _("approved"),
        "proposed": _("approved with a change"),
        "consented": _("agreed to the change"),
        "declined": _("did not agree to the change"),
        "lapsed": _("the change lapsed unanswered"),
        "returned": _("returned it"),
        "rejected": _("rejected it"),
        "queued": _("put into the queue"),
        "withdrawn": _("withdrew it"),
        "allocated": _("reserved GPUs"),
        "started": _("started"),
        "requeued": _("put back into the queue at its old place"),
        "ended": _("ended"),
        "escalated": _("escalated to the level above"),
        "extended": _("extended"),
        "in_line": _("let it into the line"),
        "dependency_failed": _("saw that what it waits for did not end well"),
        "after_changed": _("changed what it waits for"),
        "scaled": _("changed the number of replicas"),
        "let_go": _("gave its GPUs back"),
        "moving": _("asked for a replica on another node: this one is to be emptied"),
        "stays": _("lets this replica stay: its node is not to be emptied after all"),
        "crash_loop": _("waits before the next replica: several failed in a row"),
        "series_closed": _("ended the series"),
        "renewed": _("renewed it"),
        "review_warning": _("told that its review date comes near"),
        "deadline_lost": _("saw that its deadline cannot be met any more"),
        "occurrence_skipped": _("left one window out"),
        "occurrence_moved": _("moved one window"),
    }
    return words.get(kind, kind.replace("_", " "))


def history(request: CapacityRequest, limit: int = 100) -> list[dict[str, Any]]:
    """The timeline, newest first."""
    out: list[dict[str, Any]] = []
    for event in request.events.order_by("-id")[:limit]:
        icon, tone = EVENT_LOOKS.get(event.kind, ("info", "mute"))
        out.append(
            {
                "time": event.at,
                "icon": icon,
                "tone": tone,
                "text": format_html(
                    "<strong>{}</strong> {}", actor_word(event.actor_name), event_words(event.kind)
                ),
                "note": _event_note(event.kind, event.facts, event.text),
            }
        )
    return out


def field_word(name: str) -> str:
    """The name of a field as the form has it."""
    words = {
        "gpus_per_node": _("GPUs per node"),
        "nodes": _("nodes"),
        "duration_s": _("duration"),
        "fraction_milli": _("compute share"),
        "fraction_mib": _("memory, MiB"),
        "mig_count": _("slices"),
        "mig_profile": _("MIG profile"),
        "purpose": _("purpose"),
        "command": _("command"),
        "image": _("image"),
        "interruptible": _("interruptible"),
        "start_at": _("start"),
        "flavour": _("flavour"),
        "shape": _("shape"),
        "department": _("department"),
        "priority": _("priority"),
        "work_class": _("class"),
        "run_kind": _("what runs"),
        "review_at": _("review date"),
        "deadline_at": _("deadline"),
        "nodes_min": _("nodes at least"),
        "array_count": _("members"),
        "array_at_once": _("members at once"),
        "window": _("weekly window"),
        "timetable": _("timetable"),
        "scale_by": _("number of replicas by"),
        "replicas_min": _("replicas at least"),
        "replicas_max": _("replicas at most"),
        "site_code": _("site"),
        "fabric": _("network"),
        "fabric_gbit_s": _("Gbit/s at least"),
        "storage": _("storage"),
        "domain_required": _("all nodes in one"),
        "domain_preferred": _("if possible in one"),
        "datasets": _("data sets"),
    }
    return words.get(name, name)


def value_word(name: str, value: Any) -> str:
    """A value as read: seconds as hours, times in the reader's zone."""
    if name == "duration_s":
        return hours(value)
    if (
        name in ("start_at", "review_at", "deadline_at")
        and isinstance(value, str)
        and (parsed := parse_datetime(value))
    ):
        return when(parsed)
    if isinstance(value, Mapping):
        return _("changed") if value else "–"
    if isinstance(value, bool):
        return _("yes") if value else _("no")
    if isinstance(value, list):
        return listed(str(v) for v in value)
    return "–" if value in (None, "") else str(value)[:80]


def change_words(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """``duration 48 h → 24 h, nodes 2 → 1``."""
    return listed(
        f"{field_word(name)} {value_word(name, before.get(name))} → {value_word(name, after[name])}"
        for name in after
    )


def _moment_word(text: Any) -> str:
    """A kept ISO time in the reader's zone."""
    parsed = parse_datetime(text) if isinstance(text, str) else None
    return when(parsed) if parsed is not None else "–"


def _event_note(kind: str, facts: Mapping[str, Any], text: str) -> str:
    parts: list[str] = []
    if text:
        parts.append(f"“{text}”")
    if kind == "changed":
        changed = facts.get("changed", {})
        parts.append(
            change_words({k: v[0] for k, v in changed.items()}, {k: v[1] for k, v in changed.items()})
        )
    elif kind == "proposed":
        parts.append(change_words(facts.get("before", {}), facts.get("after", {})))
    elif kind == "approved" and facts.get("rule"):
        parts.append(_("step needed by rule %(rule)s") % {"rule": facts["rule"]})
    elif kind == "queued" and facts.get("rule"):
        parts.append(_("rule %(rule)s") % {"rule": facts["rule"]})
    elif kind == "submitted" and facts.get("cloned_from"):
        parts.append(_("copied from %(ref)s") % {"ref": facts["cloned_from"]})
    elif kind == "allocated" and facts.get("nodes"):
        parts.append(", ".join(str(n) for n in facts["nodes"][:6]))
    elif kind == "scaled":
        parts.append(f"{facts.get('from') if facts.get('from') is not None else 0} → {facts.get('to')}")
    elif kind == "moving":
        parts.append(str(facts.get("node", "")))
    elif kind in ("let_go", "series_closed"):
        parts.append(end_word(str(facts.get("cause", ""))))
    elif kind == "dependency_failed":
        parts.append(str(facts.get("on", "")))
    elif kind == "after_changed":
        parts.append(f"{listed(facts.get('before', [])) or '–'} → {listed(facts.get('after', [])) or '–'}")
    elif kind in ("renewed", "occurrence_moved"):
        parts.append(f"{_moment_word(facts.get('from'))} → {_moment_word(facts.get('to'))}")
    elif kind == "review_warning":
        parts.append(_moment_word(facts.get("review_at")))
    elif kind == "deadline_lost":
        ends = (_moment_word(facts.get("earliest_end")), _moment_word(facts.get("deadline_at")))
        parts.append(" > ".join(ends))
    elif kind == "crash_loop":
        parts.append(_moment_word(facts.get("again_at")))
    elif kind == "occurrence_skipped":
        parts.append(str(facts.get("day", "")))
    elif kind in ("ended", "requeued", "withdrawn") and facts.get("reason"):
        parts.append(end_word(str(facts["reason"])))
    if facts.get("on_behalf_of"):
        parts.append(_("on behalf of %(name)s") % {"name": facts["on_behalf_of"]})
    return " · ".join(part for part in parts if part)
