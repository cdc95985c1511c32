"""Every behaviour that was drawn from public bug reports (behaviours.json) has a test that names its id, or stands with
its reason in data/behaviours_not_fitting.json.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
BEHAVIOURS = TESTS.parents[1] / "shared" / "cases" / "behaviours.json"
NOT_FITTING = TESTS / "data" / "behaviours_not_fitting.json"
ID = re.compile(r"(?<![A-Za-z0-9])([PSG]\d{3})(?![A-Za-z0-9])", re.IGNORECASE)


def named_by(source: str) -> set[str]:
    """The ids that a test of a module names: in its name, its docstring, its parameters, or a comment in it."""
    lines, found = source.splitlines(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            found |= set(ID.findall("\n".join(lines[first - 1 : node.end_lineno])))
    return {one.upper() for one in found}


def test_an_id_counts_in_a_test_and_nowhere_else() -> None:
    source = '"""P001"""\n# P002\ndef helper():\n    "P003"\n\n\ndef test_p004_x_p005():\n    pass  # S006\n'
    assert named_by(source) == {"P004", "P005", "S006"}
    assert named_by("@parametrize(ids=['g090'])\nasync def test_x():\n    'P1000 xP007 P008y'\n") == {"G090"}


@pytest.mark.shared
@pytest.mark.skipif(not BEHAVIOURS.exists(), reason="needs ../shared/cases")
@pytest.mark.parametrize("kind", ["P", "S"])
def test_every_behaviour_is_tested_or_said_not_to_fit(kind: str) -> None:
    wanted = {row["id"] for row in json.loads(BEHAVIOURS.read_text("utf-8")) if row["id"][0] == kind}
    named = {one for path in sorted(TESTS.rglob("*.py")) for one in named_by(path.read_text("utf-8"))}
    reasons = json.loads(NOT_FITTING.read_text("utf-8"))
    assert all(len(reason) > 20 for reason in reasons.values())
    assert not named & set(reasons), "tested, and yet said not to fit"
    assert sorted(wanted - named - set(reasons)) == []
