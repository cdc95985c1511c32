"""Judge cleaned wishes before they become a request: could it ever start, what does it cost, who must
agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from django.utils.translation import gettext as _

from portal.accounts.models import User
from portal.accounts.policy import Policy
from portal.kernel.clock import now
from portal.kernel.errors import Blocked, Invalid
from portal.kernel.units import cost_micro, gpus_from_milli
from quotas.engine import approval
from quotas.engine.available import LevelCheck
from quotas.engine.recurrence import total_seconds
from quotas.engine.timetable import replica_seconds
from quotas.models import CapacityRequest, GpuFlavour
from quotas.selectors.approvers import Deciders
from quotas.selectors.fit import Option, Verdict, approval_asks, assess, department_codes
from quotas.selectors.shapes import AskShape
from quotas.selectors.trees import INSTALLATION
from quotas.selectors.user_limits import limits_of
from quotas.services.approval_policy import policy_default_ensure
from quotas.services.approval_steps import Wanted, wanted_steps
from quotas.services.asking_series import timetable_of, weekly_of

JUDGED_FIELDS = frozenset(
    {"charge_milli", "options", "cost_at_most_micro", "over_quota", "policy_rule", "review_span_s"}
)
"""Fields of a request that are judged, not asked for."""


@dataclass(slots=True)
class Judged:
    """What is written with the request: ``fields`` of the model, the steps to make, the rule that decided,
    and facts for its history.
    """

    fields: dict[str, Any]
    steps: list[Wanted]
    rule: str
    facts: dict[str, Any] = field(default_factory=dict)
    verdict: Verdict | None = None


def verdict_of(cleaned: Mapping[str, Any], *, policy: Policy) -> Verdict:
    """Options and approval plan of cleaned wishes; refuses nothing (the form's panel asks here)."""
    shape = AskShape.of(cleaned)
    department = cleaned["department"]
    length = review_length(cleaned)
    options = assess(
        department_id=department.pk,
        flavours=list(cleaned["flavours"]),
        shape=shape,
        duration_s=length,
        interruptible=cleaned["interruptible"],
        moment=now(),
        site_code=cleaned["site_code"],
        smallest=smallest_part(cleaned),
    )
    for option in options:
        option.cost_micro = cost_of(option, cleaned, length)
    verdict = Verdict(options)
    asks = approval_asks(
        options,
        departments=department_codes(policy.tree, department.pk),
        duration_s=None if cleaned["is_service"] else cleaned["duration_s"],
        work_class=cleaned["work_class"],
        interruptible=cleaned["interruptible"],
        nodes=cleaned["nodes"],
        at_once=at_once_of(cleaned),
    )
    startable = [a for a, o in zip(asks, options, strict=True) if o.never is None and not o.too_big]
    verdict.asks = startable or asks
    if verdict.asks:
        verdict.dearest = approval.dearest(verdict.asks)
        rules = approval.parse_policy(policy_default_ensure().rules)
        verdict.plan = approval.evaluate(rules, verdict.dearest)
    return verdict


def judge(cleaned: Mapping[str, Any], *, user: User, policy: Policy) -> Judged:
    """The judgement that submission acts on; raises Blocked with the sum where it could never start or the
    policy refuses, Invalid where it passes the person's limits, Conflict where nobody could approve.
    """
    shape = AskShape.of(cleaned)
    if shape.shape == CapacityRequest.Shape.CPU:
        return Judged({"charge_milli": 0, "options": [], "policy_rule": "no-gpu"}, [], "no-gpu")
    verdict = verdict_of(cleaned, policy=policy)
    plan, dearest = verdict.plan, verdict.dearest
    if plan is None or dearest is None:
        raise Invalid.field("flavour", _("No card of it can give this shape."))
    usable = [o for o in verdict.options if o.never is None and not o.too_big]
    if not usable:
        first = verdict.options[0]
        if first.never is not None:
            raise level_error("never_fits", first.never, first, policy)
        raise Invalid.field(
            "gpus_per_node", _("The pool maximum is {n}.").format(n=gpus_from_milli(first.installed))
        )
    if plan.outcome == "refused":
        over = next((o for o in usable if o.over_cap is not None), None)
        if over is not None and over.over_cap is not None:
            raise level_error("over_cap", over.over_cap, over, policy)
        raise Blocked(
            code="policy_refuses",
            detail=_("The approval policy refuses this: rule {rule}.").format(rule=", ".join(plan.matched)),
            extra={"rules": list(plan.matched)},
        )
    charge = max(o.charge for o in usable) * at_once_of(cleaned)
    _person_limits(user, _least(charge, cleaned), cleaned)
    subject = CapacityRequest(requester=user, last_editor=user, department=cleaned["department"])
    steps = wanted_steps(plan, subject, Deciders.load(policy.tree)) if plan.steps else []
    named: GpuFlavour | None = cleaned["flavour"]
    rule = ", ".join(plan.matched)[:80]
    fields = {
        "charge_milli": charge,
        "options": [] if named is not None else [o.flavour.code for o in usable],
        "cost_at_most_micro": dearest.cost_micro,
        "over_quota": dearest.over_guarantee,
        "policy_rule": rule,
        "review_span_s": review_length(cleaned) if cleaned["is_service"] else None,
    }
    facts = {
        "rules": list(plan.matched),
        "charge_milli": charge,
        "cost_at_most_micro": dearest.cost_micro,
        "options": [o.flavour.code for o in usable],
    }
    return Judged(fields, steps, rule, facts, verdict)


def level_error(code: str, check: LevelCheck, option: Option, policy: Policy) -> Blocked:
    """Blocked with the level's name and the sum; says whether a change of quota or another ask would help."""
    row = policy.tree.rows.get(check.level) if isinstance(check.level, int) else None
    level = row.name if row is not None else _("The installation")
    numbers = {name: gpus_from_milli(getattr(check, name)) for name in ("limit", "used", "requested")}
    texts = {
        "hard_cap": _("{level}: {used} used + {requested} asked > {limit}, its hard cap for {flavour}."),
        "guarantee": _(
            "{level}: {requested} asked > {limit} guaranteed for {flavour}. Work that may not be interrupted has to "
            "fit within the guarantee: allow interruption, or ask for less."
        ),
        "borrow_limit": _(
            "{level}: {used} used + {requested} asked > {limit}, its quota and borrow limit for {flavour}."
        ),
        "subtree_quota": _("{level}: {used} used + {requested} asked > {limit} of {flavour} there."),
    }
    return Blocked(
        code=code,
        detail=texts[check.rule].format(level=level, flavour=option.flavour.name, **numbers),
        blocking={"level": level, "limit": check.limit, "used": check.used, "requested": check.requested},
        extra={
            "rule": check.rule,
            "department": None if check.level == INSTALLATION or row is None else str(row.uid),
            "flavour": option.flavour.code,
        },
    )


def _least(charge: int, cleaned: Mapping[str, Any]) -> int:
    """What it starts with at the least: an elastic gang may begin with fewer nodes."""
    nodes, least = cleaned.get("nodes") or 1, cleaned.get("nodes_min")
    return charge if least is None else charge * min(nodes, max(1, least)) // nodes


def _person_limits(user: User, charge: int, cleaned: Mapping[str, Any]) -> None:
    limits = limits_of(user.pk)
    most = limits["gpus_at_once_milli"]
    if most is not None and charge > most:
        raise Invalid.field(
            "gpus_per_node",
            _("Your limit is {n} GPUs at once.").format(n=gpus_from_milli(most)),
            "user_limit",
        )
    month = limits["gpu_ms_per_month"]
    length = review_length(cleaned)
    if month is not None and length is not None and charge * length > month:  # of one round of an array
        raise Invalid.field(
            "duration_s",
            _("Your limit is {n} GPU-hours a month; this asks {asked}.").format(
                n=f"{month / 3_600_000:g}", asked=f"{charge * length / 3_600_000:g}"
            ),
            "user_limit",
        )


def review_length(cleaned: Mapping[str, Any]) -> int | None:
    """Seconds for which the cost is told: the duration, or until a service's review date."""
    if not cleaned["is_service"]:
        length: int | None = cleaned["duration_s"]
        return length
    review = cleaned["review_at"]
    return max(0, int((review - now()).total_seconds())) if review is not None else None


def at_once_of(cleaned: Mapping[str, Any]) -> int:
    """How many equal members may hold GPUs at once, each of the shape asked. A service's shape counts all its
    replicas already.
    """
    return int(cleaned["array_at_once"]) or 1


def smallest_part(cleaned: Mapping[str, Any]) -> AskShape:
    """The least that has to fit at once for any of it to start: the smallest gang, or a single replica."""
    shape = AskShape.of(cleaned)
    if cleaned["series"] == CapacityRequest.Series.SERVICE:
        return replace(shape, nodes=1)
    return replace(shape, nodes=cleaned["nodes_min"]) if cleaned["nodes_min"] else shape


def cost_of(option: Option, cleaned: Mapping[str, Any], length_s: int | None) -> int | None:
    """What all of it costs at most: every member of an array, every window, every replica by its timetable."""
    gpu_ms = gpu_ms_of(option, cleaned, length_s)
    if option.rate_micro is None or gpu_ms is None:
        return None
    return cost_micro(gpu_ms, option.rate_micro)


def gpu_ms_of(option: Option, cleaned: Mapping[str, Any], length_s: int | None) -> int | None:
    """GPU-milliseconds of all of it at most; None without an end. Milli-GPU × seconds are GPU-milliseconds."""
    if length_s is None:
        return None
    if cleaned["series"] == CapacityRequest.Series.WINDOW:
        return option.charge * total_seconds(weekly_of(cleaned["window"]))
    if cleaned["timetable"] and cleaned["review_at"] is not None:
        each = option.charge // int(cleaned["nodes"])
        return each * replica_seconds(timetable_of(cleaned["timetable"]), now(), cleaned["review_at"])
    return option.charge * length_s * int(cleaned["array_count"] or 1)
