"""Requests that are several: job arrays, recurring windows, services with replicas; and what they wait for."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from datetime import date, time, timedelta
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from django.conf import settings
from django.db.models import Q
from django.utils import timezone
from django.utils.translation import gettext as _

from portal.accounts.models import User
from portal.accounts.policy import Policy
from portal.kernel.clock import now
from quotas.engine import recurrence
from quotas.engine.timetable import DAYS, HOURS, Timetable
from quotas.models import CapacityRequest, RequestDependency
from quotas.selectors.requests import visible_requests
from quotas.services.asking_time import LONGEST_S, SHORTEST_S, check_longest
from quotas.services.reader import Reader

Series = CapacityRequest.Series
MOST_MEMBERS = 1000
MOST_REPLICAS = 256
MOST_WAITED_FOR = 20
WINDOW_KEYS = {"days", "from", "to", "zone", "first", "until", "skip"}
After = tuple[CapacityRequest, str]


def read_series(r: Reader, user: User, draft: bool) -> None:
    """Array, window or replicas; sets ``series`` to what it is."""
    count = r.whole("array_count", 0, 0, MOST_MEMBERS) or 0
    at_once = r.whole("array_at_once", 0, 0, MOST_MEMBERS) or 0
    r.choice("after_failed", CapacityRequest.AfterFailed.values, "withdraw")
    array = count > 1
    r.out["array_count"] = count if array else 0
    r.out["array_at_once"] = min(at_once or count, count) if array else 0
    _window(r, draft)
    if r.out["window"]:
        check_longest(r, "window", r.out["duration_s"], user)
    service = r.out["is_service"]
    if array and (service or r.out["window"]):
        r.wrong("array_count", _("An array is neither a service nor a recurring window."))
    if service and r.out["window"]:
        r.wrong("window", _("A service runs all the time: give it a timetable instead of a window."))
    if r.out["window"] and not draft and r.out.get("nodes_min"):
        r.wrong("nodes_min", _("A reserved window is kept for all its nodes."))
    many = service and (r.out["replicas_max"] > 1 or r.out["scale_by"] != "fixed")
    kinds = [(array, Series.ARRAY), (bool(r.out["window"]), Series.WINDOW), (many, Series.SERVICE)]
    r.out["series"] = str(next((kind for is_it, kind in kinds if is_it), Series.NONE))


# -- windows ---------------------------------------------------------------------------------------------


def weekly_of(window: Mapping[str, Any]) -> recurrence.Weekly:
    """The rule that a request keeps as JSON."""
    return recurrence.Weekly(
        days=frozenset(window["days"]),
        begin=time.fromisoformat(window["from"]),
        end=time.fromisoformat(window["to"]),
        zone=window["zone"],
        first=date.fromisoformat(window["first"]),
        until=date.fromisoformat(window["until"]),
        skip=frozenset(date.fromisoformat(day) for day in window.get("skip", [])),
    )


def _window(r: Reader, draft: bool) -> None:
    r.out["window"] = {}
    known = _("days, from, to, zone, first, until are known here.")
    inner = r.part("window", WINDOW_KEYS, known)
    if inner is None:
        return
    zone = _zone(inner)
    today = now().astimezone(ZoneInfo(zone)).date()
    kept = {
        "days": _days(inner),
        "from": _clock(inner, "from"),
        "to": _clock(inner, "to"),
        "zone": zone,
        "first": _day(inner, "first", today),
        "until": _day(inner, "until", None),
        "skip": sorted(d for d in inner.names("skip", 366) if _is_day(d)),
    }
    if not inner.problems:
        _judge_window(r, inner, kept, draft)
    r.take("window", inner)
    if not inner.problems:
        r.out["window"] = kept


def _judge_window(r: Reader, inner: Reader, kept: dict[str, Any], draft: bool) -> None:
    rule = weekly_of(kept)
    if rule.until < rule.first:
        inner.wrong("until", _("The last day lies before the first."))
        return
    if rule.until - rule.first > timedelta(days=366):
        inner.wrong("until", _("At most a year ahead."))
        return
    coming = list(recurrence.occurrences(rule, now(), now() + timedelta(days=740)))
    if not coming and not draft:
        inner.wrong("until", _("No such day is left between the first and the last."))
        return
    lengths = [one.seconds for one in coming]
    if lengths and min(lengths) < SHORTEST_S or max(lengths, default=0) > LONGEST_S:
        inner.wrong("to", _("A window lasts at least a minute."))
    r.out["duration_s"] = max(lengths, default=None)


def _zone(inner: Reader) -> str:
    name = inner.text("zone", 64) or str(timezone.get_current_timezone())
    try:
        ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        inner.wrong("zone", _("There is no time zone of that name, for example Asia/Shanghai."))
        return settings.TIME_ZONE
    return name


def _days(inner: Reader) -> list[int]:
    sent = inner.values.get("days")
    parts = sent if isinstance(sent, list | tuple) else []
    found = {int(str(d)) for d in parts if str(d).isascii() and str(d).isdecimal() and 0 <= int(str(d)) <= 6}
    if not found or len(found) != len({str(d) for d in parts}):
        inner.wrong("days", _("Choose days of the week: 0 is Monday, 6 is Sunday."))
    return sorted(found)


def _clock(inner: Reader, name: str) -> str:
    text = inner.text(name, 8)
    try:
        return time.fromisoformat(text).replace(second=0, microsecond=0, tzinfo=None).isoformat("minutes")
    except ValueError:
        inner.wrong(name, _("A time of day is needed here, for example 09:00."))
        return "00:00"


def _is_day(text: str) -> bool:
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True


def _day(inner: Reader, name: str, default: date | None) -> str:
    text = inner.text(name, 10)
    if not text and default is not None:
        return default.isoformat()
    if not _is_day(text):
        inner.wrong(name, _("A date is needed here, for example 2026-12-31."))
        return (default or now().date()).isoformat()
    return date.fromisoformat(text).isoformat()


# -- services --------------------------------------------------------------------------------------------


def timetable_of(kept: Mapping[str, Any]) -> Timetable:
    """The timetable that a request keeps as JSON."""
    return Timetable(kept["zone"], tuple(tuple(day) for day in kept["days"]))


def read_replicas(r: Reader, draft: bool) -> None:
    """How many replicas, and what decides it; a timetable brings its own smallest and largest number."""
    r.out["timetable"] = {}
    least = r.whole("replicas_min", 1, 0, MOST_REPLICAS)
    most = r.whole("replicas_max", 1, 1, MOST_REPLICAS)
    by = r.choice("scale_by", CapacityRequest.ScaleBy.values, "fixed")
    r.whole("signal_per_replica", 1, 1, 1_000_000_000)
    if not r.out["is_service"]:
        if r.values.get("timetable") or by == "timetable":
            r.wrong(
                "timetable", _("Only a service has a timetable of replicas; a job may have a weekly window.")
            )
        r.out |= {"scale_by": "fixed", "signal_per_replica": 1, "replicas_min": 1, "replicas_max": 1}
        return
    if by == "timetable":
        _timetable(r, draft)
        return
    if least is not None and most is not None and least > most:
        r.wrong("replicas_max", _("At least as many as the smallest number of replicas."))
    if by == "fixed":
        r.out["replicas_min"] = r.out["replicas_max"]


def _timetable(r: Reader, draft: bool) -> None:
    inner = r.part("timetable", {"zone", "days"}, _("zone and days are known here."))
    if inner is None:
        if not draft:
            r.wrong("timetable", _("Say how many replicas are needed hour by hour."))
        return
    zone = _zone(inner)
    days = inner.values.get("days")
    if not _is_grid(days):
        inner.wrong(
            "days",
            _("Seven lists of 24 whole numbers from 0 to {n} are needed, from Monday on.").format(
                n=MOST_REPLICAS
            ),
        )
    r.take("timetable", inner)
    if inner.problems or not isinstance(days, list):
        return
    most = max(max(day) for day in days)
    if most == 0:
        r.wrong("timetable", _("At least one hour needs a replica."))
        return
    r.out["timetable"] = {"zone": zone, "days": days}
    r.out |= {"replicas_min": min(min(day) for day in days), "replicas_max": most}


def _is_grid(days: Any) -> bool:
    return (
        isinstance(days, list)
        and len(days) == DAYS
        and all(isinstance(day, list) and len(day) == HOURS for day in days)
        and all(type(n) is int and 0 <= n <= MOST_REPLICAS for day in days for n in day)
    )


# -- what it waits for -----------------------------------------------------------------------------------


def read_after(r: Reader, policy: Policy) -> list[After]:
    """The requests that it waits for, each with how they have to end. References as R-17 or uid, or objects
    {request, when: ok | any}; one word ``after_when`` serves all that say nothing themselves.
    """
    default = r.choice("after_when", RequestDependency.Kind.values, "ok")
    r.out.pop("after_when")
    sent = r.values.get("after") or []
    parts: list[Any] = sent.replace(",", " ").split() if isinstance(sent, str) else sent
    if not isinstance(parts, list | tuple) or len(parts) > MOST_WAITED_FOR:
        r.wrong("after", _("A list of at most {n} requests is needed here.").format(n=MOST_WAITED_FOR))
        return []
    found: dict[int, After] = {}
    for part in parts:
        key, when = (
            (part.get("request"), part.get("when") or default)
            if isinstance(part, Mapping)
            else (part, default)
        )
        one = _find(str(key or ""), policy)
        if one is None:
            r.wrong("after", _("There is no request {ref} that you can see.").format(ref=str(key)[:60]))
        elif when not in RequestDependency.Kind.values:
            r.wrong("after", _("It waits for an end that is “ok” or “any”."))
        else:
            found[one.pk] = (one, str(when))
    if found and r.out.get("series") in (Series.WINDOW, Series.SERVICE):
        r.wrong("after", _("A service or a recurring window waits for nobody."))
    return list(found.values())


def _find(key: str, policy: Policy) -> CapacityRequest | None:
    number = key.strip().upper().removeprefix("R-")
    if number.isascii() and number.isdecimal():
        query = Q(pk=int(number[:18]))
    else:
        try:
            query = Q(uid=uuid.UUID(key.strip()))
        except ValueError:
            return None
    return visible_requests(policy).filter(query).first()
