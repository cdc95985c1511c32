"""The approval policy: rules in words, a test with a sample request, a new version published from its
data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import pgettext
from django.views.decorators.http import require_http_methods, require_POST

from portal.accounts.policy import Policy
from portal.kernel.errors import DomainError, Invalid
from portal.ops.actor import actor_of
from portal.web.actors import actor_word
from quotas.engine.approval import Ask, Condition, Rule, evaluate, parse_policy
from quotas.models import ApprovalPolicy, AskRule, CapacityRequest
from quotas.services.approval_policy import policy_default_ensure, policy_publish
from quotas.services.ask_rules import ask_rule_set
from quotas.web import present
from quotas.web.words import gpus, money, number

OPS = {"lt": "<", "le": "≤", "gt": ">", "ge": "≥", "eq": "=", "ne": "≠"}


@login_required
@require_http_methods(["GET", "POST"])
def approval_policy(request: HttpRequest) -> HttpResponse:
    """Read for administrators, auditors and leads; published by administrators."""
    policy = request.policy  # type: ignore[attr-defined]
    policy.require(policy.has("pool_admin", "auditor", "lead", "finance"))
    current = policy_default_ensure()
    text, error = json.dumps(current.rules, indent=2, ensure_ascii=False), None
    if request.method == "POST":
        text = request.POST.get("rules", "")
        try:
            made = policy_publish(
                acting_user=actor_of(request),
                policy=policy,
                rules=_json(text),
                name=request.POST.get("name", "").strip() or "policy",
                base_version=int(v) if (v := request.POST.get("base", "")).isdecimal() else None,
            )
            messages.success(request, _("Version %(n)s is in force.") % {"n": made.pk})
            return HttpResponseRedirect(reverse("quotas:policy"))
        except DomainError as problem:
            if problem.status == 403:
                raise
            error = problem
    rules = parse_policy(current.rules)
    sample = _sample(request.GET)
    plan = evaluate(rules, sample) if sample is not None else None
    hits = _hits()
    context = {
        "current": current,
        "rules": [_row(n, rule, plan.matched if plan else (), hits) for n, rule in enumerate(rules, 1)],
        "firsts": sum(rule.kind == "first" for rule in rules),
        "text": text,
        "error": error,
        "may_publish": policy.administers_pool,
        "versions": ApprovalPolicy.objects.order_by("-id")[:20],
        "sample": request.GET
        if sample is not None
        else {"gpus": "8", "hours": "24", "cost": "", "class": "training"},
        "plan": plan,
        "plan_steps": [f"{role_words()[step.role]}, {step.timeout_hours} {_('h')}" for step in plan.steps]
        if plan
        else [],
        "by": actor_word(current.published_by_name),
        "ask_rules": AskRule.objects.select_related("department").order_by("department__name", "id"),
        "ask_departments": department_options(policy),
    }
    return render(request, "quotas/policy.html", context, status=error.status if error is not None else 200)


def department_options(policy: Policy) -> list[tuple[str, str]]:
    """Departments whose highest priority the person may set: (uid, path)."""
    led = policy.scope("lead", "pool_admin")
    return [
        (str(row.uid), policy.tree.path(row.pk))
        for _depth, row in policy.tree.ordered()
        if row.is_open and row.pk in led
    ]


@login_required
@require_POST
def ask_rule_save(request: HttpRequest) -> HttpResponse:
    """Set or take away the highest priority that a department's people may ask."""
    policy = request.policy  # type: ignore[attr-defined]
    uid, typed = request.POST.get("department", ""), request.POST.get("priority_most", "").strip()
    row = next((one for one in policy.tree.rows.values() if str(one.uid) == uid), None)
    try:
        if row is None:
            raise Invalid.field("department", _("Choose a department."))
        if typed and not typed.isdecimal():
            raise Invalid.field("priority_most", _("A priority lies between 0 and 100."))
        ask_rule_set(
            acting_user=actor_of(request),
            policy=policy,
            department=row,
            priority_most=int(typed[:9]) if typed else None,
        )
        messages.success(request, _("Saved."))
    except DomainError as error:
        if error.status == 403:
            raise
        texts = [str(problem["detail"]) for problem in error.errors] or [str(error.detail)]
        messages.error(request, " ".join(texts))
    return HttpResponseRedirect(reverse("quotas:policy"))


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise Invalid(
            code="policy_invalid", detail=_("This is no JSON: %(why)s.") % {"why": error}, errors=[]
        ) from None


