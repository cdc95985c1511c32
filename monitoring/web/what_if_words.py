"""A what-if in words and figures: what was asked, what differs, the days as a chart."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from typing import Any

from django.utils.translation import gettext as _
from django.utils.translation import ngettext, pgettext

from monitoring.selectors.what_if import comparison
from pool.models import SchedulingPolicy
from portal.accounts.policy import Policy
from portal.kernel.units import MS_PER_HOUR
from portal.web import formats
from quotas.models import GpuFlavour


def side_words() -> dict[str, str]:
    """What the sides are called."""
    return {"recorded": _("Recorded"), "a": "A", "b": "B"}


def error_words() -> dict[str, str]:
    """Why there is no answer, and what next."""
    return {
        "too_long": _("It took more than an hour and was given up. Choose a shorter period or one flavour."),
        "play_failed": _("It could not be played. Ask again; if it stays so, tell your administrator."),
        "forgotten": _("It was taken away while it was played."),
        "department_gone": _("A department that it names is gone."),
    }


def period_words(params: Mapping[str, Any]) -> str:
    """The days, or that it is about files."""
    if params.get("source") == "trace":
        return _("a recorded workload")
    flavour = params.get("flavour") or ""
    return f"{params['from']} – {params['to']}" + (f" · {flavour}" if flavour else "")


def change_words(params: Mapping[str, Any], policy: Policy) -> list[str]:
    """What is different in B, one line each."""
    given = params.get("changes") or {}
    names = {row.code: policy.tree.path(pk) for pk, row in policy.tree.rows.items()}
    flavours = dict(GpuFlavour.objects.values_list("code", "name"))
    out = []
    if uid := given.get("policy"):
        version = SchedulingPolicy.objects.filter(uid=uid).first()
        out.append(_("Policy: %(policy)s") % {"policy": version or uid})
    for name, value in sorted((given.get("switches") or {}).items()):
        if name == "reclaim":
            out.append(_("Owners take nothing back"))
        else:
            out.append(_("Switch %(name)s: %(value)s") % {"name": name, "value": value})
    if given.get("borrowing") is False:
        out.append(_("Nobody above the guarantee"))
    for row in given.get("quotas") or []:
        out.append(_limits(row, names.get(row["department"], row["department"]), flavours))
    for code, n in sorted((given.get("nodes") or {}).items()):
        if params.get("source") == "trace":
            out.append(_("GPUs: %(n)s") % {"n": f"{n:+,}"})
        else:
            out.append(
                _("Nodes with %(flavour)s: %(n)s") % {"n": f"{n:+,}", "flavour": flavours.get(code, code)}
            )
    for code, micro in sorted((given.get("prices") or {}).items()):
        out.append(
            _("%(flavour)s at %(price)s a GPU-hour")
            % {"flavour": flavours.get(code, code), "price": formats.money(micro)}
        )
    return out or [_("Nothing: B is A again")]


def _limits(row: Mapping[str, Any], department: str, flavours: Mapping[str, str]) -> str:
    parts = []
    labels = {
        "guaranteed": _("guaranteed"),
        "borrow_limit": _("may borrow"),
        "hard_cap": pgettext("quota", "at most"),
    }
    for name, label in labels.items():
        if name in row:
            value = _("any") if row[name] is None else formats.milli_gpu(row[name])
            parts.append(f"{label} {value}")
    head = f"{department}, {flavours.get(row['flavour'], row['flavour'])}"
    return f"{head}: {', '.join(parts)}"


def summary(result: Mapping[str, Any]) -> str:
    """The answer in a sentence: what B does to waits and to what is taken back."""
    rows = {row.key: row for row in comparison(result)}
    wait, taken = rows["p50"].difference, rows["reclaimed"].difference
    if wait is None:
        return ""
    words = _("The median wait stays the same")
    if wait:
        text = (
            _("The median wait is %(time)s shorter") if wait < 0 else _("The median wait is %(time)s longer")
        )
        words = text % {"time": formats.duration(abs(wait))}
    if taken:
        n = abs(taken)
        text = (
            ngettext("owners take back %(n)s run more", "owners take back %(n)s runs more", n)
            if taken > 0
            else ngettext("owners take back %(n)s run fewer", "owners take back %(n)s runs fewer", n)
        )
        more = text % {"n": formats.number(n)}
    else:
        more = _("as many runs are taken back")
    stop = "。" if formats.is_chinese() else "."
    return f"{words}{formats.comma()}{more}{stop}"


def figure_of(result: Mapping[str, Any], *, numbered: bool = False) -> dict[str, Any]:
    """Allocated GPU-hours by day: A and B as lines, with the same figures as a table. `numbered`: the days of a record
    have numbers, no dates.
    """
    sides = [side for side in ("recorded", "a", "b") if side in result]
    days = sorted({day for side in sides for day in result[side]["days"]})
    looks = {
        "recorded": {"color": "--ink-3", "width": 1.5, "dash": "dot"},
        "a": {"color": "--mute-solid", "width": 2},
        "b": {"color": "--series", "width": 2},
    }
    hours = {
        side: [round(result[side]["days"].get(day, 0) / MS_PER_HOUR, 1) for day in days] for side in sides
    }
    if numbered:
        days = [str((date.fromisoformat(day) - date(1970, 1, 1)).days + 1) for day in days]
    return {
        "data": [
            {
                "type": "scatter",
                "mode": "lines+markers" if len(days) < 3 else "lines",
                "name": side_words()[side],
                "x": days,
                "y": hours[side],
                "line": looks[side],
            }
            for side in sides
        ],
        "layout": {"xaxis": {"type": "category", "nticks": 7, "tickangle": 0}, "showlegend": True},
        "table": {
            "head": [_("Day"), *(side_words()[side] for side in sides)],
            "rows": [[day, *(f"{hours[side][i]:,.1f}" for side in sides)] for i, day in enumerate(days)],
        },
    }
