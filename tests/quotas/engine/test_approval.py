"""Approval policy as data: which steps an ask needs, and which rule asked for them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quotas.engine.approval import (
    DEFAULT_POLICY,
    ApprovalPlan,
    Ask,
    PolicyError,
    Step,
    dearest,
    dump_policy,
    evaluate,
    parse_policy,
)

HOUR = 3_600_000
POLICY = parse_policy(DEFAULT_POLICY)
SMALL = Ask(amount_milli=4000, flavour="A100", duration_ms=12 * HOUR, cost_micro=1_000_000)


def test_small_ask_within_quota_passes_by_itself() -> None:
    assert evaluate(POLICY, SMALL) == ApprovalPlan("auto", (), ("small-within-guarantee",))


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"amount_milli": 4001}, "within-guarantee"),
        ({"duration_ms": 12 * HOUR + 1}, "within-guarantee"),
        ({"over_guarantee": True}, "borrows"),
    ],
)
def test_just_beyond_small_needs_the_lead(change: dict[str, int], rule: str) -> None:
    plan = evaluate(POLICY, replace(SMALL, **change))  # type: ignore[arg-type]
    assert plan == ApprovalPlan("steps", (Step(1, "lead", 24, rule),), (rule,))


def test_dear_and_endless_ask_collects_steps_in_the_order_of_roles() -> None:
    ask = Ask(
        amount_milli=8000, flavour="H100", duration_ms=None, cost_micro=5_000_000_001, over_guarantee=True
    )
    assert evaluate(POLICY, ask) == ApprovalPlan(
        "steps",
        (
            Step(1, "lead", 24, "borrows"),
            Step(2, "admin", 24, "long-lease"),
            Step(3, "finance", 8, "cost-5000"),
        ),
        ("borrows", "cost-5000", "long-lease", "service-no-end"),
    )


def test_over_cap_is_refused_whatever_else_holds() -> None:
    ask = replace(SMALL, over_cap=True, cost_micro=9_000_000_000)
    assert evaluate(POLICY, ask) == ApprovalPlan("refused", (), ("over-cap",))


def test_a_policy_with_a_gap_needs_the_lead() -> None:
    rules = parse_policy([{"code": "big", "when": [["amount_milli", "gt", 9000]], "steps": []}])
    assert evaluate(rules, SMALL) == ApprovalPlan("steps", (Step(1, "lead", 24, "no_rule"),), ("no_rule",))


def test_conditions_on_flavour_class_and_department() -> None:
    rules = parse_policy(
        [
            {"code": "scarce", "when": [["flavour", "in", ["H200", "H100"]]], "steps": [{"role": "admin"}]},
            {
                "code": "infer",
                "when": [["job_class", "eq", "inference"], ["departments", "has", "ads"]],
                "steps": [],
            },
        ]
    )
    assert evaluate(rules, replace(SMALL, flavour="H100")).matched == ("scarce",)
    assert (
        evaluate(rules, replace(SMALL, job_class="inference", departments=("ads", "root"))).outcome == "auto"
    )
    assert evaluate(rules, replace(SMALL, job_class="inference", departments=("bio",))).matched == (
        "no_rule",
    )


def test_dearest_flavour_is_judged() -> None:
    cheap, dear = replace(SMALL, flavour="T4", cost_micro=5), replace(SMALL, flavour="H100", cost_micro=6)
    unpriced = replace(SMALL, flavour="new", cost_micro=None)
    assert dearest([cheap, dear]).flavour == "H100"
    assert dearest([cheap, unpriced, dear]).flavour == "new"


def test_policy_round_trip() -> None:
    assert parse_policy(dump_policy(POLICY)) == POLICY


@pytest.mark.parametrize(
    ("data", "pointer"),
    [
        ("x", ""),
        ([1], "/0"),
        ([{"code": ""}], "/0/code"),
        ([{"code": "a", "kind": "last"}], "/0/kind"),
        ([{"code": "a", "then": []}], "/0/then"),
        ([{"code": "a", "when": [["size", "le", 1]]}], "/0/when/0/0"),
        ([{"code": "a", "when": [["nodes", "about", 1]]}], "/0/when/0/1"),
        ([{"code": "a", "when": [["nodes", "le", "many"]]}], "/0/when/0/2"),
        ([{"code": "a", "steps": [{"role": "king"}]}], "/0/steps/0/role"),
        ([{"code": "a", "steps": [{"role": "lead", "timeout_hours": 0}]}], "/0/steps/0/timeout_hours"),
        ([{"code": "a"}, {"code": "a"}], "/1/code"),
        ([{"code": "a", "refuse": True, "steps": [{"role": "lead"}]}], "/0/steps"),
    ],
)
def test_wrong_policy_says_where(data: object, pointer: str) -> None:
    with pytest.raises(PolicyError) as caught:
        parse_policy(data)
    assert caught.value.pointer == pointer
