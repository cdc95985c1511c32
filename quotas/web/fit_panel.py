"""The "does it fit" panel: a verdict with its proof, from cleaned wishes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from django.utils.translation import gettext as _

from portal.accounts.policy import Policy
from portal.kernel.clock import now
from portal.kernel.errors import DomainError, Invalid
from quotas.engine.available import available
from quotas.engine.recurrence import count, occurrences
from quotas.models import CapacityRequest, GpuFlavour
from quotas.selectors.approvers import Deciders
from quotas.selectors.fit import Option, Verdict
from quotas.selectors.flavours import unmet
from quotas.selectors.requests import lent_now
from quotas.selectors.trees import INSTALLATION
from quotas.services.approval_steps import wanted_steps
from quotas.services.asking import read_request
from quotas.services.asking_series import weekly_of
from quotas.services.judging import at_once_of, gpu_ms_of, level_error, review_length, verdict_of
from quotas.web import present
from quotas.web.present import role_word
from quotas.web.words import gpus, hours, when

OFTEN_LEFT: dict[str, Any] = {
    "array_count": 0, "array_at_once": 0, "nodes_min": None, "site_code": "", "fabric": "", "fabric_gbit_s": 0,
    "storage": "", "domain_required": "", "domain_preferred": "", "datasets": [],
}  # fmt: skip
"""Wishes that the API call names only where they are not the default."""


def panel(
    values: Mapping[str, Any], *, user: Any, policy: Policy, offered: list[GpuFlavour]
) -> dict[str, Any]:
    """Context of the panel's template; incomplete wishes give a quiet panel that says what is missing."""
    try:
        cleaned = read_request(
            {**values, "purpose": values.get("purpose") or "-"}, user=user, policy=policy, draft=True
        )
    except Invalid as error:
        return {"problems": [str(p["detail"]) for p in error.errors], "table": _table(values, offered)}
    if cleaned["shape"] == CapacityRequest.Shape.CPU:
        return {
            "tone": "ok",
            "head": _("Needs no GPU."),
            "text": _("Starts on the next free node."),
            "cpu": True,
        }
    if not cleaned["flavours"] or (cleaned["duration_s"] is None and not cleaned["is_service"]):
        return {"problems": [_("Choose a flavour and a duration.")], "table": _table(values, offered)}
    verdict = verdict_of(cleaned, policy=policy)
    if not verdict.options:
        return {"problems": [_("No card of it can give this shape.")]}
    option = verdict.options[0]
    return {
        **_verdict(option, verdict, policy),
        **_lines(option, verdict, cleaned, policy, user),
        "several_text": several_text(cleaned),
        "options": _options(verdict) if cleaned["flavour"] is None else [],
        "computed": now(),
        "api_call": api_call_of(cleaned),
    }


def _verdict(option: Option, verdict: Verdict, policy: Policy) -> dict[str, Any]:
    """Tone, head and text: the answer in a sentence."""
    plan = verdict.plan
    auto = plan is not None and plan.outcome == "auto"
    if option.never is not None:
        head = _("Can never start like this.")
        return {
            "tone": "bad",
            "case": "never",
            "head": head,
            "text": str(level_error("n", option.never, option, policy).detail),
        }
    if option.over_cap is not None:
        over = option.over_cap
        head = _("Over the limit by %(n)s.") % {"n": gpus(over.missing)}
        return {
            "tone": "bad",
            "case": "over",
            "head": head,
            "text": str(level_error("n", over, option, policy).detail),
        }
    if plan is not None and plan.outcome == "refused":
        return {
            "tone": "bad",
            "case": "refused",
            "head": _("The policy refuses this."),
            "text": ", ".join(plan.matched),
        }
    if not option.admission.fits and option.admission.blocking is not None:
        text = str(level_error("n", option.admission.blocking, option, policy).detail)
        return {"tone": "warn", "case": "wait", "head": _("Would wait for quota."), "text": text}
    if option.free < option.charge:
        text = _("%(free)s of %(n)s are free now.") % {"free": gpus(option.free), "n": gpus(option.charge)}
        return {
            "tone": "warn",
            "case": "wait",
            "head": _("Fits the quota, would wait for GPUs."),
            "text": text,
        }
    if auto:
        text = _("Within the guarantee: nobody needs to approve.")
        if option.over_guarantee:
            text = _("Nobody needs to approve.")
        return {
            "tone": "ok",
            "case": "auto",
            "head": _("Fits. Starts at once if a node has room."),
            "text": text,
        }
    return {"tone": "ok", "case": "now", "head": _("Fits. Can start after approval."), "text": ""}


def _lines(
    option: Option, verdict: Verdict, cleaned: Mapping[str, Any], policy: Policy, user: Any
) -> dict[str, Any]:
    department = cleaned["department"]
    ask = option.charge * at_once_of(cleaned)
    own = max(0, min(ask, option.guaranteed - option.used))
    length = review_length(cleaned)
    return {
        "option": option,
        "department": department,
        "ask": ask,
        "after": option.used + ask,
        "own": own,
        "borrowed": ask - own,
        "levels": [
            {"name": policy.tree.rows[pk].name, "left": available(option.tree, pk)}
            for pk in reversed(policy.tree.ancestors(department.pk))
        ]
        + [{"name": _("pool"), "left": available(option.tree, INSTALLATION)}],
        "blocking": option.admission.blocking,
        "blocking_text": str(level_error("n", option.admission.blocking, option, policy).detail)
        if option.admission.blocking is not None
        else "",
        "cost": verdict.dearest.cost_micro if verdict.dearest is not None else None,
        "gpu_ms": gpu_ms_of(option, cleaned, length),
        "several": len(verdict.options) > 1,
        "steps": _steps(verdict, cleaned, policy, user),
        "rules": ", ".join(verdict.plan.matched) if verdict.plan is not None else "",
    }


