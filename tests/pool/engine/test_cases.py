"""The quota cases, one test each: what the case file expects is what the engines answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pool.engine.cases import run_case

FOLDER = Path(__file__).parents[2] / "data" / "cases"
SUPPORTED = {
    "available",
    "rollup",
    "cap",
    "flavour_choice",
    "division",
    "borrow_share",
    "admission_order",
    "level_fairshare",
    "decay",
    "backfill",
    "queueing",
    "partial",
}  # fmt: skip


def load(name: str) -> list[dict[str, Any]]:
    cases = json.loads((FOLDER / name).read_text(encoding="utf-8"))["cases"]
    return [case for case in cases if case["kind"] in SUPPORTED]


CASES = load("cases_quota.json") + load("cases_fairshare.json") + load("cases_gang_backfill.json")


def assert_same(want: Any, got: Any, path: str = "") -> None:
    """``got`` has all of ``want``; numbers to 1e-6."""
    if isinstance(want, dict):
        for key, value in want.items():
            assert key in got, f"{path}/{key} missing"
            assert_same(value, got[key], f"{path}/{key}")
    elif isinstance(want, int | float) and not isinstance(want, bool):
        assert got == pytest.approx(want, abs=1e-6, rel=1e-6), path
    elif path in ("/admitted", "/waiting"):
        assert sorted(got) == sorted(want), path
    else:
        assert got == want, path


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_case(case: dict[str, Any]) -> None:
    outcome = run_case(case)
    assert outcome["reasons"] == []
    assert_same(
        case["expected"] if case["kind"] != "level_fairshare" else {"level_fs": case["expected"]["level_fs"]},
        outcome["result"],
    )
    if case["kind"] == "available":
        assert outcome["result"]["probes"] == [probe["fits"] for probe in case.get("probes", [])]


def test_all_quota_cases_are_run() -> None:
    assert len([case for case in CASES if case["id"].startswith("qt-")]) == 23


def test_unknown_kind_says_so() -> None:
    assert run_case({"id": "x", "kind": "sorcery"}) == {
        "id": "x", "result": None, "reasons": ["kind_not_supported"],
    }  # fmt: skip


def test_malformed_case_is_told_not_raised() -> None:
    outcome = run_case({"id": "x", "kind": "cap", "queues": []})
    assert outcome["result"] is None
    assert outcome["reasons"] == ["case_malformed: 'request'"]
