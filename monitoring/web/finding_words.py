"""Findings in words: evidence as a sentence, what would help, what became of it. Made when read, for its reader."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from django.utils.dateparse import parse_datetime
from django.utils.translation import gettext as _
from django.utils.translation import ngettext, pgettext

from monitoring.models import Finding, FindingEntry
from portal.web import formats

ICONS = {
    "idle": "pause",
    "over_asked": "sliders",
    "waiting_data": "clock",
    "throttled": "thermo",
    "no_lease": "lock",
    "stranded": "split",
}


def _percent(per_mille: Any, places: int = 0) -> str:
    return formats.figure((per_mille or 0) / 10, "%", places)


def percent_words(per_mille: int) -> str:
    """Per mille as whole percent."""
    return _percent(per_mille)


def amount_words(gpu_ms: int, micro: int) -> tuple[str, str]:
    """GPU-hours without their unit, and money."""
    return formats.gpu_hours(gpu_ms), formats.money(micro)


def list_words(parts: list[str]) -> str:
    """Sentences of a list in one line."""
    return ("；" if formats.is_chinese() else "; ").join(parts)


def _gib(mib: Any) -> str:
    return formats.figure((mib or 0) / 1024, "GiB", 1)


def _rate(micro: Any) -> str:
    return f"{formats.money(int(micro or 0))}/{_('GPU·h')}"


def part_words(name: str) -> str:
    """A proposed part: a MIG profile by its name, a fraction as a share of a card."""
    if name.isdecimal():
        return _("%(share)s of a GPU") % {"share": formats.milli_gpu(int(name))}
    return _("a %(profile)s slice") % {"profile": name}


def evidence_words(kind: str, rule: str, e: Mapping[str, Any]) -> str:
    """The evidence of a finding in one sentence with its figures."""
    makers = {
        "idle": _idle,
        "over_asked": _asked,
        "waiting_data": _data,
        "throttled": _throttled,
        "no_lease": _foreign,
        "stranded": _stranded,
    }
    maker = makers.get(kind)
    return maker(rule, e) if maker is not None else kind


def _idle(rule: str, e: Mapping[str, Any]) -> str:
    text = _("Activity %(level)s and no kernel running for %(time)s on all %(n)s of its GPUs") % {
        "level": _percent(e.get("activity_pm"), 1),
        "time": formats.duration(e.get("idle_s", 0)),
        "n": formats.number(e.get("cards", 1)),
    }
    n = int(e.get("processes") or 0)
    if n:
        text += "; " + ngettext("%(n)s process stays on them", "%(n)s processes stay on them", n) % {
            "n": formats.number(n)
        }
    until = _moment(e.get("excused_until"))
    if until is not None:
        text += "; " + _("its holder said “still needed” until %(t)s: not counted meanwhile") % {
            "t": formats.moment(until)
        }
    return text


def _asked(rule: str, e: Mapping[str, Any]) -> str:
    hours = formats.figure(e.get("hours", 0), "h")
    if rule == "count":
        return _("%(unused)s of %(n)s GPUs never worked in %(hours)s: %(which)s") % {
            "unused": formats.number(e.get("unused", 0)),
            "n": formats.number(e.get("cards", 0)),
            "hours": hours,
            "which": ", ".join(map(str, e.get("which", []))),
        }
    seen = {
        "peak": _gib(e.get("memory_peak_mib")),
        "total": _gib(e.get("memory_mib")),
        "measure": _("SM activity") if e.get("basis") == "sm" else _("busy time"),
        "level": _percent(e.get("p95_pm")),
        "hours": hours,
    }
    if rule == "flavour":
        return _(
            "Highest memory %(peak)s of %(total)s, %(measure)s at most %(level)s in 95 %% of %(hours)s: %(flavour)s "
            "with %(room)s at %(price)s instead of %(dear)s would do; were it as much slower as it is cheaper, it "
            "would be busy %(there)s"
        ) % {
            **seen,
            "flavour": str(e.get("flavour", "")),
            "room": _gib(e.get("flavour_mib")),
            "price": _rate(e.get("flavour_price")),
            "dear": _rate(e.get("price")),
            "there": _percent(e.get("level_there_pm")),
        }
    return _(
        "Highest memory %(peak)s of %(total)s, %(measure)s at most %(level)s in 95 %% of %(hours)s: %(part)s would do"
    ) % {**seen, "part": part_words(str(e.get("part", "")))}


def _data(rule: str, e: Mapping[str, Any]) -> str:
    causes = {
        "io": _("the host waits for input"),
        "cpu": _("all CPU cores are busy"),
        "pcie": _("the PCIe bus is full"),
    }
    looks = max(1, int(e.get("looks") or 1))
    return _("Activity %(level)s on average, while %(cause)s at %(share)s of %(n)s looks in %(hours)s") % {
        "level": _percent(e.get("activity_pm")),
        "cause": causes.get(rule, rule),
        "share": _percent(1000 * int(e.get("waits") or 0) // looks),
        "n": formats.number(looks),
        "hours": formats.figure(e.get("hours", 0), "h"),
    }


def _throttled(rule: str, e: Mapping[str, Any]) -> str:
    causes = {
        "heat": _("held back by heat"),
        "power_brake": _("held back by the power supply"),
        "power_cap": _("held back by its power cap"),
    }
    text = _("%(cause)s at %(share)s of %(n)s looks at work") % {
        "cause": causes.get(rule, rule),
        "share": _percent(e.get("share_pm")),
        "n": formats.number(e.get("looks", 0)),
    }
    if e.get("clock_mhz") and e.get("free_clock_mhz"):
        text += "; " + _("clock %(slow)s of %(free)s MHz") % {
            "slow": formats.number(e["clock_mhz"]),
            "free": formats.number(e["free_clock_mhz"]),
        }
    if e.get("temp_max_c") is not None:
        text += "; " + _("up to %(t)s") % {"t": formats.figure(e["temp_max_c"], "°C")}
    return text[:1].upper() + text[1:]


def _foreign(rule: str, e: Mapping[str, Any]) -> str:
    processes = e.get("processes", [])
    named = ", ".join(f"{p.get('name') or '–'} ({p.get('user') or '–'})" for p in processes[:3])
    return ngettext(
        "%(n)s process outside any lease, %(memory)s: %(named)s",
        "%(n)s processes outside any lease, %(memory)s: %(named)s",
        len(processes),
    ) % {"n": formats.number(len(processes)), "memory": _gib(e.get("memory_mib")), "named": named}


def _stranded(rule: str, e: Mapping[str, Any]) -> str:
    if rule == "layout":
        return _("%(layout)s leave %(rest)s of %(all)s compute slices that no profile can use") % {
            "layout": " + ".join(map(str, e.get("layout", []))),
            "rest": formats.number(e.get("rest_slices", 0)),
            "all": formats.number(e.get("of_slices", 0)),
        }
    return _("%(used)s of the GPU are held; the other %(rest)s are too little for anybody") % {
        "used": formats.milli_gpu(e.get("used_milli", 0)),
        "rest": formats.milli_gpu(e.get("rest_milli", 0)),
    }


def advice_words(kind: str, rule: str, e: Mapping[str, Any]) -> str:
    """The one thing that would help."""
    if kind == "idle":
        return _("Release it, or say that it is still needed.")
    if kind == "over_asked" and rule == "count":
        return _("Ask for fewer GPUs next time, or make the program use all of them.")
    if kind == "over_asked" and rule == "flavour":
        return _("Ask for %(flavour)s next time, after a short trial on it.") % {
            "flavour": str(e.get("flavour", ""))
        }
    if kind == "over_asked":
        return _("Ask for %(part)s next time: it starts sooner and costs less.") % {
            "part": part_words(str(e.get("part", "")))
        }
    if kind == "waiting_data":
        return {
            "io": _("Copy the data to the node's own disk first, read larger pieces, or read ahead."),
            "cpu": _("Ask for more CPU cores, more loader processes, or decode on the GPU."),
            "pcie": _("Send smaller or packed data to the GPU, or keep it there between steps."),
        }.get(rule, "")
    if kind == "throttled":
        return _("Look at cooling, airflow and power of the node; the work there loses time.")
    if kind == "no_lease":
        return _("Ask its owner to request the GPU here, or end the process.")
    return _("Have another layout made once the GPU is empty.")


def entry_words(entry: FindingEntry) -> str:
    """A line of a finding's history."""
    f = entry.facts
    table: dict[str, str] = {
        "found": _("Found"),
        "told": _("The people concerned were told"),
        "dismissed": _("Dismissed"),
        "reopened": _("Taken up again"),
        "incident": _("Incident %(ref)s opened") % {"ref": f.get("incident", "")},
        "warned": _("The holder was warned that it will be taken back"),
        "still_needed": _("The holder said: still needed"),
        "advised": _("Would have been taken back, but its department is not in enforce mode"),
        "reclaim": _("Notice of taking back was given"),
        "closed": _("Closed: %(outcome)s")
        % {"outcome": dict(Finding.Outcome.choices).get(f.get("outcome", ""), "–")},
    }
    return table.get(entry.kind, entry.kind)


ENTRY_LOOKS = {
    "found": ("warn", "waste"),
    "told": ("info", "bell"),
    "dismissed": ("mute", "x"),
    "reopened": ("warn", "return"),
    "incident": ("bad", "fault"),
    "warned": ("warn", "bell"),
    "still_needed": ("ok", "check"),
    "advised": ("hold", "info"),
    "reclaim": ("act", "reclaim"),
    "closed": ("ok", "check"),
}


def act_words(act: str, kind: str) -> str:
    """The verb on the button of an act."""
    if act == "tell":
        return {
            "idle": pgettext("button", "Ask holder"),
            "over_asked": pgettext("button", "Propose it"),
            "no_lease": pgettext("button", "Notify"),
        }.get(kind, pgettext("button", "Send hints"))
    return {
        "dismiss": pgettext("button", "Dismiss…"),
        "reopen": pgettext("button", "Take up again"),
        "incident": pgettext("button", "Have it laid out anew")
        if kind == "stranded"
        else pgettext("button", "Open incident"),
    }.get(act, act)


def _moment(raw: Any) -> datetime | None:
    return parse_datetime(str(raw)) if raw else None