def _steps(verdict: Verdict, cleaned: Mapping[str, Any], policy: Policy, user: Any) -> Any:
    """Approvers to come, by name; None where nobody needs to agree; a text where nobody could."""
    if verdict.plan is None or not verdict.plan.steps:
        return None
    deciders = Deciders.of_page(policy)
    subject = CapacityRequest(requester=user, last_editor=user, department=cleaned["department"])
    try:
        wanted = wanted_steps(verdict.plan, subject, deciders)
    except DomainError as error:
        return [{"who": str(error.detail), "role": "", "rule": ""}]
    barred = deciders.barred(subject)
    out = []
    for want in wanted:
        if want.role == "lead":
            people = [
                u for u in deciders.bindings.get("lead", {}).get(want.department_id, []) if u not in barred
            ]
        else:
            people = deciders.holders(want.role, department_id=cleaned["department"].pk, barred=barred)
        names = deciders.names_of(people)
        shown = present.listed(names[:2]) + (
            _(" or %(n)s more") % {"n": len(names) - 2} if len(names) > 2 else ""
        )
        out.append(
            {"who": shown, "role": role_word(want.role), "rule": want.rule, "hours": want.timeout_hours}
        )
    return out


def several_text(cleaned: Mapping[str, Any]) -> str:
    """What a series comes to, in a sentence; "" for a single request."""
    if cleaned["series"] == CapacityRequest.Series.ARRAY:
        return _("%(n)s members, %(k)s at once") % {
            "n": cleaned["array_count"],
            "k": cleaned["array_at_once"],
        }
    if cleaned["series"] == CapacityRequest.Series.WINDOW:
        rule = weekly_of(cleaned["window"])
        coming = next(occurrences(rule, now(), now() + timedelta(days=740)), None)
        first = when(coming.start) if coming is not None else "–"
        return _("%(n)s windows, the next at %(first)s") % {"n": count(rule), "first": first}
    if cleaned["series"] == CapacityRequest.Series.SERVICE:
        least, most = cleaned["replicas_min"], cleaned["replicas_max"]
        return (
            _("%(n)s replicas") % {"n": most}
            if least == most
            else _("%(least)s to %(most)s replicas") % {"least": least, "most": most}
        )
    return ""


def _options(verdict: Verdict) -> list[dict[str, Any]]:
    """The flavours that meet a requirement, in the order in which they would be tried."""
    return [
        {
            "name": o.flavour.name,
            "left": max(0, o.guaranteed - o.used),
            "more": max(0, o.admission.available - max(0, o.guaranteed - o.used)),
            "free": o.free,
            "cost": o.cost_micro,
            "fits": o.admission.fits and o.never is None,
        }
        for o in verdict.options
    ]


def _table(values: Mapping[str, Any], offered: list[GpuFlavour]) -> list[dict[str, Any]]:
    """Why each flavour does not meet a requirement that none meets."""
    need = values.get("requirement") or {}
    if not isinstance(need, Mapping) or not need or not isinstance(need.get("memory_mib", 0), int):
        return []
    words = {
        "memory": _("too little memory"),
        "nvlink": _("no NVLink"),
        "fp8": _("no FP8"),
        "mig": _("no MIG"),
        "model": _("other model"),
    }
    return [
        {"name": f.name, "why": present.listed(words[code] for code in unmet(f, need))}
        for f in offered
        if unmet(f, need)
    ][:12]


def api_call_of(cleaned: Mapping[str, Any]) -> str:
    """The API call that asks the same; what is left at its default is left out."""
    body: dict[str, Any] = {}
    if cleaned["flavour"] is not None:
        body["flavour"] = cleaned["flavour"].code
    else:
        body["requirement"] = {name: value for name, value in cleaned["requirement"].items() if value}
    if cleaned["shape"] == "fraction":
        body |= {"shape": "fraction", "fraction_milli": cleaned["fraction_milli"] or 0}
        body["fraction_mib"] = cleaned["fraction_mib"] or 0
    elif cleaned["shape"] == "mig":
        body |= {"shape": "mig", "mig_profile": cleaned["mig_profile"], "mig_count": cleaned["mig_count"]}
    else:
        body["gpus_per_node"] = cleaned["gpus_per_node"]
        if cleaned["nodes"] > 1:
            body["nodes"] = cleaned["nodes"]
    if cleaned["window"]:
        body["window"] = {name: value for name, value in cleaned["window"].items() if value}
    elif cleaned["duration_s"]:
        body["duration_s"] = cleaned["duration_s"]
    for name, default in OFTEN_LEFT.items():
        if cleaned[name] != default:
            body[name] = cleaned[name]
    body["interruptible"] = bool(cleaned["interruptible"])
    return f"POST /api/v1/requests/ {json.dumps(body, ensure_ascii=False)}"


__all__ = ["api_call_of", "hours", "lent_now", "panel", "when"]
