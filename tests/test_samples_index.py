"""Every recorded or authored sample has a test that reads it; what is not read is named with its reason."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pool.executors.base import TerminalFailure
from pool.executors.slurm import read, text
from pool.executors.slurm.cli import CommandLine
from pool.executors.slurm.read import Gres
from pool.executors.slurm.settings import SlurmSettings

HERE = Path(__file__).resolve().parent
SAMPLES = HERE.parents[1] / "shared" / "samples"
# Read by this file; or by no code of ours, and why that is right.
NOT_ASKED = {
    "05_sinfo_json_v0041.json": "sinfo groups nodes: totals are per line; nodes are asked of scontrol",
    "07_sinfo_N_O.txt": "columns of fixed width cut long GRES and run into each other; no such text is asked",
}

pytestmark = [
    pytest.mark.shared,
    pytest.mark.skipif(not SAMPLES.is_dir(), reason="needs ../shared/samples"),
]


def names() -> list[str]:
    index = json.loads((SAMPLES / "INDEX.json").read_text(encoding="utf-8"))
    return [Path(row["file"]).name for part in ("real", "authored") for row in index[part]]


def test_each_sample_of_the_index_is_read_by_a_test() -> None:
    sources = {path: path.read_text(encoding="utf-8") for path in HERE.rglob("test_*.py")}
    known = {name: [p for p, t in sources.items() if _mentions(t, name)] for name in names()}
    unread = sorted(name for name, tests in known.items() if not tests)
    assert unread == [], "samples that no test reads"
    on_disk = {path.name for path in SAMPLES.rglob("*.*") if path.name != "INDEX.json"}
    assert on_disk == set(known), "the index and the folder differ"


def _mentions(source: str, name: str) -> bool:
    """By its whole name, its name without ending, or (captures of one exporter) its part after the exporter's name."""
    stem = name.rsplit(".", 1)[0]
    parts = [name, stem]
    if stem.startswith("nvsmi_exporter_") and "nvsmi_exporter_{" in source:
        parts.append(stem.removeprefix("nvsmi_exporter_"))
    return any(f'"{part}"' in source or f"/{part}" in source or f"{part}." in source for part in parts)


def test_copies_in_the_project_are_the_samples() -> None:
    for copy in sorted((HERE / "data" / "samples").rglob("*.*")):
        original = SAMPLES / "authored" / copy.relative_to(HERE / "data" / "samples")
        assert copy.read_bytes() == original.read_bytes(), copy.name


def test_totals_of_grouped_nodes_are_not_taken_for_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """05: an answer of `sinfo` that groups nodes is refused by its shape, and the nodes are asked one by one."""
    grouped = (SAMPLES / "authored" / "slurm" / "05_sinfo_json_v0041.json").read_text()
    one_by_one = (SAMPLES / "authored" / "slurm" / "02_scontrol_show_node_d.txt").read_text()
    asked: list[str] = []

    def run(self: CommandLine, words: list[str], stdin: str | None = None, **more: str) -> str:
        asked.append(words[0])
        return grouped if words[0] == "sinfo" else one_by_one

    monkeypatch.setattr(CommandLine, "_run", run)
    monkeypatch.setattr(CommandLine, "version", lambda self: (22, 5))
    transport = CommandLine(SlurmSettings())
    with pytest.raises(TerminalFailure):
        transport._json(["sinfo", "--json"], "nodes")
    found = {node.name: node for node in transport.nodes()}
    assert asked[-1] == "scontrol" and found["s01"].gres == (Gres("gpu", "a100", 4),)


def test_no_text_of_fixed_width_is_asked_and_the_signs_of_states_are_known() -> None:
    """07: the GRES of s05 is cut there; its states carry signs."""
    said = (SAMPLES / "authored" / "slurm" / "07_sinfo_N_O.txt").read_text().splitlines()
    states = {line.split()[0]: line.split()[1] for line in said[1:]}
    assert read.state_words([states["s04"]]) == {"down", "NOT_RESPONDING"}
    assert read.state_words([states["s09"]]) == {"idle", "POWERED_DOWN"}
    for path in (HERE.parent / "pool" / "executors" / "slurm").glob("*.py"):
        assert not re.search(r'"sinfo",(?! "--json")', path.read_text()), path.name


def test_the_cards_of_a_job_stand_on_its_detail_line() -> None:
    """08: which cards a job has is told by the line of its node alone."""
    said = (SAMPLES / "authored" / "slurm" / "08_scontrol_job_d.txt").read_text()
    [detail] = [line for line in said.splitlines() if " CPU_IDs=" in line]
    found = text.fields(detail.strip())
    assert read.gres(found["GRES"]) == (Gres("gpu", "a100", 2, (0, 3)),)
    assert read.hosts(found["Nodes"]) == ("s01",)
    head = text.fields(" ".join(line.strip() for line in said.splitlines() if "AllocTRES" in line))
    assert read.trackable(head["AllocTRES"])["gres/gpu"] == 2


def test_what_is_not_read_is_named_with_its_reason() -> None:
    assert set(NOT_ASKED) <= set(names())
    assert all(len(reason.split()) > 5 for reason in NOT_ASKED.values())
