"""What monitoring tells people: hints about a finding, the digest of the week, alerts. Words are made when read."""

from __future__ import annotations

from typing import Any

from django.utils.translation import gettext as _now
from django.utils.translation import gettext_lazy as _

from monitoring.models import Finding
from monitoring.web.finding_words import advice_words
from portal.notify import kinds
from portal.web import formats


def _finding(params: kinds.Params) -> kinds.Params:
    kind, rule = str(params.get("what", "")), str(params.get("rule", ""))
    return {
        **params,
        "what": dict(Finding.Kind.choices).get(kind, kind),
        "advice": advice_words(kind, rule, {"part": params.get("part", "")}),
        "hours": formats.gpu_hours(int(params.get("gpu_ms") or 0)),
        "money": formats.money(int(params.get("micro") or 0)),
    }


def _week(params: kinds.Params) -> kinds.Params:
    words = dict(Finding.Kind.choices)
    rows: list[Any] = list(params.get("kinds") or [])
    lines = [
        _now("%(kind)s: %(hours)s GPU·h, %(money)s")
        % {
            "kind": words.get(kind, kind),
            "hours": formats.gpu_hours(gpu_ms),
            "money": formats.money(micro),
        }
        for kind, gpu_ms, micro, _n in rows
    ]
    return {
        **params,
        "hours": formats.gpu_hours(sum(row[1] for row in rows)),
        "money": formats.money(sum(row[2] for row in rows)),
        "n": formats.number(sum(row[3] for row in rows)),
        "lines": ("；" if formats.is_chinese() else "; ").join(lines),
    }


kinds.register(
    "monitoring.finding",
    _("%(subject)s: %(what)s"),
    _("%(hours)s GPU·h wasted since %(since)s, %(money)s. %(advice)s"),
    group="taken",
    label=_("My GPUs are used badly"),
    tone="warn",
    icon="waste",
    prepare=_finding,
)
kinds.register(
    "monitoring.waste_week",
    _("Waste in the week from %(first)s: %(hours)s GPU·h, %(money)s"),
    _("%(n)s findings. %(lines)s."),
    group="money",
    label=_("Waste of my departments, each week"),
    icon="waste",
    prepare=_week,
)
