"""The case files, one test each: what a case expects is what the engines answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pool.engine.cases import run_case
from tests.pool.engine.judge import judge

FOLDER = Path(__file__).parents[2] / "data" / "cases"
FILES = ("cases_quota", "cases_fairshare", "cases_preemption", "cases_gang_backfill")
BINDING = ("invariant", "formula", "policy")
BY_SERVICES = {"timeline"}
"""Kinds that scenario tests of the running services judge."""
NOT_YET = {"cluster"}


def load() -> list[dict[str, Any]]:
    found = [
        case
        for name in FILES
        for case in json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))["cases"]
    ]
    return [case for case in found if case["kind"] not in BY_SERVICES | NOT_YET]


CASES = load()


@pytest.mark.parametrize("case", CASES, ids=[f"{case['strength']}-{case['id']}" for case in CASES])
def test_case(case: dict[str, Any]) -> None:
    outcome = run_case(case)
    assert outcome["reasons"] == []
    assert judge(case, outcome["result"]) is None


def test_all_cases_of_the_kinds_are_run() -> None:
    assert len([case for case in CASES if case["id"].startswith("qt-")]) == 23
    assert len([case for case in CASES if case["kind"] == "queue_level"]) == 44


def test_victims_come_with_the_reason_that_holds() -> None:
    for case in CASES:
        if case["kind"] == "queue_level":
            victims = run_case(case)["result"]["victims"]
            assert sorted(victim["reason"] for victim in victims) == sorted(
                victim["reason"] for victim in case["expected"]["victims"]
            ), case["id"]


def test_unknown_kind_says_so() -> None:
    assert run_case({"id": "x", "kind": "sorcery"}) == {
        "id": "x", "result": None, "reasons": ["kind_not_supported"],
    }  # fmt: skip


def test_malformed_case_is_told_not_raised() -> None:
    outcome = run_case({"id": "x", "kind": "cap", "queues": []})
    assert outcome["result"] is None
    assert outcome["reasons"] == ["case_malformed: 'request'"]
