"""The client by itself: what options mean, its words in two languages, what it keeps, on which Python it runs."""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pool.client import asking, build, cli, settings, words
from pool.client.cli import parser
from tests.pool.agent.conftest import python38


def options(*more: str) -> argparse.Namespace:
    return parser().parse_args(["run", *more, "--", "python", "train.py"])


@pytest.mark.parametrize(
    ("typed", "asked"),
    [
        ("1", {"shape": "whole", "gpus_per_node": 1}),
        ("8", {"shape": "whole", "gpus_per_node": 8}),
        ("0.3", {"shape": "fraction", "fraction_milli": 300, "gpus_per_node": 1}),
        (".25", {"shape": "fraction", "fraction_milli": 250, "gpus_per_node": 1}),
        ("0", {"shape": "cpu"}),
        ("0.125x2", {"shape": "fraction", "fraction_milli": 125, "gpus_per_node": 2}),
    ],
)
def test_gpu_counts(typed: str, asked: dict[str, Any]) -> None:
    assert asking.gpus(typed) == asked


@pytest.mark.parametrize("typed", ["00", "0x2", "0.0", "-1", "1.5", "0.1234", "x2", "0.5x", "two", ""])
def test_gpu_counts_that_are_none(typed: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        asking.gpus(typed)


def test_what_is_asked_of_the_installation() -> None:
    given = options("--gpu", "0.5", "--memory", "20", "--time", "90m", "--env", "A=b=c", "--keep")
    sent = asking.body(given, "python train.py", "command")
    assert re.fullmatch(r"[0-9a-f]{32}", sent.pop("client_token"))
    assert sent == {
        "shape": "fraction", "fraction_milli": 500, "gpus_per_node": 1, "fraction_mib": 20480, "nodes": 1,
        "requirement": {"memory_mib": 1}, "duration_s": 5400, "interruptible": False, "run_kind": "command",
        "purpose": "gpupool: python train.py", "command": "python train.py", "environment": {"A": "b=c"},
    }  # fmt: skip
    whole = asking.body(options("--memory", "40", "--flavour", "a100"), "x", "command")
    assert whole["flavour"] == "a100" and "requirement" not in whole and "fraction_mib" not in whole
    none = asking.body(options("--gpu", "0"), "x", "command")
    assert none["shape"] == "cpu" and "requirement" not in none and "gpus_per_node" not in none
    slices = asking.body(options("--gpu", "2", "--mig", "1g.10gb"), "x", "command")
    assert (slices["shape"], slices["mig_profile"], slices["mig_count"]) == ("mig", "1g.10gb", 2)
    with pytest.raises(asking.Usage):
        asking.body(options("--env", "NOVALUE"), "x", "command")


def test_every_sentence_has_its_chinese_with_the_same_values() -> None:
    said: set[str] = set()
    for name, source in build.members().items():
        if name.startswith("pool/client/"):
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in (
                    "say", "text", "tell",
                ):  # fmt: skip
                    first = node.args[0] if node.args else None
                    if isinstance(first, ast.Constant) and isinstance(first.value, str):
                        said.add(first.value)
    assert len(said) > 25 and said <= set(words.CHINESE), said - set(words.CHINESE)
    for english, chinese in words.CHINESE.items():
        assert set(re.findall(r"{(\w+)}", english)) == set(re.findall(r"{(\w+)}", chinese)), english


def test_the_token_is_kept_for_its_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUPOOL_CONFIG", str(tmp_path / "kept"))
    for name in ("GPUPOOL_URL", "GPUPOOL_TOKEN", "GPUPOOL_CA_FILE"):
        monkeypatch.delenv(name, raising=False)
    path = settings.save(settings.Settings("https://portal.example", "gpp_secret"))
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(tmp_path / "kept").st_mode) == 0o700
    assert settings.load() == settings.Settings("https://portal.example", "gpp_secret")
    for number in range(settings.MOST_RUNS + 5):
        settings.remember_run(f"R-{number}", "u", "f")
    assert len(settings.runs()) == settings.MOST_RUNS and "R-4" not in settings.runs()


def test_it_runs_on_python_38_and_says_what_it_lacks(tmp_path: Path) -> None:
    program = tmp_path / "gpupool"
    program.write_bytes(build.build())
    assert build.build() == program.read_bytes()
    for python in filter(None, (sys.executable, python38())):
        environment = {
            "HOME": str(tmp_path),
            "PATH": os.environ["PATH"],
            "LANG": "zh_CN.UTF-8",
            "PYTHONUTF8": "1",
        }
        run = [python, "-I", "-X", "utf8", str(program)]
        first = subprocess.run(
            [*run, "version"], env=environment, capture_output=True, text=True, check=False
        )
        assert (first.returncode, first.stdout) == (0, "0.1.0\n"), first.stderr
        second = subprocess.run([*run, "ls"], env=environment, capture_output=True, text=True, check=False)
        assert second.returncode == 1 and "尚未登录" in second.stderr


REQUEST = {
    "ref": "R-7", "uid": "u-7", "state": "queued", "flavour": "h800", "department": "vision", "image": "",
    "command": "python train.py\nsecond line", "run_kind": "command", "shape": "fraction", "fraction_milli": 300,
    "gpus_per_node": 1, "nodes": 1, "mig_profile": "", "mig_count": 0, "steps": [],
}  # fmt: skip
ENTRY = {
    "words": "2 GPUs are free, 4 are needed.", "position": 3, "of": 9, "start_from": "2026-12-01T10:00",
    "start_to": None, "basis": "plan",
}  # fmt: skip


class Answers:
    """The API as it would answer."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def get(self, path: str, **_query: Any) -> Any:
        if path.startswith("/queue/"):
            return ENTRY
        return {"results": self.rows} if path == "/requests/" else self.rows[0]


def test_ls_shows_what_is_open_in_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [REQUEST, {**REQUEST, "ref": "R-6", "state": "ended"}]
    assert asking.show_list(Answers(rows), False) == 0  # type: ignore[arg-type]
    (line,) = capsys.readouterr().out.splitlines()
    assert line.split()[:2] == ["R-7", "queued"] and line.endswith("python train.py")
    asking.show_list(Answers(rows), True)  # type: ignore[arg-type]
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["R-7", "R-6"]


def test_why_says_the_reason_the_place_and_the_expected_start(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "find_request", lambda api, ref: REQUEST)
    assert asking.why(Answers([REQUEST]), "R-7") == 0  # type: ignore[arg-type]
    said = capsys.readouterr().out
    assert said.startswith("R-7  queued") and ENTRY["words"] in said
    assert "  3/9\n" in said and "2026-12-01T10:00" in said and "(plan)" in said


def test_a_report_is_printed_as_the_installation_answers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, dict[str, Any]]] = []

    class Reports:
        def get(self, path: str, **query: Any) -> Any:
            asked.append((path, query))
            return {"rows": [{"department": "视觉"}]}

    given = parser().parse_args(["report", "usage", "--set", "month=2026-11"])
    assert cli._report(Reports(), given) == 0  # type: ignore[arg-type]
    assert asked == [("/reports/usage/", {"month": "2026-11"})]
    assert json.loads(capsys.readouterr().out) == {"rows": [{"department": "视觉"}]}
