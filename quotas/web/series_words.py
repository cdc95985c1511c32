"""Series and what requests wait for, in words and rows for pages."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from django.core.paginator import Paginator
from django.utils.translation import gettext as _
from django.utils.translation import ngettext, pgettext

from portal.kernel.clock import now
from quotas.engine.recurrence import occurrences
from quotas.engine.timetable import next_change
from quotas.models import CapacityRequest
from quotas.selectors.series import Progress, members_of
from quotas.services.asking_series import timetable_of, weekly_of
from quotas.services.series import HORIZON
from quotas.web.forms import local_input
from quotas.web.words import days_text, end_word, hours, weekdays, when

S = CapacityRequest.State
Series = CapacityRequest.Series
SHOWN = 25
AHEAD = timedelta(days=60)


def series_text(r: CapacityRequest) -> str:
    """What a series is, in a phrase: ``20 members, 4 at once``; "" for a single request."""
    if r.series == Series.ARRAY:
        return _("%(n)s members, %(k)s at once") % {"n": r.array_count, "k": r.array_at_once}
    if r.series == Series.WINDOW:
        w = r.window
        return f"{days_text(w['days'])} {w['from']} – {w['to']} {w['zone']}"
    if r.series == Series.SERVICE:
        if r.replicas_min == r.replicas_max:
            return ngettext("%(n)s replica", "%(n)s replicas", r.replicas_max) % {"n": r.replicas_max}
        return _("%(least)s to %(most)s replicas") % {"least": r.replicas_min, "most": r.replicas_max}
    return ""


def member_name(r: CapacityRequest, series: str) -> str:
    """``#7``, ``17 Jun``, ``replica 2``."""
    number = r.member_index or 0
    if series == Series.WINDOW:
        return when(r.start_at) if r.start_at is not None else date.fromordinal(number).isoformat()
    return _("replica %(n)s") % {"n": number} if series == Series.SERVICE else f"#{number}"


def progress_text(progress: Progress) -> str:
    """``3 running, 2 waiting, 10 ended well``; what is zero is left out."""
    parts = [
        (progress.running, ngettext("%(n)s running", "%(n)s running", progress.running)),
        (progress.waiting, ngettext("%(n)s in line", "%(n)s in line", progress.waiting)),
        (progress.held, ngettext("%(n)s held back", "%(n)s held back", progress.held)),
        (progress.well, ngettext("%(n)s ended well", "%(n)s ended well", progress.well)),
        (progress.badly, ngettext("%(n)s ended otherwise", "%(n)s ended otherwise", progress.badly)),
        (progress.withdrawn, ngettext("%(n)s withdrawn", "%(n)s withdrawn", progress.withdrawn)),
    ]
    return pgettext("list", ", ").join(text % {"n": n} for n, text in parts if n)


def held_words(r: CapacityRequest) -> dict[str, str] | None:
    """Why an agreed request is not in line yet, and what changes it; None where it is."""
    if r.state != S.QUEUED or not r.held:
        return None
    texts = {
        "dependency": (
            _("It waits for other requests to end."),
            _("It enters the line when the last of them has."),
        ),
        "failed": (
            _("A request that it waits for did not end well."),
            _("Stop waiting to let it into the line, or withdraw it."),
        ),
        "array": (
            _("It waits for its turn: so many members of its array run at once."),
            _("It enters the line when one of them ends."),
        ),
    }
    head, text = texts.get(r.held, (r.held, ""))
    return {"head": head, "text": text}


def after_rows(r: CapacityRequest) -> list[dict[str, Any]]:
    """What it waits for."""
    out = []
    for dep in r.waits_for.select_related("on").order_by("on_id"):
        state = "failed" if dep.failed_at else "met" if dep.met_at else "open"
        words = {
            "met": (_("done"), "ok", "check"),
            "failed": (_("did not end well"), "bad", "fault"),
            "open": (_("not yet"), "info", "clock"),
        }
        word, tone, icon = words[state]
        out.append({"on": dep.on, "kind": dep.get_kind_display(), "word": word, "tone": tone, "icon": icon})
    return out


class Counted(Paginator):  # type: ignore[type-arg]
    """Pages of rows whose number is known already."""

    def __init__(self, rows: Any, count: int) -> None:
        super().__init__(rows, SHOWN)
        self.__dict__["count"] = count  # the place where the property keeps it once it has asked


