"""``manage.py replay``: recorded workloads in, decisions out, judged by the traces' own checker."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError

from pool.engine.replay_nodes import TraceError, history_mix, read_nodes, read_tasks, replay_nodes

TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"
needs_traces = pytest.mark.skipif(not TRACES.exists(), reason="needs ../shared/traces")

NODES = "node_id,cpu_milli,memory_mib,gpu,model\nn1,8000,1000,2,T4\nn2,8000,1000,2,V100\n"
HEADER = "seq,task_id,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos\n"


def replay(out: Path, **files: Path | None) -> dict[str, Any]:
    answer = StringIO()
    call_command(
        "replay", out=str(out), stdout=answer, **{k: str(v) for k, v in files.items() if v is not None}
    )
    return json.loads(answer.getvalue())


def judged(nodes: Path, tasks: Path, out: Path) -> dict[str, Any]:
    """What the traces' checker says."""
    done = subprocess.run(
        [sys.executable, TRACES / "verify.py", nodes, tasks, out, "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


@pytest.mark.shared
@needs_traces
@pytest.mark.parametrize(
    ("fleet", "tasks", "history", "at_full", "at_end"),
    [
        ("nodes", "tasks_seed1", "tasks_seed2", 95.9, 96.0),
        ("nodes", "tasks_seed1", None, 95.8, 95.95),
        ("nodes", "tasks_gpuspec33_seed2", "tasks_gpuspec33_seed1", 95.0, 95.5),
        ("nodes_mini", "tasks_mini_seed1", "tasks_mini_seed2", 94.0, 95.2),
        ("nodes_mini", "tasks_mini_gpuspec33_seed2", "tasks_mini_gpuspec33_seed1", 92.0, 93.5),
    ],
)
def test_a_real_workload_fills_a_real_fleet(
    tmp_path: Path, fleet: str, tasks: str, history: str | None, at_full: float, at_end: float
) -> None:
    nodes, asked, out = TRACES / f"{fleet}.csv", TRACES / f"{tasks}.csv", tmp_path / "placements.csv"
    told = replay(out, nodes=nodes, tasks=asked, history=TRACES / f"{history}.csv" if history else None)
    found = judged(nodes, asked, out)
    assert (found["valid"], found["violations"], found["rejected_though_it_fitted"]) == (True, 0, 0)
    assert found["alloc_at_arrived"]["100"] >= at_full
    assert found["alloc_at_arrived"]["130"] >= at_end
    assert (told["placed"], told["tasks"]) == (found["placed"], found["tasks"])
    assert told["allocated_percent"] == pytest.approx(found["alloc_pct"], abs=0.001)


@pytest.mark.shared
@needs_traces
def test_the_same_trace_gives_the_same_placements() -> None:
    def rows(name: str) -> list[dict[str, str]]:
        with (TRACES / name).open(newline="") as file:
            return list(csv.DictReader(file))

    tasks, past = read_tasks(rows("tasks_mini_seed1.csv")), read_tasks(rows("tasks_mini_seed2.csv"))
    nodes = read_nodes(rows("nodes_mini.csv"))
    once = list(replay_nodes(nodes, tasks, history_mix(past), lambda: 0.0))
    again = list(replay_nodes(nodes[::-1], tasks, history_mix(reversed(past)), lambda: 0.0))
    assert once == again
    assert len(once) == len(tasks)


def test_each_task_is_decided_once_in_order_of_arrival(tmp_path: Path) -> None:
    nodes, tasks, out = tmp_path / "nodes.csv", tmp_path / "tasks.csv", tmp_path / "out.csv"
    nodes.write_text(NODES)
    tasks.write_text(
        HEADER
        + "3,late,1000,10,2,1000,,LS\n"  # nothing has two cards free by then
        + "0,tied,1000,10,1,1000,V100,LS\n"
        + "1,half,1000,10,1,500,T4|P100,LS\n"
        + "2,host,7000,10,0,0,,LS\n"
        + "4,huge,9000,10,0,0,,LS\n"
    )
    told = replay(out, nodes=nodes, tasks=tasks)
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["task_id"], row["node_id"], row["gpu_ids"]) for row in rows] == [
        ("tied", "n2", "0"), ("half", "n1", "0"), ("host", rows[2]["node_id"], ""), ("late", "", ""), ("huge", "", ""),
    ]  # fmt: skip
    assert rows[2]["node_id"] in ("n1", "n2")
    assert all(float(row["decision_ms"]) > 0 for row in rows)
    assert (told["tasks"], told["placed"], told["allocated_percent"]) == (5, 3, 37.5)