def _hits() -> dict[str, int]:
    """How many requests each rule decided lately (the newest 1,000)."""
    found: dict[str, int] = {}
    for rules in (
        CapacityRequest.objects.exclude(policy_rule="")
        .order_by("-id")
        .values_list("policy_rule", flat=True)[:1000]
    ):
        for code in rules.split(", "):
            found[code] = found.get(code, 0) + 1
    return found


def role_words() -> dict[str, str]:
    """Who decides, in words, by the policy's own role names."""
    return {"lead": _("lead of the department"), "admin": _("administrator"), "finance": _("finance")}


def _row(n: int, rule: Rule, matched: tuple[str, ...], hits: Mapping[str, int]) -> dict[str, Any]:
    roles = role_words()
    if rule.refuse:
        then = _("refused, with the sum; a quota change can be asked for")
    elif not rule.steps:
        then = pgettext("approval", "nobody")
    else:
        then = present.listed(f"{roles[s.role]}, {s.timeout_hours} {_('h')}" for s in rule.steps)
        then = then if rule.kind == "first" else f"+ {then}"
    return {
        "n": n,
        "code": rule.code,
        "kind": rule.kind,
        "when": [_condition(c) for c in rule.when] or [_("always")],
        "then": then,
        "hit": rule.code in matched,
        "count": hits.get(rule.code, 0),
    }


def _condition(c: Condition) -> str:
    """One condition in words."""
    if c.field == "over_cap":
        return _("used + asked > hard cap") if c.value else _("within the hard cap")
    if c.field == "over_guarantee":
        return _("above the guarantee") if c.value else _("within the guarantee")
    if c.field == "duration_ms" and c.op == "none":
        return _("no end (a service)") if c.value else _("with an end")
    if c.field == "cost_micro" and c.op == "none":
        return _("no price known") if c.value else _("price known")
    words = {
        "amount_milli": lambda v: _("%(n)s GPU") % {"n": gpus(int(v))},
        "duration_hours": lambda v: f"{number(int(v)) if float(v).is_integer() else v} {_('h')}",
        "cost_micro": lambda v: money(int(v)),
    }
    names = {
        "amount_milli": "", "duration_hours": "", "cost_micro": _("cost") + " ", "job_class": _("class") + " ",
        "flavour": _("flavour") + " ", "nodes": _("nodes") + " ", "interruptible": _("interruptible") + " ",
        "departments": _("department") + " ", "duration_ms": _("milliseconds") + " ",
    }  # fmt: skip
    value = c.value
    if isinstance(value, tuple):
        shown = ", ".join(str(v) for v in value)
    else:
        shown = words[c.field](value) if c.field in words else str(value)
    ops = {**OPS, "in": _("one of"), "not_in": _("none of"), "has": _("under"), "none": "="}
    return f"{names.get(c.field, c.field + ' ')}{ops[c.op]} {shown}"


def _sample(query: Mapping[str, str]) -> Ask | None:
    """The sample request of the test form; None until it was asked."""
    if "gpus" not in query:
        return None
    try:
        return Ask(
            amount_milli=round(float(query.get("gpus") or 0) * 1000),
            flavour="",
            duration_ms=round(float(query["hours"]) * 3_600_000) if query.get("hours") else None,
            cost_micro=round(float(query["cost"]) * 1_000_000) if query.get("cost") else None,
            over_guarantee="over" in query,
            over_cap="cap" in query,
            job_class=query.get("class", "training"),
        )
    except (ValueError, OverflowError):
        return None