def members_page(head: CapacityRequest, number: str | None, count: int) -> dict[str, Any]:
    """A page of a series' members; those of a service newest first."""
    rows = members_of(head)
    if head.series == Series.SERVICE:
        rows = rows.order_by("-id")
    page = Counted(rows, count).get_page(number)
    return {
        "page": page,
        "rows": [_member_row(m, head) for m in page],
    }


def _member_row(m: CapacityRequest, head: CapacityRequest) -> dict[str, Any]:
    row: dict[str, Any] = {"m": m, "name": member_name(m, head.series), "note": _note(m)}
    if head.series == Series.WINDOW:
        row |= {
            "index_text": str(m.member_index),
            "day": date.fromordinal(m.member_index or 1).isoformat(),
            "start_input": local_input(m.start_at),
            "end_input": local_input(m.end_at),
        }
    return row


def _note(m: CapacityRequest) -> str:
    if m.state == S.QUEUED and m.held:
        words = held_words(m)
        return words["head"] if words is not None else ""
    if m.let_go_at is not None and m.state == S.ALLOCATED:
        return end_word(m.let_go_cause)
    if m.end_reason:
        return end_word(m.end_reason)
    return when(m.start_at) if m.start_at is not None and m.state == S.QUEUED else ""


def week_rows(kept: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A timetable as a table: days with 24 cells of value and shade 0 to 4."""
    peak = max(1, max(max(day) for day in kept["days"]))
    return [
        {"name": name, "cells": [{"n": n, "h": -(-4 * n // peak)} for n in day]}
        for (_number, name), day in zip(weekdays(), kept["days"], strict=True)
    ]


def service_facts(r: CapacityRequest) -> dict[str, Any]:
    """What a service wants now, why, and when that changes."""
    facts: dict[str, Any] = {"wanted": r.replicas_wanted, "by": r.get_scale_by_display(), "next": ""}
    if r.timetable:
        change = next_change(timetable_of(r.timetable), now())
        if change is not None:
            facts["next"] = _("%(n)s from %(time)s") % {"n": change[1], "time": when(change[0])}
        facts["week"] = week_rows(r.timetable)
        facts["zone"] = r.timetable["zone"]
        local = now().astimezone(ZoneInfo(r.timetable["zone"]))
        facts["now"] = (local.weekday(), local.hour)
    return facts


def coming_windows(r: CapacityRequest) -> list[dict[str, Any]]:
    """Occurrences of the coming weeks that are not in the queue yet, for leaving out ahead of time."""
    later = now() + HORIZON
    return [
        {"day": one.day.isoformat(), "start": one.start, "length": hours(one.seconds)}
        for one in occurrences(weekly_of(r.window), later, now() + AHEAD)
        if one.start >= later
    ][:SHOWN]


def place_rows(r: CapacityRequest) -> list[tuple[str, str]]:
    """Where it may run, as rows: only what was asked."""
    kinds, levels = dict(CapacityRequest.Fabric.choices), dict(CapacityRequest.Level.choices)
    rows: list[tuple[str, str]] = []
    if r.site_code:
        rows.append((_("Site"), r.site_code))
    if r.fabric:
        speed = f" ≥ {r.fabric_gbit_s} Gbit/s" if r.fabric_gbit_s else ""
        rows.append((_("Network"), f"{kinds.get(r.fabric, r.fabric)}{speed}"))
    if r.storage:
        rows.append((_("Storage"), r.storage))
    if r.domain_required:
        rows.append((_("All nodes in one"), str(levels[r.domain_required])))
    if r.domain_preferred:
        rows.append((_("If possible in one"), str(levels[r.domain_preferred])))
    if r.datasets:
        how = _("copied first where they are not") if r.stage_datasets else _("only where they are")
        rows.append((_("Data sets"), f"{', '.join(r.datasets)} ({how})"))
    if r.requirement.get("driver"):
        rows.append((_("Driver, at least"), str(r.requirement["driver"])))
    if r.cuda_min:
        rows.append((_("CUDA, at least"), r.cuda_min))
    if r.nodes_min:
        rows.append(
            (
                _("Starts with at least"),
                ngettext("%(n)s node", "%(n)s nodes", r.nodes_min) % {"n": r.nodes_min},
            )
        )
    if r.health:
        h = r.health
        what = h.get("command") or f":{h.get('port')}{h.get('path', '')}"
        rows.append((_("Health check"), f"{h['kind'].upper()} {what}"))
    return rows
