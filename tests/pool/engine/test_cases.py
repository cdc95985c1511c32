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
OTHERWISE = {
    "pr-146": "a CPU-only job is not evicted: CPU and memory have caps, but no guarantee that could be claimed",
    "pr-148": "the same: the GPU job is reclaimed, the CPU-only one stays",
    "pr-150": "the same, with memory as the bottleneck",
}
"""Cases of strength source_specific that the product answers in another way, and why."""


def load() -> list[dict[str, Any]]:
    found = [
        case
        for name in FILES
        for case in json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))["cases"]
    ]
    return [case for case in found if case["kind"] not in BY_SERVICES]


CASES = load()


@pytest.mark.parametrize("case", CASES, ids=[f"{case['strength']}-{case['id']}" for case in CASES])
def test_case(case: dict[str, Any]) -> None:
    outcome = run_case(case)
    assert outcome["reasons"] == []
    difference = judge(case, outcome["result"])
    if case["id"] in OTHERWISE:
        assert case["strength"] == "source_specific"
        assert difference is not None
        assert difference.startswith("/workloads/"), "the end state itself must be possible"
    else:
        assert difference is None


def test_all_cases_of_the_kinds_are_run() -> None:
    assert len([case for case in CASES if case["id"].startswith("qt-")]) == 23
    assert len([case for case in CASES if case["kind"] == "queue_level"]) == 44


def test_at_least_85_percent_of_the_source_specific_cases_are_answered_alike() -> None:
    own = [case for case in CASES if case["strength"] == "source_specific"]
    assert len(own) >= 28
    assert len(OTHERWISE) <= 0.15 * len(own)


def test_a_what_if_runs_under_the_switches_it_names_and_tells_its_operations() -> None:
    case = next(case for case in CASES if case["id"] == "pr-132")
    plain = run_case({**case, "policy": {}})["result"]
    assert plain["ops"] == []
    assert plain["workloads"]["w03"]["outcome"] == "kept"
    fair = run_case({**case, "policy": {"rebalance": True}})["result"]
    assert [op["op"] for op in fair["ops"]] == ["evict", "place"]
    assert fair["ops"][0]["pods"] == ["w03/1"]
    assert fair["ops"][0]["figures"] == {
        "flavour": "gpu", "requested": 4000, "freed": 4000, "asking": "q2", "asking_used": 0, "asking_guarantee": 1000,
        "asking_share": 4000, "giving": "q1", "giving_used": 8000, "giving_guarantee": 1000, "giving_share": 4000,
    }  # fmt: skip
    assert run_case({**case, "policy": {"sorcery": 1}})["reasons"] == [
        "case_malformed: no such switch: sorcery"
    ]


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