def test_a_task_that_names_no_memory_takes_none(tmp_path: Path) -> None:
    nodes, tasks, out = tmp_path / "nodes.csv", tmp_path / "tasks.csv", tmp_path / "out.csv"
    nodes.write_text(NODES.replace("n2,8000,1000,2,V100\n", ""))
    tasks.write_text(HEADER + "0,a,100,0,2,1000,,LS\n1,b,100,1000,0,0,,LS\n")
    assert replay(out, nodes=nodes, tasks=tasks)["placed"] == 2


def test_jobs_under_quotas(tmp_path: Path) -> None:
    """B borrows what A leaves idle and gives it back when A asks for its guarantee."""
    jobs, quotas, out = tmp_path / "jobs.csv", tmp_path / "quotas.csv", tmp_path / "events.csv"
    quotas.write_text("vc,nominal_gpus\nA,2\nB,2\n")
    jobs.write_text("job_id,submit_time,duration,gpu_num,vc\nb,0,100,4,B\na,10,20.5,2,A\n")
    told = replay(out, jobs=jobs, quotas=quotas)
    assert out.read_text().splitlines() == [
        "t,job_id,event", "0,b,start", "10,b,preempt", "10,a,start", "30.5,a,finish", "30.5,b,start", "120.5,b,finish",
    ]  # fmt: skip
    assert (told["preemptions"], told["lost_gpu_hours"]) == (1, round(40 / 3600, 3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": "nodes.csv"}, "wanted --nodes and --tasks"),
        ({"nodes": "nodes.csv", "tasks": "tasks.csv", "jobs": "tasks.csv"}, "wanted --nodes and --tasks"),
        (
            {"jobs": "tasks.csv", "quotas": "tasks.csv"},
            "columns missing: job_id, submit_time, duration, gpu_num, vc",
        ),
        ({"nodes": "absent.csv", "tasks": "tasks.csv"}, "No such file"),
        ({"nodes": "tasks.csv", "tasks": "tasks.csv"}, "columns missing: node_id, gpu, model"),
        ({"nodes": "nodes.csv", "tasks": "bad.csv"}, "row 2: gpu_milli 1500 is not within 1 to 1000"),
        ({"nodes": "nodes.csv", "tasks": "binary.csv"}, "not a CSV file"),
    ],
)
def test_what_cannot_be_read_is_told_and_nothing_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("nodes.csv").write_text(NODES)
    Path("tasks.csv").write_text(HEADER + "0,a,1,1,0,0,,\n")
    Path("bad.csv").write_text(HEADER + "0,a,1,1,1,1500,,\n")
    Path("binary.csv").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(CommandError, match=message):
        call_command("replay", out="out.csv", **options)
    assert not Path("out.csv").exists()


def test_rows_that_make_no_sense_name_their_line() -> None:
    row = {"node_id": "a", "cpu_milli": "1", "memory_mib": "1", "gpu": "1", "model": "T4"}
    with pytest.raises(TraceError, match="row 3: node a is there twice"):
        read_nodes([row, row])
    with pytest.raises(TraceError, match="row 2: cpu_milli is not a whole number: '-1'"):
        read_nodes([row | {"cpu_milli": "-1"}])
    with pytest.raises(TraceError, match="row 2: task_id is missing"):
        read_tasks([{"task_id": "", "cpu_milli": "1", "memory_mib": "1", "num_gpu": "0"}])
